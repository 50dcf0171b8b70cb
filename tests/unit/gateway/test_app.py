"""A worker's own numbers."""

from pathlib import Path

from tests.unit.gateway.test_exchange import Bench

from modelyard.gateway import app


def test_models_of_one_name_are_one_series(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    app._declare_gauges(bench.gateway)
    catalog = bench.gateway.catalog
    catalog._endpoints["other"] = bench.endpoint
    page = bench.gateway.metrics.render().decode()
    assert page.count("modelyard_in_flight{") == 1
    assert 'modelyard_replicas{model="m"} 2.0' in page
    bench.journal.close()
