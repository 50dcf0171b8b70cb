"""F32 with two gateway workers: what one found out, the other need not find out again."""

from prometheus_client.parser import text_string_to_metric_families
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {"gateway.workers": 2, "control.crash_backoff_s": 5, "control.crash_backoff_max_s": 5}


def refusing(yard: Yard) -> list[float]:
    page = yard.call("GET", "/metrics").body.decode()
    families = text_string_to_metric_families(page)
    return [sample.value for family in families for sample in family.samples if "refused_fingerprints" in sample.name]


async def test_two_engines_die_of_it_whichever_worker_is_asked(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1}, replicas=4)
    before = {engine.pid for engine in yard.engines("sim")}
    death = chat("sim", "[[sim: crash_always]] the query of death")
    async with Load(yard.port, yard.admin_key) as load:
        first = await load.send(death)
        assert first.error["code"] == "request_crashes_engine", first
        eventually(lambda: len(counts := refusing(yard)) == 2 and min(counts) > 0, 30, "both workers refuse it")
        again = [await load.send(death) for _ in range(8)]
        assert {one.error["code"] for one in again} == {"request_crashes_engine"}
        assert (await load.send(chat("sim", "an honest question"))).outcome is Outcome.COMPLETE
        check_ledger(yard, load.exchanges)
    assert len(before & {engine.pid for engine in yard.engines("sim")}) == 2
