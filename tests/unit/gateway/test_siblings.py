"""The page of metrics of several workers."""

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from modelyard.gateway.siblings import Siblings, merged
from modelyard.observe.control_metrics import ControlMetrics
from modelyard.observe.metrics import GatewayMetrics
from modelyard.web.page_socket import PageSocket


def numbers(requests: int) -> GatewayMetrics:
    metrics = GatewayMetrics()
    for _ in range(requests):
        metrics.ended("/v1/chat/completions", 'a "quoted" {name}', 200, 0.2)
    metrics.gauges["modelyard_connections"] = ((), lambda: [((), requests)])
    return metrics


def series(page: bytes) -> dict[tuple[str, str], float]:
    """Return samples by name and worker, read by Prometheus' own parser."""
    return {
        (sample.name, sample.labels["worker"]): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if "le" not in sample.labels
    }


def left(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def test_each_series_names_its_worker_and_each_metric_stands_once() -> None:
    pages = {"gateway-0": numbers(3).render(), "gateway-1": numbers(5).render()}
    page = merged(pages)
    found = series(page)
    assert found["modelyard_requests_total", "gateway-0"] == 3
    assert found["modelyard_requests_total", "gateway-1"] == 5
    assert found["modelyard_connections", "gateway-1"] == 5
    assert found["modelyard_request_seconds_count", "gateway-0"] == 3
    assert page.count(b"# TYPE modelyard_requests_total counter") == 1
    assert page.count(b"# HELP modelyard_connections") == 1
    samples = sum(len([line for line in one.splitlines() if not line.startswith(b"#")]) for one in pages.values())
    assert len([line for line in page.splitlines() if not line.startswith(b"#")]) == samples


async def test_whoever_is_asked_tells_of_all_that_live(tmp_path: Path) -> None:
    workers = [Siblings(tmp_path, f"gateway-{number}", numbers(number + 1).render) for number in range(3)]
    for worker in workers:
        await worker.start()
    for worker in workers:
        found = series(await worker.page())
        assert [found["modelyard_requests_total", f"gateway-{number}"] for number in range(3)] == [1, 2, 3]
    await workers[2].close()
    assert {worker for _, worker in series(await workers[0].page())} == {"gateway-0", "gateway-1"}
    for worker in workers[:2]:
        await worker.close()
    assert left(tmp_path) == []


async def test_a_killed_worker_is_left_out_and_a_hung_one_is_not_waited_for_long(tmp_path: Path) -> None:
    worker = Siblings(tmp_path, "gateway-0", numbers(1).render)
    await worker.start()
    killed = tmp_path / "m-gateway-1.sock"
    (await asyncio.start_unix_server(lambda reader, writer: None, killed)).close()
    hung = await asyncio.start_unix_server(lambda reader, writer: held.append(writer), tmp_path / "m-gateway-2.sock")
    held: list[asyncio.StreamWriter] = []
    assert {name for _, name in series(await asyncio.wait_for(worker.page(), 30))} == {"gateway-0"}
    for writer in held:
        writer.close()
    hung.close()
    await worker.close()


async def test_a_folder_in_which_no_socket_fits_costs_only_the_others(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    worker = Siblings(folder, "gateway-0", numbers(2).render)
    await worker.start()
    assert series(await worker.page())["modelyard_requests_total", "gateway-0"] == 2
    await worker.close()


async def test_the_controllers_page_is_behind_those_of_workers_and_is_nobodys(tmp_path: Path) -> None:
    control = ControlMetrics()
    control.webhooks_waiting = lambda: (3, 9.0)
    told = PageSocket(tmp_path, "control", control.render)
    await told.start()
    workers = [Siblings(tmp_path, f"gateway-{number}", numbers(1).render) for number in range(2)]
    alone = Siblings(tmp_path, "gateway-0", numbers(1).render, is_alone=True)
    await alone.start()
    assert [path.name for path in left(tmp_path)] == ["m-control.sock"]
    for worker in workers:
        await worker.start()
    for worker, label in ((workers[0], "gateway-0"), (workers[1], "gateway-1"), (alone, "")):
        page = (await worker.page()).decode()
        samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
        found = {(one.name, one.labels.get("worker", "")): one.value for one in samples if "le" not in one.labels}
        assert found["modelyard_webhook_waiting", ""] == 3
        assert found["modelyard_requests_total", label] == 1
    await told.close()
    assert b"webhook" not in await workers[0].page()
    for worker in (*workers, alone):
        await worker.close()
