"""``modelyard sim --replay`` of what a whole platform served, beside it and when it is down."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually
from tests.support.yard import Yard

TTFT_MS, ITL_MS, TOKENS, REQUESTS = 40, 12, 15, 60


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Yield a platform whose one replica of two slots served six callers at once: most of them waited in line."""
    with Yard(tmp_path_factory.mktemp("replay"), settings={"control.database_timeout_s": 5}) as running:
        running.deploy("chat", options={"ttft_ms": TTFT_MS, "itl_ms": ITL_MS, "slots": 2})
        running.deploy("quiet", options={"slots": 2})
        load = ("--concurrency", "6", "--requests", str(REQUESTS), "--output-tokens", str(TOKENS), "--warmup", "0")
        done = run(running, "bench", "chat", *load)
        assert done.returncode == 0, done.stderr
        eventually(lambda: len(running.rows()) >= REQUESTS, 30, "all requests are in the ledger")
        yield running


def run(yard: Yard, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelyard", *line, "--data-dir", str(yard.data)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def replayed(yard: Yard, *line: str) -> tuple[dict[str, dict[str, float]], str]:
    """Return figures by variant, and what was said beside them."""
    done = run(yard, "sim", "--replay", "--endpoint", "chat", "--json", *line)
    assert done.returncode == 0, done.stderr
    (results,) = json.loads(done.stdout)
    return {one["name"]: one["runs"][0]["figures"] for one in results["tried"]}, " ".join(results["notes"])


def totals(yard: Yard) -> dict[str, Any]:
    (sums,) = yard.query(
        "SELECT count(*) AS requests, sum(prompt_tokens) AS prompt, sum(completion_tokens) AS written, "
        "sum(cost_nanousd) AS cost FROM inference_requests"
    )
    return sums


def test_the_replay_has_what_the_ledger_has_and_more_replicas_wait_less(yard: Yard) -> None:
    three = ("--set", "scaling.min_replicas=3", "--set", "scaling.max_replicas=3")
    found, notes = replayed(yard, *three)
    sums, as_is, recorded = totals(yard), found["as is"], found["recorded"]
    for figures in (as_is, recorded):
        assert (figures["requests"], figures["prompt_tokens"]) == (sums["requests"], sums["prompt"])
        assert figures["written_tokens"] == sums["written"]
        assert figures["revenue_usd"] == pytest.approx(sums["cost"] / 1e9)
    # Wide: a busy machine pauses now and then, and the simulator never does.
    assert 0.3 < as_is["ttft_p50_s"] / recorded["ttft_p50_s"] < 3
    assert 0.3 < as_is["latency_p50_s"] / recorded["latency_p50_s"] < 3
    assert found["changed"]["ttft_p50_s"] < 0.6 * as_is["ttft_p50_s"], "three replicas have a slot for each caller"
    assert found["changed"]["replica_hours"] > 2.5 * as_is["replica_hours"]
    assert "Speed of chat@v1" in notes


def test_an_export_is_replayed_without_the_platform(yard: Yard, tmp_path: Path) -> None:
    for name in ("rows.csv", "rows.jsonl"):
        file = tmp_path / name
        assert run(yard, "usage", "export", "--since", "1h", "-o", str(file)).returncode == 0
        found, _ = replayed(yard, "--usage", str(file), "--runs-on", "l4", "--hardware", "h100")
        assert found["as is"]["requests"] == found["recorded"]["requests"] == totals(yard)["requests"]
        assert found["changed"]["latency_p50_s"] < found["as is"]["latency_p50_s"]
        assert found["changed"]["gpu_usd"] > found["as is"]["gpu_usd"] > 0


def test_prices_alone_are_computed_from_the_rows(yard: Yard) -> None:
    found, notes = replayed(yard, "--token-price", "chat:input=2,output=4")
    sums = totals(yard)
    assert set(found) == {"recorded", "changed"}
    assert found["changed"]["revenue_usd"] == pytest.approx((2 * sums["prompt"] + 4 * sums["written"]) / 1e6)
    assert "nothing was simulated" in notes


def test_variants_of_a_file_stand_side_by_side(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "try.toml"
    file.write_text(
        '[variant.busy]\ntraffic = "x2"\n[variant."eight at once"]\nset.engine.slots = 8\nprice = { cpu = 0.5 }\n'
    )
    found, _ = replayed(yard, "--variants", str(file))
    assert list(found) == ["as is", "recorded", "busy", "eight at once"]
    assert found["busy"]["requests"] == 2 * found["as is"]["requests"]
    assert found["eight at once"]["ttft_p99_s"] < found["as is"]["ttft_p99_s"]
    assert found["eight at once"]["gpu_usd"] > 0


def test_a_table_shows_variants_and_how_far_to_trust_them(yard: Yard) -> None:
    done = run(yard, "sim", "replay", "--last", "1h", "--traffic", "x2")
    assert done.returncode == 0
    assert "as is" in done.stdout
    assert "recorded" in done.stdout
    assert "what was recorded" in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "why"),
    [
        (("--endpoint", "caht"), 3, "There is no endpoint 'caht'. Did you mean 'chat'?"),
        (("--limit", "5"), 2, "There are more than 5 requests. Replay a shorter time"),
        (("--from", "2026-01-01", "--to", "2026-01-02"), 3, "There are no requests from 2026-01-01"),
        (("--hardware", "tpu"), 2, "nothing is known of 'tpu'"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_a_line(yard: Yard, line: tuple[str, ...], code: int, why: str) -> None:
    done = run(yard, "sim", "--replay", *line)
    assert (done.returncode, done.stdout) == (code, "")
    assert why in done.stderr


def test_it_is_replayed_when_the_platform_is_down(yard: Yard) -> None:
    # The last test: nothing is started again.
    requests = totals(yard)["requests"]
    yard.stop()
    found, _ = replayed(yard)
    assert found["as is"]["requests"] == requests
    nothing = run(Yard(yard.folder / "elsewhere"), "sim", "--replay")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "There is no database" in nothing.stderr
