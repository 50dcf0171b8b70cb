"""Two workers, one page: whichever is asked tells of both, and of one that was killed no more."""

from prometheus_client.parser import text_string_to_metric_families
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {"gateway.workers": 2}
CONTROLLERS = ("modelyard_webhook", "modelyard_sink")
"""What the controller adds to the page, which there is once."""


def served(yard: Yard) -> dict[str, float]:
    """Return the good requests of each worker, as one page tells them."""
    page = yard.call("GET", "/metrics").body.decode()
    found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    samples = [sample for sample in found if not sample.name.startswith(CONTROLLERS)]
    workers = {sample.labels["worker"]: 0.0 for sample in samples}
    for sample in samples:
        if sample.name == "modelyard_requests_total" and sample.labels["status"] == "200":
            workers[sample.labels["worker"]] += sample.value
    return workers


async def test_every_page_has_every_worker(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 64, "ttft_ms": 1, "itl_ms": 1})
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(40):
            load.start(chat("sim", f"hello {number}"))
        await load.finish(30)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
        pages = [served(yard) for _ in range(12)]
        assert all(set(page) == {"gateway-0", "gateway-1"} for page in pages), pages
        assert all(sum(page.values()) == 40 for page in pages), pages
        assert min(pages[0].values()) > 0, "the kernel deals connections out to both"
        victim, _ = yard.plane_pids("gateway")
        yard.kill(victim)
        eventually(
            lambda: set(served(yard)) == {"gateway-0", "gateway-1"}, 20, "the worker that took its place tells too"
        )
        check_ledger(yard, load.exchanges)
