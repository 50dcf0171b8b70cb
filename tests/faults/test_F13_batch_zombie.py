"""F13: what works on a batch stops for longer than its lease, and comes back when others have done its work."""

import signal
from pathlib import Path

from tests.support import processes
from tests.support.batches import chat_line, check_whole, client_of, look, submit, until
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {
    "batch.lease_s": 2,
    "batch.shard_lines": 1000,
    "batch.workers": 2,
    "batch.concurrency": 4,
    "gateway.workers": 2,
}


def test_what_comes_back_from_the_dead_changes_nothing(tmp_path: Path) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        yard.deploy("sim", options={"slots": 4, "ttft_ms": 10, "itl_ms": 10})
        client = client_of(yard)
        ids = [f"line-{at}" for at in range(120)]
        batch = submit(client, [chat_line(one, f"[[sim: tokens=16]] {one}") for one in ids])
        eventually(lambda: (look(client, batch.id) or batch).request_counts.completed > 5, 30, "it is under way")
        holder = yard.query("SELECT holder, token FROM batch_shards")[0]
        zombie = next(pid for pid in yard.plane_pids("batch") if holder["holder"][:7] in processes.command_of(pid))
        processes.send_signal(zombie, signal.SIGSTOP)
        eventually(
            lambda: yard.query("SELECT holder, token FROM batch_shards")[0]["token"] > holder["token"],
            30,
            "the other one takes over",
        )
        processes.send_signal(zombie, signal.SIGCONT)
        over = until(client, batch.id)
        assert over.status == "completed"
        assert check_whole(client, over, ids)[1] == []
        log = yard.data / "logs" / f"{holder['holder'][:7]}.log"
        eventually(lambda: "its lease is lost" in log.read_text(), 30, "its late write is refused")
        assert processes.is_alive(zombie), "it goes on with other work"
        eventually(yard.is_booked, 30, "all that was begun is settled")
        charged = yard.query("SELECT request_id FROM inference_requests WHERE cost_nanousd > 0")
        assert len(charged) == len(ids), "what both ran is charged once"
