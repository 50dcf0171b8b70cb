"""The oracle must bite: each invariant is broken once, in an otherwise honest history, and must be reported."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.ledger import Evidence, Row, violations
from tests.support.load import Exchange
from tests.support.wire import split

ROW = Row("req_1", "rep-a", 5, 3, 2550, "success")


def answer(
    status: int, body: bytes, *, rid: str | None = "req_1", stream: bool = False, whole: bool = True
) -> Exchange:
    """Return an ended exchange that received exactly this."""
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n" + (f"x-request-id: {rid}\r\n" if rid else "")
    exchange = Exchange("doctored", "/v1/chat/completions", stream)
    exchange.received += f"{head}transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n"
    exchange.received += b"0\r\n\r\n" if whole else b""
    exchange.reader.feed(bytes(exchange.received))
    exchange.outcome = exchange.judge()
    return exchange


def event(content: str | None = None, **extra: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": extra.pop("finish", None)}
    return b"data: " + json.dumps({"choices": [choice], **extra}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
LOST = b'data: {"error": {"message": "m", "type": "server_error", "param": null, "code": "engine_lost"}}\n\n'
TOKENS = event("a") + event("b") + event("c")
WHOLE = TOKENS + event(finish="stop") + DONE
UNARY = json.dumps(
    {"choices": [{"message": {"content": "abc"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
).encode()


def refusal(status: int, code: str, rid: str | None = "req_1") -> Exchange:
    body = {"error": {"message": "m", "type": "t", "param": None, "code": code}}
    return answer(status, json.dumps(body).encode(), rid=rid)


def evidence(exchange: Exchange, row: Row | None = ROW, made: int = 3, **more: Any) -> Evidence:
    generated = {"req_1": {"rep-a": made}} if made else {}
    return Evidence([exchange], [row] if row else [], generated, **more)


HONEST = {
    "whole stream": evidence(answer(200, WHOLE, stream=True)),
    "whole answer": evidence(answer(200, UNARY)),
    "error event": evidence(answer(200, TOKENS + LOST, stream=True), replace(ROW, status="error")),
    "refused at the door": evidence(refusal(429, "rate_limit_exceeded"), None, 0),
    "refused after a dispatch": evidence(
        refusal(503, "engine_unavailable"), Row("req_1", "", 0, 0, 0, "error", 503), 0
    ),
    "interrupted, billed at its last mark": evidence(
        answer(200, TOKENS, stream=True, whole=False), replace(ROW, completion_tokens=1, status="interrupted")
    ),
    "totals agree": evidence(
        answer(200, UNARY),
        rolled_up={"requests": 1, "prompt_tokens": 5, "completion_tokens": 3, "cost_nanousd": 2550},
        gauges={"in_flight": 0.0},
    ),
}

DOCTORED = {
    "I1: complete answer, but no row": evidence(answer(200, UNARY), None, 0),
    "I1: complete answer, but the row says error": evidence(answer(200, UNARY), replace(ROW, status="error")),
    "I1: billed 3, engines made [4]": evidence(answer(200, WHOLE, stream=True), made=4),
    "I1: told": evidence(answer(200, UNARY), replace(ROW, prompt_tokens=6)),
    "I1: 3 tokens delivered, but no row": evidence(answer(200, TOKENS + LOST, stream=True), None, 0),
    "is billed as success": evidence(answer(200, TOKENS + LOST, stream=True)),
    "I1: engines made": evidence(answer(200, TOKENS, stream=True, whole=False), None, 3),
    "I2: 2 rows for req_1": Evidence([answer(200, UNARY)], [ROW, ROW], {"req_1": {"rep-a": 3}}),
    "I2: 1 rows of unknown requests": Evidence(
        [answer(200, UNARY)], [ROW, replace(ROW, request_id="req_2", completion_tokens=0)], {"req_1": {"rep-a": 3}}
    ),
    "I2: roll-up says requests=2": evidence(
        answer(200, UNARY),
        rolled_up={"requests": 2, "prompt_tokens": 5, "completion_tokens": 3, "cost_nanousd": 2550},
    ),
    "I3: delivered 3 > billed 2": evidence(
        answer(200, TOKENS + LOST, stream=True), replace(ROW, completion_tokens=2, status="error")
    ),
    "I3: billed 9 > generated 3": evidence(
        answer(200, TOKENS, stream=True, whole=False), replace(ROW, completion_tokens=9, status="interrupted")
    ),
    "I3: negative amount": evidence(answer(200, UNARY), replace(ROW, cost_nanousd=-1)),
    "I4: refused, but billed 3 tokens": evidence(refusal(503, "engine_unavailable"), replace(ROW, status="error")),
    "I4: refused before dispatch, but has a row": evidence(
        refusal(429, "queue_full"), Row("req_1", "", 0, 0, 0, "error", 429), 0
    ),
    "I4: refused before dispatch, but engines worked": evidence(refusal(429, "queue_full"), None, 2),
    "I5: 1 requests are still open": evidence(answer(200, UNARY), open_requests=1),
    "I8: illegal end": evidence(answer(200, TOKENS, stream=True), replace(ROW, status="error")),
    "I8: [DONE] without finish_reason": evidence(answer(200, TOKENS + DONE, stream=True)),
    "I9: modelyard_in_flight is 1": evidence(answer(200, UNARY), gauges={"modelyard_in_flight": 1.0}),
    "I12: no x-request-id": evidence(refusal(401, "invalid_api_key", rid=None), None, 0),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_history_has_no_violation(name: str) -> None:
    assert violations(HONEST[name]) == []


@pytest.mark.parametrize("sentence", DOCTORED)
def test_a_doctored_history_is_reported(sentence: str) -> None:
    found = violations(DOCTORED[sentence])
    assert any(sentence in line for line in found), found


def test_an_answer_that_never_ends_is_reported() -> None:
    exchange = answer(200, TOKENS, stream=True, whole=False)
    exchange.outcome = None
    assert any("I8: illegal end" in line for line in violations(evidence(exchange)))


def test_two_answers_on_one_connection_are_told_apart() -> None:
    one = b"HTTP/1.1 400 Bad\r\ncontent-length: 2\r\n\r\n{}"
    assert [found.status for found in split(one + one.replace(b"400", b"200"))] == [400, 200]
    assert [found.is_complete for found in split(one + one[:-1])] == [True, False]


def test_bytes_that_are_not_http_are_broken_not_complete() -> None:
    assert [found.is_complete for found in split(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")] == [
        False
    ]
