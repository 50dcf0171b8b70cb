"""An engine that sleeps: memory is given back without a stop, and the next request wakes it."""

from pathlib import Path

from tests.support.smollm import real_model
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {"gateway.load_wait_s": 60, "gateway.first_token_timeout_s": 60, "control.hang_timeout_s": 60}


def test_an_idle_replica_gives_its_memory_back_and_wakes_by_a_request(tmp_path: Path) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        order = {
            "model_name": "smol",
            "framework": "llamacpp",
            "model_artifact": real_model().as_uri(),
            "options": {"slots": 1, "context_length": 1024, "sleep_idle_s": 1},
        }
        assert yard.call("POST", "/v1/models/deploy", order).status == 202
        yard.wait_ready("smol", within_s=60)
        (engine,) = yard.engines("smol")
        answers(yard)  # right before the look: it sleeps after a second without a request
        awake = resident_bytes(engine.pid)
        eventually(lambda: resident_bytes(engine.pid) < awake / 2, 40, "it gives its memory back")

        def is_asleep() -> bool:
            tier = yard.get("/v1/endpoints/smol")["tier"]
            return tier["tier"] == "warm" and "asleep" in tier["reason"]

        eventually(is_asleep, 40, "the endpoint shows that it sleeps")
        answers(yard)
        assert [one.pid for one in yard.engines("smol")] == [engine.pid], "it woke, nothing was started"


def answers(yard: Yard) -> None:
    body = {"model": "smol", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    reply = yard.call("POST", "/v1/chat/completions", body, within_s=60)
    assert reply.status == 200, reply.body


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
