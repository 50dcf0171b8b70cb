"""F12: ``kill -9`` of what works on a batch, and of everything it needs, at any moment."""

import random
import signal
from pathlib import Path

from tests.e2e.test_cli_commands import run
from tests.support import processes
from tests.support.batches import CHAT, chat_line, check_whole, client_of, look, submit, watch
from tests.support.waiting import eventually
from tests.support.yard import Yard

LINES = 1000
KILLS = 10
SETTINGS = {"batch.lease_s": 1, "batch.shard_lines": 100, "batch.workers": 2}


def test_a_batch_of_a_thousand_lines_survives_ten_kills_with_each_line_once_and_charged_once(tmp_path: Path) -> None:
    chance = random.Random(12)
    with Yard(tmp_path, SETTINGS) as yard:
        yard.deploy("sim", options={"slots": 8, "ttft_ms": 5, "itl_ms": 5})
        client = client_of(yard)
        ids = [f"line-{at}" for at in range(LINES)]
        batch = submit(client, [chat_line(one, f"[[sim: tokens=5]] {one}") for one in ids])
        killed, next_at = 0, 0

        def kill_now_and_then(seen: object) -> None:
            nonlocal killed, next_at
            done = seen.request_counts.completed  # type: ignore[attr-defined]
            if killed < KILLS and done >= next_at and (pids := yard.plane_pids("batch")):
                processes.send_signal(chance.choice(pids), signal.SIGKILL)
                killed += 1
                next_at = done + chance.randrange(1, LINES // (KILLS + 2))

        over = watch(client, batch.id, kill_now_and_then, within_s=240)
        assert over.status == "completed"
        assert killed == KILLS, f"the batch was over after {killed} kills"
        output, errors = check_whole(client, over, ids)
        assert errors == []
        assert [line["custom_id"] for line in output] == ids, "answers stand in the order of the questions"
        assert len({line["response"]["request_id"] for line in output}) == LINES
        eventually(yard.is_booked, 30, "all that was begun is settled")
        charged = yard.query("SELECT * FROM inference_requests WHERE cost_nanousd > 0")
        assert len(charged) == LINES, "one charge a line, however often it was run"
        used = sum(row["completion_tokens"] for row in charged)
        assert over.usage is not None
        assert (
            used
            == over.usage.output_tokens
            == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
        )
        folders = yard.data / "files" / "batches"
        eventually(lambda: not list(folders.glob("batch_*")), 30, "nothing is left behind")


def test_a_batch_goes_on_though_gateway_and_controller_are_killed(tmp_path: Path) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        yard.deploy("sim", options={"slots": 8, "ttft_ms": 10, "itl_ms": 5})
        client = client_of(yard)
        ids = [f"line-{at}" for at in range(400)]
        batch = submit(client, [chat_line(one, f"[[sim: tokens=5]] {one}") for one in ids], CHAT)
        plan = [(20, "gateway"), (120, "gateway"), (200, "control")]

        def kill_as_planned(seen: object) -> None:
            done = seen.request_counts.completed  # type: ignore[attr-defined]
            if plan and done >= plan[0][0] and (pids := yard.plane_pids(plan[0][1])):
                processes.send_signal(pids[0], signal.SIGKILL)
                plan.pop(0)

        over = watch(client, batch.id, kill_as_planned, within_s=120)
        assert not plan, f"never killed: {plan}"
        assert over.status == "completed"
        assert check_whole(client, over, ids)[1] == []
        eventually(yard.is_booked, 30, "all that was begun is settled")
        charged = yard.query("SELECT count(*) AS n FROM inference_requests WHERE cost_nanousd > 0")
        assert charged[0]["n"] == len(ids)


def test_a_batch_goes_on_over_a_rolling_restart(tmp_path: Path) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        yard.deploy("sim", options={"slots": 4, "ttft_ms": 10, "itl_ms": 5})
        client = client_of(yard)
        ids = [f"line-{at}" for at in range(400)]
        batch = submit(client, [chat_line(one, f"[[sim: tokens=10]] {one}") for one in ids])
        eventually(lambda: (look(client, batch.id) or batch).request_counts.completed > 20, 30, "it is under way")
        before = set(yard.plane_pids("batch"))
        restarted = run(yard, "restart")
        assert restarted.returncode == 0, restarted.stderr
        over = watch(client, batch.id, lambda _: None)
        assert over.status == "completed"
        assert check_whole(client, over, ids)[1] == [], "nobody fails because the platform is renewed"
        eventually(lambda: len(set(yard.plane_pids("batch")) - before) == 2, 30, "both workers are new")
