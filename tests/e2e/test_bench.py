"""``modelyard bench`` and ``modelyard fit`` against a whole platform whose engine's times are known."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.shapes import LLAMA_3_70B
from tests.support.waiting import eventually
from tests.support.yard import Yard

TTFT_MS, ITL_MS, TOKENS = 60, 15, 12
NODES = """
[[nodes]]
id = "h100"
price = 2.25
accelerators = [{ kind = "h100", count = 8 }]
"""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "nodes.toml").write_text(NODES)
    with Yard(folder, settings={"fleet.nodes_file": folder / "nodes.toml"}) as running:
        running.deploy("sim", options={"ttft_ms": TTFT_MS, "itl_ms": ITL_MS, "slots": 2})
        yield running


def command(yard: Yard, *line: str) -> list[str]:
    return [sys.executable, "-m", "modelyard", *line, "--data-dir", str(yard.data)]


def run(yard: Yard, *line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(yard, *line), capture_output=True, text=True, timeout=110, check=False)


def measured(yard: Yard, *line: str) -> dict[str, Any]:
    done = run(yard, "bench", "sim", "--output-tokens", str(TOKENS), "--json", *line)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_sweep_finds_the_times_of_the_engine_and_the_line_before_it(yard: Yard, tmp_path: Path) -> None:
    output, picture = tmp_path / "run.json", tmp_path / "run.svg"
    files = ("--output", str(output), "--picture", str(picture))
    result = measured(yard, "--concurrency", "1,6", "--requests", "9", *files)
    alone, crowded = result["levels"]
    assert (alone["completed"], alone["failed"], alone["total_output_tokens"]) == (9, 0, 9 * TOKENS)
    assert (alone["samples_itl"], alone["tokens_counted"]) == (9 * (TOKENS - 1), True)
    # Never on speed: an engine cannot be faster than it was told to be, and a busy machine is slower.
    assert alone["median_ttft_ms"] >= TTFT_MS
    assert alone["mean_tpot_ms"] >= 0.9 * ITL_MS
    whole_ms = TTFT_MS + (TOKENS - 1) * ITL_MS
    assert alone["median_e2el_ms"] >= 0.95 * whole_ms
    # Six callers and two slots: most wait until others have their whole answer.
    assert crowded["p90_ttft_ms"] >= TTFT_MS + 0.9 * whole_ms
    assert json.loads(output.read_text()) == result
    assert picture.read_text().startswith("<svg ")
    compared = run(yard, "bench", "run", "compare")
    assert compared.returncode == 3  # an endpoint of that name, which there is none of


def test_an_open_loop_counts_the_wait_from_when_requests_were_due(yard: Yard) -> None:
    (level,) = measured(yard, "--rate", "40", "--arrivals", "constant", "--requests", "16")["levels"]
    # 16 requests are due within 0.4 s; two slots need over 1.5 s for them.
    assert (level["completed"], level["request_rate"], level["arrivals"]) == (16, 40.0, "constant")
    assert level["max_concurrent_requests"] > 6
    assert level["p99_ttft_ms"] >= 3 * (TTFT_MS + (TOKENS - 1) * ITL_MS)


def test_whole_answers_embeddings_and_lines_of_a_file(yard: Yard, tmp_path: Path) -> None:
    (whole,) = measured(yard, "--no-stream", "--concurrency", "2", "--requests", "4")["levels"]
    assert whole["total_output_tokens"] == 4 * TOKENS
    assert "mean_ttft_ms" not in whole
    (vectors,) = measured(yard, "--route", "embeddings", "--concurrency", "2", "--requests", "4")["levels"]
    assert (vectors["completed"], vectors["total_output_tokens"]) == (4, 0)
    assert vectors["total_input_tokens"] >= 4 * 256
    shown = run(yard, "bench", "sim", "--route", "embeddings", "--concurrency", "1", "--requests", "2").stdout
    assert "TOTAL TOK/S" in shown
    assert not any(word in shown for word in ("OUT TOK/S", " out,")), "vectors are no tokens"
    file = tmp_path / "asks.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hello there"}], "output_tokens": 5}\n')
    done = run(yard, "bench", "sim", "--dataset", str(file), "--concurrency", "1", "--requests", "3", "--json")
    assert json.loads(done.stdout)["levels"][0]["total_output_tokens"] == 15


def test_failures_are_counted_by_kind_and_an_unknown_model_is_told_at_once(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    lines = [{"prompt": f"[[sim: {fault}]] go on", "output_tokens": 4} for fault in ("slow=1", "http_error=400")]
    file.write_text("\n".join(map(json.dumps, lines)))
    (level,) = measured(
        yard, "--dataset", str(file), "--concurrency", "1", "--requests", "6", "--warmup", "0", "--seed", "5"
    )["levels"]
    assert level["completed"] + level["failed"] == 6
    assert min(level["completed"], level["failed"]) >= 2
    assert next(iter(level["errors"])).startswith("HTTP 400")
    misspelt = run(yard, "bench", "smi", "--requests", "1")
    assert "Did you mean 'sim'?" in misspelt.stderr
    unknown = run(yard, "bench", "nobody", "--requests", "1")
    assert unknown.returncode == 3
    assert "does not answer a request for 'nobody' (HTTP 404 model_not_found" in unknown.stderr


def test_ctrl_c_prints_what_there_is(yard: Yard) -> None:
    line = command(yard, "bench", "sim", "--concurrency", "2", "--duration", "10m", "--output-tokens", "4", "--json")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told: list[str] = []

        def is_under_way() -> bool:
            told.append(process.stderr.readline() if process.stderr else "")
            return " done, " in told[-1] and " 0 done, " not in told[-1]

        eventually(is_under_way, 40.0, "requests are answered")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    (level,) = json.loads(output)["levels"]
    assert process.returncode == 130
    assert level["is_stopped"]
    assert level["completed"] >= 1


def test_the_adviser_of_a_platform_knows_its_accelerators_and_prices(yard: Yard, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_70B))
    done = run(yard, "fit", str(config), "--fleet", "--gpu", "h100", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["usd_per_hour"] / row["count"] for row in rows} == {2.25}
    shown = run(yard, "fit", str(config), "--purpose", "math", "--gpu", "h100")
    assert "4 x h100*" in shown.stdout
    unknown = run(yard, "fit", "nobody@v1")
    assert unknown.returncode == 3
