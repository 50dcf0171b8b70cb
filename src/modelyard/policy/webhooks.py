"""When a webhook is tried again, when it is given up, and which events it is told of.

The first retries come fast, since most failures are a restart; then every few
hours, for three days, since a receiver may be down over a weekend
(``reference/faults.md`` F38). Jitter keeps what failed together from coming
back together. A webhook that took nothing for days is disabled, so that it
does not cost attempts for ever.
"""

import math
from calendar import timegm
from collections.abc import Iterable
from email.utils import parsedate_to_datetime

import msgspec

from modelyard.domain.events import EventType
from modelyard.domain.webhooks import Attempt, Delivery, DeliveryStatus

PAUSES_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0)
"""Pauses before the first retries; the last one is that before every further one."""
GIVE_UP_S = 3 * 24 * 3600.0
"""No retry begins later than this after the first attempt."""
JITTER = 0.25
ATTEMPTS_KEPT = 20
GONE = 410
"""The receiver says that it will never want it."""
BUSY = (429, 503)
"""The receiver says that it will want it later; ``Retry-After`` may say when."""
RETRY_AFTER_S_MAX = PAUSES_S[-1]
"""Longest time that a receiver is left alone because it asks for it: no longer than one that says nothing."""
TRIED_S_MIN = 12 * 3600.0
"""How long the very message must have been tried before its failure is a reason to disable: where there was none for a
week, the first one that fails says nothing of the week."""
QUIET_S_MAX = 300.0
HURRY_AFTER_S = 600.0
"""A receiver that comes back after so long gets at once what waits for it; one that fails now and then does not."""

_DAY_S = 86_400.0


def next_try(tries: int, *, since: float, now: float, chance: float) -> float | None:
    """Return when to try again after ``tries`` failures (unix seconds), None to give up.

    ``since`` is the time of the first attempt; ``chance`` is uniform in [0, 1).
    """
    assert tries >= 1, "asked after a failure"
    pause_s = PAUSES_S[min(tries, len(PAUSES_S)) - 1]
    at = now + pause_s * (1 - JITTER + 2 * JITTER * chance)
    return at if at - since <= GIVE_UP_S else None


def after(delivery: Delivery, attempt: Attempt, *, now: float, chance: float) -> Delivery:
    """Return the delivery after ``attempt``, which ended ``now``. A test is tried once: somebody looks at it."""
    tries = delivery.tries + 1
    since = attempt.at if delivery.since is None else delivery.since
    status, due = DeliveryStatus.DELIVERED, None
    if not attempt.is_accepted:
        is_final = attempt.status_code == GONE or delivery.event_type is EventType.WEBHOOK_TEST
        due = None if is_final else next_try(tries, since=since, now=now, chance=chance)
        if due is not None and attempt.retry_after_s:
            due = max(due, min(now + attempt.retry_after_s, since + GIVE_UP_S))
        status = DeliveryStatus.FAILED if due is None else DeliveryStatus.PENDING
    return msgspec.structs.replace(
        delivery,
        status=status,
        due_at=due,
        since=since,
        tries=tries,
        attempts=(*delivery.attempts, attempt)[-ATTEMPTS_KEPT:],
    )


def retry_after_s(status: int, header: str, *, now: float) -> float:
    """Return for how long an answer asks to be left alone, by its ``Retry-After``: seconds, or a date; 0: it does not.

    Only what is busy is believed, and not for ever: a page of maintenance that somebody forgot asks for a day.
    """
    text = header.strip()
    if status not in BUSY or not text:
        return 0.0
    if text.isascii() and text.isdigit():
        asked_s = float(text[:12])
    else:
        try:
            asked_s = timegm(parsedate_to_datetime(text).utctimetuple()) - now
        except (ValueError, OverflowError):
            return 0.0
    return min(max(asked_s, 0.0), RETRY_AFTER_S_MAX)


def quiet_s(failures: int, *, asked_s: float = 0.0) -> float:
    """Return how long a receiver is left alone after so many failures in a row, whatever waits for it.

    ``asked_s`` is how long it asked for.

    One that is away for a day would be asked ten thousand times where as many messages wait; and one message that
    always fails, among others that do not, holds those up for a second.
    """
    assert failures >= 1, "asked after a failure"
    return max(min(QUIET_S_MAX, 2.0 ** min(failures - 1, 16)), asked_s)


def reason_to_disable(
    attempt: Attempt, *, failing_since: float | None, failing_s: float, tried_s: float = math.inf
) -> str:
    """Return why a webhook is disabled after ``attempt``; "": it is not. The message was tried for ``tried_s`` by then.

    ``failing_since`` is the first failure since its last success: long ago, where there was nothing to tell since.
    """
    if attempt.is_accepted:
        return ""
    if attempt.status_code == GONE:
        return "its receiver answered 410 Gone"
    if failing_since is not None and attempt.at - failing_since >= failing_s and tried_s >= TRIED_S_MIN:
        last = f"HTTP {attempt.status_code}" if attempt.status_code is not None else attempt.error
        return f"it took nothing for {failing_s / _DAY_S:g} days, the last time: {last}"
    return ""


def wants(types: Iterable[str], kind: EventType) -> bool:
    """Say whether a webhook with these ``types`` is told of an event: by its name, ``batch.*`` or ``*``.

    A test is for one webhook and for no other, whatever its types.
    """
    if kind is EventType.WEBHOOK_TEST:
        return False
    family = kind.partition(".")[0] + ".*"
    return any(one in ("*", kind.value, family) for one in types)


def types_of(patterns: Iterable[str]) -> list[EventType]:
    """Return the types that ``patterns`` name."""
    wanted = tuple(patterns)
    return [kind for kind in EventType if wants(wanted, kind)]


def is_pattern(text: str) -> bool:
    """Say whether ``text`` names a type of event, a family of them, or all."""
    return bool(types_of([text]))
