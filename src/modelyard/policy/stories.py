"""What is remembered of a request, in words: what happened, in the order in which it did, and what to do next.

Every sentence has its numbers. Pure: a story in, sentences out.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from modelyard.domain.why import Considered, RequestStory
from modelyard.policy.money import shown
from modelyard.policy.routing import CROWD, STICKY_S

SHOWN_MAX = 8
"""Replicas that are put into words; data has all."""
WAITED_S_MIN = 0.001
CLIENT_CLOSED = 499

_UNITS = {
    "requests_per_minute": "{} requests a minute",
    "tokens_per_minute": "{} tokens a minute",
    "concurrency": "{} at once",
    "tokens_per_day": "{} tokens a day",
    "tokens_per_month": "{} tokens a month",
}
_LIMITS = {
    "requests": "requests a minute",
    "tokens": "tokens a minute",
    "concurrency": "requests at once",
    "tokens_per_day": "tokens a day",
    "tokens_per_month": "tokens a month",
    "money_prepaid": "of prepaid credit and what was spent of it",
}


def words(story: RequestStory) -> list[str]:
    """Return what happened to a request, a sentence each."""
    parts = (_limits, _line, _place, _moves, _outcome, _cost)
    return [sentence for part in parts for sentence in part(story)]


def next_step(story: RequestStory) -> str:
    """Return what whoever sent the request can do; empty: nothing is wrong."""
    if 200 <= story.status < 300:
        return ""
    step = _STEPS.get(story.code)
    if step is not None:
        return step(story)
    if story.status == CLIENT_CLOSED:
        return "If it left because it waited too long, raise the client's timeout, or ask for a stream."
    if story.retry_after_s is not None:
        return f"Send it again in {_s(story.retry_after_s)}."
    if story.status >= 500:
        return "Send it again; if it keeps failing, the operator finds its id in the logs of gateway and engine."
    return "Change the request as the message says; sent again as it is, it fails again."


# --- parts of the story ---


def _limits(story: RequestStory) -> Iterator[str]:
    if story.source == "ledger":
        yield "No gateway remembers it any more; this is what the ledger has."
        return
    if not story.tenant_id:
        yield "It came without a key that is known here."
        return
    if story.bounds:
        told = "; ".join(f"{bound.whose}: {_bound(bound.kind, bound.limit, story.currency)}" for bound in story.bounds)
        reserved = f", {story.reserved_tokens} tokens reserved at worst" if story.reserved_tokens else ""
        yield f"It was checked against the limits ({told}){reserved}."
    elif story.key_id:
        yield "Neither its key nor its tenant has limits."


def _line(story: RequestStory) -> Iterator[str]:
    line = story.line
    if line is None:
        if story.attempts and story.waited_s < WAITED_S_MIN and story.source != "ledger":
            yield "It did not wait: a replica had room."
        elif story.attempts and story.waited_s >= WAITED_S_MIN:
            yield f"It waited {_s(story.waited_s)}."
        return
    expected = f"; {_s(line.predicted_s)} were predicted" if line.predicted_s is not None else ""
    if line.is_cold:
        behind = f", behind {line.ahead} others" if line.ahead else ""
        yield f"It waited {_s(story.waited_s)} for a replica of '{story.model}' to load{behind}{expected}."
    else:
        yield (
            f"It waited {_s(story.waited_s)}: every replica of '{story.model}' was full and "
            f"{_requests(line.ahead)} stood before it{expected}."
        )


def _place(story: RequestStory) -> Iterator[str]:
    if not story.replica_id:
        return
    if story.fallback:
        yield f"It went to {story.replica_id}, of a fallback: {story.fallback}."
        return
    seen = story.considered
    if not seen:
        beside = f"; {_requests(story.beside)} of this gateway ran there" if story.beside is not None else ""
        yield f"It went to {story.replica_id}, without a choice between replicas{beside}."
        return
    chosen = next(one for one in seen if one.is_chosen)
    with_room = [one for one in seen if one.total_s is not None]
    yield (
        f"{len(with_room)} of {len(seen)} replicas looked at had room; it went to {story.replica_id}, where it added "
        f"{_terms(chosen)}."
    )
    others = sorted((one for one in with_room if not one.is_chosen), key=lambda one: one.total_s or 0.0)
    for one in others[:SHOWN_MAX]:
        yield f"{_named(one)} would have added {_terms(one)}."
    if others and (others[0].total_s or 0.0) < (chosen.total_s or 0.0):
        yield f"It was kept with its session, which may cost up to {_s(STICKY_S)}."
    full = [one for one in seen if one.total_s is None]
    if full:
        told = ", ".join(f"{_named(one)} ({one.running}/{one.slots})" for one in full[:SHOWN_MAX])
        yield f"Without room, draining, or left alone after failures: {told}."
    if len(seen) > CROWD:
        yield "Of so many replicas only some are looked at."


def spill_text(own: int, full: int, ejected: int) -> str:
    """Return why a fallback had to answer, from what there was of the releases with weight."""
    if not own:
        return "no replica of the releases with weight was there"
    parts = {"full": full, "left alone after failures": ejected, "without room for it": own - full - ejected}
    told = ", ".join(f"{number} {what}" for what, number in parts.items() if number > 0)
    return f"no room on the {own} replica{'' if own == 1 else 's'} of the releases with weight ({told})"


def _moves(story: RequestStory) -> Iterator[str]:
    for move in story.moves:
        yield f"{_s(move.at_s)} after its arrival {move.replica_id} failed it ({move.reason}); it went on elsewhere."
    if story.source == "ledger" and story.attempts > 1:
        yield f"It took {story.attempts} attempts."


def _outcome(story: RequestStory) -> Iterator[str]:
    after = f"after {_s(story.latency_s)}" if story.latency_s else "at once"
    first = f", its first token after {_s(story.ttft_s)}" if story.ttft_s is not None else ""
    if 200 <= story.status < 300:
        yield f"It was answered {after}{first}."
    elif story.status == CLIENT_CLOSED:
        yield f"The client left {after}{first}."
    else:
        yield f"It failed {after}{first}: {story.status} {story.code}{': ' if story.message else ''}{story.message}"
        yield from _refusal(story)


def _refusal(story: RequestStory) -> Iterator[str]:
    facts = story.facts
    if "kind" in facts:
        kind, limit, used = str(facts["kind"]), facts["limit"], facts["used"]
        amount = partial(_amount, kind, story.currency)
        bound, taken = amount(limit), amount(used)
        unit = _agreed(_LIMITS.get(kind, ""), limit)
        share = f" (this gateway's share of it was {amount(facts['share'])})" if "share" in facts else ""
        needed = f", and it needed up to {amount(facts['needed'])}" if "needed" in facts else ""
        yield (
            f"The limit of {facts['whose']} is {bound} {unit}".rstrip()
            + f"{share}; {taken} {'was' if taken == '1' else 'were'} used{needed}."
        )
    elif "places" in facts:
        yield (
            f"{facts['running']} of {facts['slots']} slots were taken, {facts['waiting']} of {facts['places']} places "
            f"in line; a wait of {_s(float(facts['predicted_wait_s']))} was predicted."
        )


def _cost(story: RequestStory) -> Iterator[str]:
    if story.prompt_tokens or story.completion_tokens or story.units:
        units = f", {story.units:g} units" if story.units else ""
        yield (
            f"It used {story.prompt_tokens} prompt tokens ({story.cached_tokens} cached) and "
            f"{story.completion_tokens} completion tokens{units}: {shown(story.cost_nanousd, story.currency)}."
        )
    elif story.status >= 400:
        yield "It cost nothing."


# --- what to do ---


def _after_rate(story: RequestStory) -> str:
    when = (
        f"Send it again in {_s(story.retry_after_s)}" if story.retry_after_s is not None else "Send a smaller request"
    )
    return f"{when}, or ask your administrator for a higher limit ('modelyard keys limit')."


def _after_queue(story: RequestStory) -> str:
    when = f"Send it again in {_s(story.retry_after_s)}" if story.retry_after_s is not None else "Send it again later"
    return f"{when}; more replicas ('modelyard endpoints set {story.model} --scale …') make the line shorter."


def _after_quota(story: RequestStory) -> str:
    if story.retry_after_s is None:
        return "Ask your administrator for a larger quota."
    return f"It is renewed in {_s(story.retry_after_s)}; a smaller 'max_tokens' needs less of it."


_STEPS: dict[str, Callable[[RequestStory], str]] = {
    "rate_limit_exceeded": _after_rate,
    "insufficient_quota": _after_quota,
    "queue_full": _after_queue,
    "queue_timeout": _after_queue,
    "model_not_found": lambda story: "See which models this key may call: 'modelyard models'.",
    "invalid_api_key": lambda story: "Check the key: 'modelyard keys' lists those that are valid.",
}


# --- numbers ---


def _terms(one: Considered) -> str:
    cached = f", {one.cached_tokens} tokens of its prompt cached" if one.cached_tokens else ""
    return (
        f"{_s(one.total_s or 0.0)} (wait {_s(one.wait_s or 0.0)}, prompt {_s(one.prefill_s or 0.0)}{cached}, for "
        f"others {_s(one.others_s or 0.0)}; {one.running}/{one.slots} running)"
    )


def _requests(count: int) -> str:
    return "no other request" if not count else "1 request" if count == 1 else f"{count} requests"


def _named(one: Considered) -> str:
    return one.replica_id or "a replica that is gone"


def _bound(kind: str, limit: int, currency: str) -> str:
    if kind.startswith("nanousd"):
        return f"{shown(limit, currency)} a {kind.rpartition('_')[2]}"
    if kind.startswith("money"):
        return f"{shown(limit, currency)} {_LIMITS[kind]}"
    return _agreed(_UNITS.get(kind, "{} " + kind), limit).format(limit)


def _agreed(unit: str, number: Any) -> str:
    return unit.replace("requests", "request").replace("tokens", "token") if number == 1 else unit


def _amount(kind: str, currency: str, amount: Any) -> str:
    """Return money, or a whole number: what has partly come back counts as used."""
    return shown(int(amount), currency) if kind.startswith("money") else str(math.ceil(amount))


def _s(seconds: float) -> str:
    if seconds < 1.0:
        return f"{max(0.0, seconds) * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
