"""Stories in words: every number that decided is said, and what to do next."""

import msgspec
import pytest

from modelyard.domain.why import Bound, Considered, Line, Move, RequestStory
from modelyard.policy.stories import next_step, words

SERVED = RequestStory(
    request_id="req_1",
    tenant_id="ten-1",
    key_id="key",
    source="gateway-0",
    arrived_at=1.0,
    route="/v1/chat/completions",
    model="demo",
    endpoint_id="ep-1",
    status=200,
    code="",
    was_sent=True,
    version_id="ver-1",
    replica_id="rep-1",
    beside=3,
    attempts=1,
    ttft_s=0.125,
    latency_s=1.5,
    prompt_tokens=12,
    cached_tokens=4,
    completion_tokens=34,
    cost_nanousd=1_234_000,
)


def told(**changes: object) -> str:
    return " ".join(words(msgspec.structs.replace(SERVED, **changes)))


def refused(status: int, code: str, **more: object) -> RequestStory:
    nothing = {"attempts": 0, "replica_id": "", "prompt_tokens": 0, "completion_tokens": 0, "ttft_s": None}
    return msgspec.structs.replace(SERVED, status=status, code=code, **nothing, **more)  # type: ignore[arg-type]


def test_an_answered_request_says_when_where_and_for_how_much() -> None:
    text = told()
    assert "It did not wait: a replica had room." in text
    assert "It went to rep-1, without a choice between replicas; 3 requests of this gateway ran there." in text
    assert "It was answered after 1.5 s, its first token after 125 ms." in text
    assert "12 prompt tokens (4 cached) and 34 completion tokens: $0.001234." in text
    assert next_step(SERVED) == ""


def test_limits_are_named_with_their_values() -> None:
    bounds = (Bound("key", "requests_per_minute", 60), Bound("tenant", "nanousd_per_month", 20_000_000_000))
    text = told(bounds=bounds, reserved_tokens=500)
    assert "key: 60 requests a minute; tenant: $20 a month" in text
    assert "500 tokens reserved at worst" in text
    money = (Bound("tenant", "money_prepaid", 7 * 10**9), Bound("key for this model", "nanousd_per_month", 10**9))
    assert "tenant: $7 of prepaid credit and what was spent of it; key for this model: $1 a month" in told(
        bounds=money
    ), "who is bound by these alone was told to have no limits"


def test_a_wait_says_behind_how_many_and_what_was_predicted() -> None:
    text = told(waited_s=2.5, line=Line(4, 3.0, is_cold=False))
    assert (
        "It waited 2.5 s: every replica of 'demo' was full and 4 requests stood before it; 3 s were predicted." in text
    )
    text = told(waited_s=12.0, line=Line(0, None, is_cold=True))
    assert "It waited 12 s for a replica of 'demo' to load." in text


def test_the_choice_is_told_with_the_seconds_of_each_replica_the_best_first() -> None:
    seen = (
        Considered("rep-3", 5, 8, False, 0, 0.5, 0.2, 0.1, 0.8),
        Considered("rep-1", 1, 8, True, 256, 0.0, 0.05, 0.01, 0.06),
        Considered("rep-2", 2, 8, False, 0, 0.1, 0.2, 0.1, 0.4),
        Considered("", 8, 8, False),
    )
    text = told(considered=seen)
    assert "3 of 4 replicas looked at had room; it went to rep-1, where it added 60 ms" in text
    assert "256 tokens of its prompt cached" in text
    assert text.index("rep-2 would have added 400 ms") < text.index("rep-3 would have added 800 ms")
    assert "a replica that is gone (8/8)" in text
    assert "session" not in text


def test_a_replica_that_was_not_the_cheapest_was_kept_for_its_session() -> None:
    seen = (
        Considered("rep-1", 1, 8, True, 0, 0.2, 0.05, 0.0, 0.25),
        Considered("rep-2", 0, 8, False, 0, 0.0, 0.05, 0.0, 0.05),
    )
    assert "kept with its session" in told(considered=seen)


