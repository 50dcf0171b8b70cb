"""Two workers, one page: whichever is asked tells of both, and of one that was killed no more."""

from prometheus_client.parser import text_string_to_metric_families
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
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


def whole_page(yard: Yard) -> dict[str, float] | None:
    """Return what a page tells of both workers; None where it misses one."""
    page = served(yard)
    return page if len(page) == 2 else None


async def test_every_page_has_every_worker(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 64, "ttft_ms": 1, "itl_ms": 1})
    both = {"gateway-0", "gateway-1"}
    await eventually_async(lambda: set(served(yard)) == both, 30, "both workers serve")
    async with Load(yard.port, yard.admin_key) as load:
        for number in range(40):
            load.start(chat("sim", f"hello {number}"))
        await load.finish(30)
        assert {exchange.outcome for exchange in load.exchanges} == {Outcome.COMPLETE}
        # A page is without a worker that does not tell its own within a second: on a busy machine it is asked again.
        pages = [await eventually_async(lambda: whole_page(yard), 30, "a page of both") for _ in range(12)]
        assert all(sum(page.values()) == 40 for page in pages), pages
        assert min(pages[0].values()) > 0, "the kernel deals connections out to both"
        victim, _ = yard.plane_pids("gateway")
        yard.kill(victim)

        def is_replaced() -> bool:
            return victim not in yard.plane_pids("gateway") and whole_page(yard) is not None

        eventually(is_replaced, 40, "the worker that took its place tells too")
        check_ledger(yard, load.exchanges)
