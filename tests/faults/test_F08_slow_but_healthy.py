"""F8: an engine that is saturated and answers its probes late is busy, not dead: it is left alone."""

import json
from pathlib import Path

from tests.support.engines import plan
from tests.support.load import Load, Outcome, chat
from tests.support.smollm import real_model
from tests.support.yard import Yard

SETTINGS = {"control.hang_timeout_s": 2.0, "gateway.queue_wait_s": 30, "gateway.first_token_timeout_s": 30}


async def test_a_saturated_engine_is_not_restarted(tmp_path: Path) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        yard.deploy("sim", options={"slots": 2, "ttft_ms": 1, "itl_ms": 20})
        (engine,) = yard.engines("sim")
        plan(yard, engine, "")
        async with Load(yard.port, yard.admin_key) as load:
            # Eight times as many as there are slots, for several hang time-outs: always somebody waits.
            sent = [load.start(chat("sim", f"[[sim: tokens=50]] {at}", stream=at % 2 == 0)) for at in range(16)]
            await load.finish(60)
        assert {one.outcome for one in sent} == {Outcome.COMPLETE}
        assert [one.pid for one in yard.engines("sim")] == [engine.pid]
        assert not yard.query("SELECT * FROM endpoint_events WHERE kind IN ('replica_killed', 'replica_failed')")


async def test_a_real_engine_that_counts_tokens_at_the_end_is_not_killed_in_a_long_answer(tmp_path: Path) -> None:
    """llama.cpp's totals of tokens stand still until a request ends: one caller's long answer is no hang."""
    with Yard(tmp_path, SETTINGS) as yard:
        order = {
            "model_name": "smol",
            "framework": "llamacpp",
            "model_artifact": real_model().as_uri(),
            "options": {"slots": 1, "context_length": 1024},
        }
        assert yard.call("POST", "/v1/models/deploy", order).status == 202
        yard.wait_ready("smol", within_s=60)
        body = {"model": "smol", "messages": [{"role": "user", "content": "Go on"}], "max_tokens": 500}
        reply = yard.call("POST", "/v1/chat/completions", {**body, "ignore_eos": True}, within_s=120)
        assert reply.status == 200, reply.body
        assert reply.json()["usage"]["completion_tokens"] == 500
        killed = yard.query("SELECT * FROM endpoint_events WHERE kind IN ('replica_killed', 'replica_failed')")
        assert not killed, json.dumps(killed, default=str)
