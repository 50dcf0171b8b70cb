"""``modelyard bench``: its command line; ``tests/e2e/test_bench.py`` runs it against engines."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from modelyard.cli.bench import Numbers, levels_of
from modelyard.cli.main import main

GIVEN: dict[str, Any] = {
    "concurrency": None, "rate": None, "arrivals": "poisson", "duration_s": 30.0, "requests": None, "warmup": None,
}  # fmt: skip


def test_loads_are_what_was_asked_for_and_warm_up_as_many_as_run_at_once() -> None:
    assert [(one.concurrency, one.warmup) for one in levels_of(GIVEN)] == [(1, 1), (4, 4), (16, 16)]
    rates = levels_of({**GIVEN, "rate": (0.5, 2.0), "arrivals": "constant", "warmup": 0})
    assert [(one.rate, one.arrivals, one.warmup, one.name) for one in rates] == [
        (0.5, "constant", 0, "0.5/s"),
        (2.0, "constant", 0, "2/s"),
    ]
    (counted,) = levels_of({**GIVEN, "concurrency": (2.0,), "requests": 7})
    assert (counted.concurrency, counted.requests, counted.name) == (2, 7, "2 at once")
    with pytest.raises(click.UsageError, match="not both"):
        levels_of({**GIVEN, "concurrency": (2.0,), "rate": (1.0,)})


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "a", "1.5", "20000"])
def test_what_is_no_list_of_numbers_is_told(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no list of whole numbers"):
        Numbers(is_whole=True).convert(text, None, None)


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (["demo", "--url", "ftp://x"], 2, "it must begin with http"),
        (["demo", "--url", "http://127.0.0.1:9", "--input-tokens", "x"], 2, "'x' is no length"),
        (["demo", "--url", "http://127.0.0.1:9", "--key-env", "NOT_SET_HERE"], 4, "NOT_SET_HERE is not set"),
        (["demo", "--url", "http://127.0.0.1:9", "--dataset", "/nothing.jsonl"], 3, "Cannot read /nothing.jsonl"),
        (["demo", "--url", "http://127.0.0.1:9", "--output", "/nothing/a.json"], 2, "there is no such folder"),
        (["demo", "--url", "http://127.0.0.1:9"], 6, "http://127.0.0.1:9 does not answer"),
        (["compare", "/nothing", "/nothing"], 3, "Cannot read /nothing"),
    ],
)
def test_faults_are_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: list[str], code: int, told: str
) -> None:
    monkeypatch.delenv("MODELYARD_API_KEY", raising=False)
    assert main(["bench", *line]) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "samples", "p50", "p99"),
    [(7, 7, "too few to tell", "too few to tell"), (12, 12, "worse", "too few to tell"), (600, 600, "worse", "worse"),
     (7, 900, "too few to tell", "too few to tell")],
)  # fmt: skip
def test_a_percentile_of_few_samples_is_neither_better_nor_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: int, samples: int, p50: str, p99: str
) -> None:
    files = []
    for name, scale in (("a", 1.0), ("b", 2.0)):
        level = {"level": "1 at once", "completed": answers, "samples_itl": samples, "median_itl_ms": 50 * scale,
                 "p99_itl_ms": 80 * scale, "ci95_median_itl_ms": [49 * scale, 51 * scale],
                 "ci95_p99_itl_ms": [80 * scale, 80 * scale]}  # fmt: skip
        files.append(str(tmp_path / name))
        Path(files[-1]).write_text(json.dumps({"object": "modelyard.bench", "workload": {}, "levels": [level]}))
    assert main(["bench", "compare", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("2.00  ")[2] for line in lines[1:]] == [p50, p99]


def test_results_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def result(name: str, scale: float) -> str:
        level = {"level": "1 at once", "median_ttft_ms": 50 * scale, "ci95_median_ttft_ms": [49 * scale, 51 * scale]}
        level["p99_ttft_ms"] = 80 * scale
        file = tmp_path / name
        file.write_text(
            json.dumps({"object": "modelyard.bench", "workload": {"input_tokens": name}, "levels": [level]})
        )
        return str(file)

    one, other = result("a.json", 1.0), result("b.json", 0.5)
    assert main(["bench", "compare", one, other]) == 0
    shown = capsys.readouterr()
    assert "1 at once  TTFT p50 ms     50      25   0.50  better\n" in shown.out
    assert "1 at once  TTFT p99 ms     80      40   0.50  too few to tell\n" in shown.out
    assert "They were not asked alike: input_tokens differ." in shown.err
    assert main(["bench", "compare", one, other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ratio"] == 0.5
    (tmp_path / "odd.json").write_text("[]")
    assert main(["bench", "compare", one, str(tmp_path / "odd.json")]) == 2
