"""Every scenario that comes with the package says what it shows, loads, and runs; small here, whole in the gallery."""

import tomllib
from typing import Any

import pytest

from modelyard.sim import examples
from modelyard.sim.fleets import FIGURES as OF_FLEET
from modelyard.sim.rates import servegen
from modelyard.sim.runs import FIGURES
from modelyard.sim.scenario_file import merged
from modelyard.sim.scenarios import run, scenario_of


def small(given: dict[str, Any]) -> dict[str, Any]:
    """Return a scenario of some minutes, with two of its variants."""
    found = {**given, "variant": given["variant"][:2], "seeds": 1}
    if given.get("level") == "fleet":
        return {**found, "hours": 0.34, "warmup_s": 60, "tick_s": 5, "traffic": {**given["traffic"], "endpoints": 40}}
    short = {"traffic": {"minutes": 40 if given["title"].startswith("Bursts") else 4}}
    found["variant"] = [
        {**one, "traffic": [merged(traffic, {"minutes": 4}) for traffic in one["traffic"]]} if "traffic" in one
        and isinstance(one["traffic"], list) else one
        for one in found["variant"]
    ]  # fmt: skip
    return merged(found, short)


def test_there_are_some_of_both_levels() -> None:
    levels = [tomllib.loads(examples.text(name)).get("level", "request") for name in examples.names()]
    assert levels.count("request") >= 6
    assert levels.count("fleet") >= 2


@pytest.mark.parametrize("name", examples.names())
def test_an_example_says_what_it_shows_and_runs(name: str) -> None:
    text = examples.text(name)
    assert text.startswith("# "), "a comment says what it is"
    assert "\n# Shows: " in text
    assert examples.title(name) == tomllib.loads(text)["title"]
    results = run(scenario_of(small(tomllib.loads(text)), examples.FOLDER))
    assert len(results.tried) == 2
    for tried in results.tried:
        assert tried.runs[0].series["hours"], "there is something to draw"
    keys = {figure.key for figure in results.figures}
    assert keys >= ({"gpu_hours", "late"} if results.level == "fleet" else {"ttft_p99_s", "within"})
    assert {key for key in keys if "[" not in key} <= {figure.key for figure in (*FIGURES, *OF_FLEET)}


def test_the_shipped_rates_are_of_forty_clients_over_fourteen_days() -> None:
    clients = servegen(examples.RATES)
    assert len(clients) == 40
    assert {len(one.rates) for one in clients} == {14 * 144}
    assert (examples.RATES / "README.md").read_text("utf-8").count("Apache License 2.0") == 1


def test_a_fleets_accelerators_by_kind_are_all_that_are_held() -> None:
    given = small(tomllib.loads(examples.text("lora-pool")))
    series = run(scenario_of(given, examples.FOLDER)).tried[0].runs[0].series
    kinds = [column for name, column in series.items() if name.startswith("gpus.")]
    assert len(kinds) == 3
    for place, whole in enumerate(series["gpus"]):
        assert sum(column[place] or 0.0 for column in kinds) == pytest.approx(whole)
    assert max(value or 0.0 for value in series["gpus"]) > 0
    assert max(value or 0.0 for value in series["replicas"]) > 0


def test_a_price_of_ones_own_changes_cost_and_no_demand() -> None:
    given = small(tomllib.loads(examples.text("batches")))
    given["variant"] = [{"name": "a"}, {"name": "b", "fleet": {"accelerator_prices": {"h100": 0.1, "l4": 0.1,
        "l40s": 0.1, "a100": 0.1}}}]  # fmt: skip
    results = run(scenario_of(given, examples.FOLDER))
    table, own = results.tried
    assert (own.mean("usd_per_hour") or 0.0) < 0.5 * (table.mean("usd_per_hour") or 0.0)
    assert own.mean("requests_s") == pytest.approx(table.mean("requests_s"), rel=0.01)
