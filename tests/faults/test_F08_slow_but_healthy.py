"""F8: an engine that is saturated and answers its probes late is busy, not dead: it is left alone."""

from pathlib import Path

from tests.support.engines import plan
from tests.support.load import Load, Outcome, chat
from tests.support.yard import Yard

SETTINGS = {"control.hang_timeout_s": 1.0, "gateway.queue_wait_s": 30, "gateway.first_token_timeout_s": 30}


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