def test_an_attempt_that_failed_says_where_and_why() -> None:
    text = told(moves=(Move("rep-9", "ver-1", 0.5, "connection lost"),), attempts=2)
    assert "500 ms after its arrival rep-9 failed it (connection lost); it went on elsewhere." in text


def test_a_limit_that_refused_says_its_value_what_was_used_and_when_to_come_back() -> None:
    facts: dict[str, object] = {"kind": "tokens", "whose": "the tenant", "limit": 1000, "used": 940.5, "share": 500}
    story = refused(429, "rate_limit_exceeded", message="Rate limit reached.", retry_after_s=12.0, facts=facts)
    text = " ".join(words(story))
    assert "429 rate_limit_exceeded: Rate limit reached." in text
    assert (
        "The limit of the tenant is 1000 tokens a minute (this gateway's share of it was 500); 941 were used." in text
    )
    assert "It cost nothing." in text
    assert next_step(story).startswith("Send it again in 12 s")


def test_a_limit_of_one_request_is_told_in_whole_numbers() -> None:
    facts: dict[str, object] = {"kind": "requests", "whose": "this key", "limit": 1, "used": 0.9}
    story = refused(429, "rate_limit_exceeded", facts=facts, bounds=(Bound("key", "requests_per_minute", 1),))
    text = " ".join(words(story))
    assert "limits (key: 1 request a minute)" in text
    assert "The limit of this key is 1 request a minute; 1 was used." in text


def test_a_quota_is_told_in_dollars() -> None:
    facts: dict[str, object] = {
        "kind": "money_per_day",
        "whose": "this key",
        "limit": 2_000_000_000,
        "used": 1_500_000_000,
        "needed": 700_000_000,
    }
    text = " ".join(words(refused(429, "insufficient_quota", facts=facts, retry_after_s=3600.0)))
    assert "The limit of this key is $2; $1.5 were used, and it needed up to $0.7." in text


def test_amounts_are_told_in_the_configured_currency() -> None:
    assert "34 completion tokens: 0.001234 EUR." in told(currency="EUR")
    facts: dict[str, object] = {"kind": "money_per_month", "whose": "this key", "limit": 2 * 10**9, "used": 0,
                                "needed": 15 * 10**8, "share": 10**9}  # fmt: skip
    text = " ".join(words(refused(429, "insufficient_quota", facts=facts, retry_after_s=9.0, currency="EUR")))
    assert "The limit of this key is 2 EUR (this gateway's share of it was 1 EUR); 0 EUR were used" in text


def test_a_full_line_says_how_many_stood_in_it() -> None:
    facts: dict[str, object] = {"waiting": 5, "places": 5, "running": 8, "slots": 8, "predicted_wait_s": 7.5}
    story = refused(429, "queue_full", facts=facts, retry_after_s=7.5)
    assert "8 of 8 slots were taken, 5 of 5 places in line; a wait of 7.5 s was predicted." in " ".join(words(story))
    assert "modelyard endpoints set demo --scale" in next_step(story)


def test_what_came_without_a_good_key_says_so() -> None:
    story = refused(401, "invalid_api_key", tenant_id="", key_id="", model="")
    assert "without a key that is known here" in words(story)[0]
    assert "modelyard keys" in next_step(story)


def test_the_ledger_says_that_it_is_the_ledger() -> None:
    text = told(source="ledger", attempts=2, beside=None)
    assert text.startswith("No gateway remembers it any more")
    assert "It took 2 attempts." in text


@pytest.mark.parametrize(
    ("status", "code", "retry_after_s", "step"),
    [
        (499, "client_closed", None, "If it left"),
        (503, "model_loading", 8.0, "Send it again in 8 s."),
        (502, "engine_error", None, "Send it again; if it keeps failing"),
        (400, "invalid_value", None, "Change the request"),
        (404, "model_not_found", None, "See which models"),
        (429, "queue_timeout", None, "Send it again later"),
        (429, "insufficient_quota", None, "Ask your administrator"),
        (429, "rate_limit_exceeded", None, "Send a smaller request"),
    ],
)
def test_every_failure_has_a_next_step(status: int, code: str, retry_after_s: float | None, step: str) -> None:
    assert next_step(refused(status, code, retry_after_s=retry_after_s)).startswith(step)
