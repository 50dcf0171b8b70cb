"""``modelyard why`` and ``endpoints stats``: who is asked, and what is printed."""

import json
from typing import Any

import pytest

from modelyard.cli.exits import Refused
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
ENDPOINT_WHY = {
    "id": "ep-1",
    "object": "endpoint.why",
    "name": "demo",
    "status": "deploying",
    "progress": {"stage": "placing", "percent": None, "eta_s": None, "reason": "no node has 80 GiB"},
    "answers": [
        {
            "question": "Why is it deploying?",
            "answer": "0 of 1 replicas are ready\x1b[31m; no node has 80 GiB",
            "next_step": "add a node",
            "at": 0,
            "data": {"queued": 2},
        },
        {"question": "Why 1 replica?", "answer": "it is new", "next_step": "", "at": 0, "data": {}},
        {
            "question": "Why did rep-1 end?",
            "answer": 'killed (2 times). It said: "one\ntwo"',
            "next_step": "add a node",
            "at": 1796000000,
            "data": {},
        },
    ],
}
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
        if path == "/v1/endpoints":
            return {"data": [{"id": "ep-1", "name": "demo"}], "has_more": False}
        if path == "/v1/endpoints/dmeo/why":
            raise Refused("No such endpoint 'dmeo'.", status=404, code="not_found", request_id=None)
        if path.startswith("/v1/endpoints/") and path.endswith("/why"):
            return ENDPOINT_WHY
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


@pytest.mark.parametrize("reference", ["demo", "ep-1"])
def test_an_endpoint_is_told_in_questions_answers_and_next_steps(
    asked: list[str], capsys: pytest.CaptureFixture[str], reference: str
) -> None:
    assert main(["why", reference, *CONNECTED]) == 0
    assert asked == [f"/v1/endpoints/{reference}/why"]
    assert capsys.readouterr().out.splitlines() == [
        "demo: deploying, placing (no node has 80 GiB)",
        "Why is it deploying?",
        "  0 of 1 replicas are ready; no node has 80 GiB",
        "  Next: add a node",
        "Why 1 replica?",
        "  it is new",
        "Why did rep-1 end? (2026-11-30 00:53:20Z)",
        '  killed (2 times). It said: "one',
        '  two"',
        "  Next: add a node",
    ]


def test_programs_get_the_numbers_of_an_endpoint_and_shells_each_step_once(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "demo", "--json", *CONNECTED]) == 0
    assert json.loads(capsys.readouterr().out) == ENDPOINT_WHY
    assert main(["why", "demo", "--quiet", *CONNECTED]) == 0
    assert capsys.readouterr().out == "add a node\n"


def test_a_name_that_nearly_exists_is_pointed_at(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "dmeo", *CONNECTED]) == 3
    assert "No such endpoint 'dmeo'. Did you mean 'demo'?" in capsys.readouterr().err


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
