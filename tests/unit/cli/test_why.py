"""``modelyard why`` and ``endpoints stats``: who is asked, and what is printed."""

import json
from typing import Any

import pytest

from modelyard.cli.http import Platform
from modelyard.cli.main import main

WHY = {
    "id": "req_1",
    "route": "/v1/chat/completions",
    "model": "demo",
    "arrived_at": "2026-11-30T01:27:53.576+00:00",
    "why": ["It waited 2 s.", "It failed\x1b[31m at once."],
    "next_step": "Send it again in 2 s.",
}
WINDOW = {
    "window_s": 61.0, "requests": 4, "errors": 1, "error_share": 0.25, "requests_per_s": 0.07, "ttft_p50_s": 0.081,
    "ttft_p95_s": 1.5, "ttft_p99_s": None, "itl_p95_s": 0.0124, "latency_p99_s": 2.8, "prompt_tokens_per_s": 1.0,
    "completion_tokens_per_s": 17.13, "running_mean": 0.4,
}  # fmt: skip
STATS = {
    "name": "demo",
    "stats": WINDOW,
    "arrivals_per_s": {"300": 3.0, "10": 4.125, "60": 5.0},
    "queued": 2,
    "queued_max": 7,
    "predicted_wait_s": 1.25,
    "releases": [{"version": "v1", "weight": 90, "stats": WINDOW}],
}
CONNECTED = ["--url", "http://127.0.0.1:1", "--key", "k"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that were asked for."""
    paths: list[str] = []

    def get(self: Platform, path: str, **query: object) -> Any:
        paths.append(path + (f"?{query}" if query else ""))
        return dict(STATS if path.endswith("/stats") else WHY)

    monkeypatch.setattr(Platform, "get", get)
    return paths


def test_the_answer_is_a_title_sentences_and_the_next_step(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "req_1", *CONNECTED]) == 0
    assert asked == ["/v1/requests/req_1/why"]
    assert capsys.readouterr().out.splitlines() == [
        "req_1: /v1/chat/completions for 'demo', 2026-11-30T01:27:53.576+00:00",
        "  It waited 2 s.",
        "  It failed at once.",
        "Next: Send it again in 2 s.",
    ]


def test_programs_get_what_the_api_says(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "req_1", "--json", *CONNECTED]) == 0
    assert json.loads(capsys.readouterr().out) == WHY
    assert main(["why", "req_1", "--quiet", *CONNECTED]) == 0
    assert capsys.readouterr().out == "Send it again in 2 s.\n"


def test_what_is_no_request_is_not_asked_for(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "demo", *CONNECTED]) == 2
    assert "'demo' is no id of a request; those begin with 'req_'" in capsys.readouterr().err
    assert asked == []


def test_statistics_are_a_table_with_a_row_for_each_release_and_one_for_all(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["endpoints", "stats", "demo", "--window", "5m", *CONNECTED]) == 0
    assert asked == ["/v1/endpoints/demo/stats?{'window': 300.0}"]
    out = capsys.readouterr().out
    assert "4.12 in 10 s, 5 in 60 s, 3 in 300 s" in out
    assert "2 now, 7 at most" in out
    v1, every = out.splitlines()[-2:]
    assert " ".join(v1.split()) == "v1 (90 %) 4 1 (25.0%) 81 ms 1.5 s - 12.4 ms 2.8 s 17.1"
    assert every.split()[0] == "all"
