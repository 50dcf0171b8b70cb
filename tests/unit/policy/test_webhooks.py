"""F38: a receiver that is down for a day, in virtual time, gets its message; one that is down for good is given up."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.events import EventType
from modelyard.domain.webhooks import Attempt, Delivery, DeliveryStatus
from modelyard.policy.webhooks import (
    GIVE_UP_S,
    HURRY_AFTER_S,
    JITTER,
    PAUSES_S,
    QUIET_S_MAX,
    RETRY_AFTER_S_MAX,
    TRIED_S_MIN,
    after,
    next_try,
    quiet_s,
    reason_to_disable,
    retry_after_s,
    types_of,
    wants,
)

DAY_S = 86_400.0


def tries_until(down_s: float, chance: random.Random) -> tuple[int, float | None]:
    """Return how many tries a receiver sees that is down so long, and when the last one came (None: given up)."""
    since = now = 1_000_000.0
    tries = 0
    while now - since < down_s:
        tries += 1
        due = next_try(tries, since=since, now=now, chance=chance.random())
        if due is None:
            return tries, None
        now = due
    return tries + 1, now - since


@pytest.mark.parametrize("seed", range(20))
def test_a_receiver_that_is_down_for_a_day_gets_its_message(seed: int) -> None:
    tries, delivered = tries_until(DAY_S, random.Random(seed))
    assert delivered is not None
    assert delivered < DAY_S + PAUSES_S[-1] * (1 + JITTER)
    assert 8 <= tries <= 16


@pytest.mark.parametrize("seed", range(20))
def test_one_that_is_down_for_good_is_given_up_after_three_days(seed: int) -> None:
    tries, delivered = tries_until(30 * DAY_S, random.Random(seed))
    assert delivered is None
    assert 20 <= tries <= 40


def test_a_restart_is_waited_out_in_seconds() -> None:
    tries, delivered = tries_until(20.0, random.Random(1))
    assert tries == 3
    assert delivered is not None
    assert delivered < 60


@given(
    tries=st.integers(1, 1000),
    waited=st.floats(0, 2 * GIVE_UP_S),
    chance=st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None, max_examples=60)
def test_every_pause_is_within_its_jitter_and_none_comes_too_late(tries: int, waited: float, chance: float) -> None:
    due = next_try(tries, since=0.0, now=waited, chance=chance)
    pause = PAUSES_S[min(tries, len(PAUSES_S)) - 1]
    if due is None:
        assert waited + pause * (1 + JITTER) >= GIVE_UP_S
    else:
        assert pause * (1 - JITTER) * 0.999 <= due - waited <= pause * (1 + JITTER) * 1.001
        assert due <= GIVE_UP_S


# --- after an attempt -----------------------------------------------------------------------------------------------


def a_delivery(**changes: object) -> Delivery:
    delivery = Delivery(
        id="dlv_1", event_id="evt_1", event_type=EventType.BATCH_COMPLETED, tenant_id="t", created_at=0.0, due_at=0.0
    )
    return msgspec.structs.replace(delivery, **changes)


@pytest.mark.parametrize(
    ("status_code", "status"),
    [
        (200, "delivered"),
        (204, "delivered"),
        (299, "delivered"),
        (None, "pending"),
        (199, "pending"),
        (300, "pending"),
        (404, "pending"),
        (429, "pending"),
        (500, "pending"),
        (410, "failed"),
    ],
)
def test_only_2xx_is_taken_and_only_410_is_final(status_code: int | None, status: str) -> None:
    told = after(a_delivery(), Attempt(5.0, status_code), now=6.0, chance=0.5)
    assert (told.status, told.tries, told.since, told.attempts) == (status, 1, 5.0, (Attempt(5.0, status_code),))
    assert (told.due_at is None) is (status != "pending")


def test_a_test_is_tried_once() -> None:
    told = after(a_delivery(event_type=EventType.WEBHOOK_TEST), Attempt(5.0, 500), now=6.0, chance=0.5)
    assert (told.status, told.due_at) == (DeliveryStatus.FAILED, None)


def test_only_the_last_attempts_are_kept() -> None:
    delivery = a_delivery()
    for at in range(100):
        delivery = after(delivery, Attempt(float(at), 500), now=float(at), chance=0.5)
    assert [one.at for one in delivery.attempts] == [float(at) for at in range(80, 100)]
    assert (delivery.tries, delivery.since) == (100, 0.0)


# --- disabling ---


@pytest.mark.parametrize(
    ("story", "attempt", "failing_since", "reason"),
    [
        ("it was taken", Attempt(900.0, 200), 0.0, ""),
        ("the first failure", Attempt(900.0, 500), None, ""),
        ("not for long enough", Attempt(99.0, 500), 0.0, ""),
        ("for long enough", Attempt(172_800.0, 500), 0.0, "it took nothing for 2 days, the last time: HTTP 500"),
        (
            "and nobody answers",
            Attempt(172_800.0, None, "no whole answer within 10 s"),
            0.0,
            "it took nothing for 2 days, the last time: no whole answer within 10 s",
        ),
        ("it is gone", Attempt(1.0, 410), None, "its receiver answered 410 Gone"),
    ],
)
def test_who_is_disabled_and_why(story: str, attempt: Attempt, failing_since: float | None, reason: str) -> None:
    found = reason_to_disable(attempt, failing_since=failing_since, failing_s=2 * DAY_S)
    assert found == reason, story


# --- how often one that fails is asked ---


def test_a_receiver_that_fails_once_is_left_alone_for_a_second_and_never_for_long() -> None:
    pauses = [quiet_s(failures) for failures in range(1, 100)]
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == QUIET_S_MAX
    assert sum(pauses[:9]) < HURRY_AFTER_S, "so that one that comes back after that long is told all that waits"


def test_one_message_is_never_held_up_by_its_own_failures() -> None:
    for tries in range(1, 40):
        due = next_try(tries, since=0.0, now=0.0, chance=0.0)
        assert due is not None
        assert due >= quiet_s(tries), tries


# --- types ---


@pytest.mark.parametrize(
    ("types", "kind", "is_told"),
    [
        (["*"], EventType.BATCH_COMPLETED, True),
        (["batch.*"], EventType.BATCH_COMPLETED, True),
        (["batch.completed"], EventType.BATCH_COMPLETED, True),
        (["budget.*", "batch.failed"], EventType.BATCH_FAILED, True),
        (["batch.failed"], EventType.BATCH_COMPLETED, False),
        (["bat*"], EventType.BATCH_COMPLETED, False),
        ([], EventType.BATCH_COMPLETED, False),
        (["webhook.*"], EventType.WEBHOOK_DISABLED, True),
        (["*", "webhook.*", "webhook.test"], EventType.WEBHOOK_TEST, False),
    ],
)
def test_who_is_told_of_what(types: list[str], kind: EventType, *, is_told: bool) -> None:
    assert wants(types, kind) is is_told
    assert (kind in types_of(types)) is is_told


def test_each_type_can_be_asked_for_alone_and_by_its_family() -> None:
    for kind in EventType:
        if kind is not EventType.WEBHOOK_TEST:
            assert types_of([kind.value]) == [kind]
            assert kind in types_of([kind.value.split(".")[0] + ".*"])
    assert len(types_of(["*"])) == len(EventType) - 1


# --- what a receiver asks for ---


@pytest.mark.parametrize(
    ("status", "header", "asked_s"),
    [
        (429, "120", 120.0),
        (503, " 7 ", 7.0),
        (503, "Thu, 01 Jan 1970 00:20:00 GMT", 200.0),
        (503, "Thu, 01 Jan 1970 00:20:00 -0000", 200.0),
        (503, "Thu, 01 Jan 1970 01:20:00 +0100", 200.0),
        (503, "Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        (429, "0", 0.0),
        (429, "9" * 400, RETRY_AFTER_S_MAX),
        (503, "Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_S_MAX),
        (429, "", 0.0),
        (429, "soon", 0.0),
        (429, "-5", 0.0),
        (429, "1.5", 0.0),
        (429, "\u0661", 0.0),
        (429, "Thu, 99 Foo 1970", 0.0),
        (500, "120", 0.0),
        (404, "120", 0.0),
        (200, "120", 0.0),
    ],
)
def test_only_what_is_busy_is_believed_and_not_for_ever(status: int, header: str, asked_s: float) -> None:
    assert retry_after_s(status, header, now=1000.0) == asked_s


DATES = r"[A-Z][a-z]{2}, [0-9]{1,3} (Jan|Feb|Foo) [0-9]{1,5} [0-9:]{1,9} ([A-Z]{3}|[+-][0-9]{0,6})"


@given(st.text(max_size=40) | st.from_regex(DATES, fullmatch=True))
@settings(deadline=None)
def test_whatever_a_receiver_says_is_a_bounded_pause(header: str) -> None:
    assert 0 <= retry_after_s(503, header, now=1.8e9) <= RETRY_AFTER_S_MAX


def test_a_pause_is_never_shorter_than_what_was_asked_for_nor_than_without() -> None:
    asked = Attempt(5.0, 503, retry_after_s=900.0)
    assert after(a_delivery(), asked, now=6.0, chance=0.5).due_at == 906.0
    late = a_delivery(tries=7, since=0.0)
    assert after(late, Attempt(5.0, 429, retry_after_s=1.0), now=6.0, chance=0.5).due_at == 6.0 + PAUSES_S[-1]
    assert (quiet_s(1, asked_s=900.0), quiet_s(9, asked_s=1.0)) == (900.0, 256.0)


def test_asking_for_a_pause_does_not_take_the_last_try_away() -> None:
    end = a_delivery(tries=3, since=0.0)
    told = after(end, Attempt(0.0, 503, retry_after_s=RETRY_AFTER_S_MAX), now=GIVE_UP_S - 3600, chance=0.5)
    assert (told.status, told.due_at) == (DeliveryStatus.PENDING, GIVE_UP_S)


def test_the_first_message_after_a_quiet_week_is_no_reason_to_disable() -> None:
    attempt = Attempt(9 * DAY_S, 500)
    for tried_s, is_disabled in ((0.0, False), (TRIED_S_MIN - 1, False), (TRIED_S_MIN, True)):
        reason = reason_to_disable(attempt, failing_since=0.0, failing_s=5 * DAY_S, tried_s=tried_s)
        assert bool(reason) is is_disabled, tried_s
    assert reason_to_disable(Attempt(1.0, 410), failing_since=None, failing_s=5 * DAY_S, tried_s=0.0)
