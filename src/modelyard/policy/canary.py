"""Whether a new version goes on, waits or goes back, from what happened to both versions in the same time.

Few samples must not decide. Failures are compared by Fisher's exact test, one
sided: how likely is it that so many of the failures fell on the candidate if
both versions failed alike? It is exact for any number of requests, so that a
version that fails half of them is found out after about ten, and one that is
only unlucky is left alone. Quantiles of latency are compared with a margin for
how well so few requests tell them, as for a log-normal distribution, which is
what latencies look like. The judge looks every second, so each look must be
far surer than one look alone would have to be.

What is worse but not surely so neither promotes nor rolls back: it waits.
"""

import math
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from modelyard.domain.rollouts import Rollout, RolloutKind, RolloutMode, RolloutState
from modelyard.domain.signals import Window

ALPHA = 0.0005
"""Chance, at one look, to take equal versions for unequal in their failures."""
SURE_Z = 3.5
"""Standard errors beyond the threshold that a quantile must lie; one look in 4,000 does so by chance."""
STOP_SHARE = 0.5
STOP_REQUESTS = 10
"""A candidate that fails more than this share of at least so many requests goes back, whatever the stable one does."""
STABLE_REQUESTS = 20
"""Fewest requests of the stable version that it can be compared with."""
QUANTILE_REQUESTS = 20
"""Fewest requests on either side that a 95th percentile says anything about."""
ATTEMPTS_MAX = 3
"""Failed starts in a row, none ready, after which a candidate cannot start: one or two may be bad luck."""
TTFT_SLACK_S = 0.02
ITL_SLACK_S = 0.002
"""Differences below these are noise of the machine, or nobody's concern."""

_P95_Z = 1.645
_P95_ERROR = 2.11
"""Standard error of the logarithm of a 95th percentile for a spread of 1: sqrt(0.05 x 0.95) / density at 1.645."""
_SPREAD = 0.5
"""Spread of the logarithms where no median is known: long streams average their own noise away."""

Data = dict[str, str | int | float | bool | None]


class Verdict(StrEnum):
    """What to do."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


class Decision(msgspec.Struct, frozen=True):
    """A verdict, why, and the numbers behind it."""

    verdict: Verdict
    reason: str
    data: Data = {}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How far the candidate's replicas are.

    ``attempts`` counts starts that failed in a row, or replicas that crashed in a row, and ``trouble`` is the last
    one. ``is_hopeless``: no further try can help (its engine is not installed). ``ready_at``: when the first of those
    that are ready became so; ``since``: when something last happened to one of them.
    """

    ready: int
    ready_at: float = 0.0
    since: float = 0.0
    attempts: int = 0
    stable_attempts: int = 0
    trouble: str = ""
    is_hopeless: bool = False
    is_asleep: bool = False


class Cost(msgspec.Struct, frozen=True):
    """What a second of service on a replica costs. ``price``: of one of its accelerators for an hour, 0 unknown."""

    slots: int = 1
    accelerators: int = 1
    price: float = 0.0
    kind: str = ""
    """Of the accelerators: without prices only the same kind can be compared."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of both versions since the candidate has its ``weight``."""

    weight: int
    stable: Window
    candidate: Window
    start: Start
    stable_cost: Cost = Cost()
    candidate_cost: Cost = Cost()


class Finding(msgspec.Struct, frozen=True):
    """Something that the candidate is worse in, and whether that is more than chance."""

    reason: str
    is_sure: bool


def judge(rollout: Rollout, seen: Evidence, now: float) -> Decision:
    """Return what to do with ``rollout`` now.

    A candidate that the judge promoted is watched while the version before is kept: there is nothing to compare it
    with any more, but one that fails outright goes back.
    """
    if is_watched(rollout, now):
        return _watch(rollout, seen, now)
    if rollout.state is not RolloutState.RUNNING:
        return Decision(Verdict.WAIT, f"it is {rollout.state}")
    if (starting := _judge_start(rollout, seen.start, now)) is not None:
        return starting
    if rollout.kind is RolloutKind.ROLLING:
        return Decision(Verdict.WAIT, "replica by replica: each new one is ready before an old one goes")
    if rollout.mode is RolloutMode.MANUAL:
        return Decision(Verdict.WAIT, "it goes on when it is promoted: its mode is manual")
    return _judge_traffic(rollout, seen, now)


def _judge_traffic(rollout: Rollout, seen: Evidence, now: float) -> Decision:
    data = numbers(rollout, seen)
    if (stop := _hard_stop(seen.candidate)) is not None:
        return Decision(Verdict.ROLL_BACK, stop, data)
    findings = list(compare(rollout, seen))
    if sure := next((finding for finding in findings if finding.is_sure), None):
        return Decision(Verdict.ROLL_BACK, sure.reason, data)
    if waiting := _not_yet(rollout, seen, now):
        return Decision(Verdict.WAIT, waiting, data)
    if findings:
        reason = f"{findings[0].reason}; that may be chance, more requests will tell"
        return Decision(Verdict.WAIT, reason, data)
    return Decision(Verdict.PROMOTE, _praise(seen), data)


def is_watched(rollout: Rollout, now: float) -> bool:
    """Say whether a promotion may still be taken back by the judge."""
    return rollout.state is RolloutState.PROMOTED and rollout.mode is RolloutMode.AUTO and now < rollout.kept_until


def compare(rollout: Rollout, seen: Evidence) -> Iterator[Finding]:
    """Yield what the candidate is worse in."""
    limits, stable, candidate = rollout.thresholds, seen.stable, seen.candidate
    if finding := _failures(stable, candidate, limits.error_share_more):
        yield finding
    # A new replica has cold caches: its first answers are slow and dear whatever version it runs.
    if candidate.requests < max(limits.min_requests, QUANTILE_REQUESTS) or stable.requests < QUANTILE_REQUESTS:
        return
    if finding := _slower(
        "TTFT p95", (stable.ttft_p95_s, candidate.ttft_p95_s), limits.ttft_ratio, TTFT_SLACK_S, (stable, candidate)
    ):
        yield finding
    if finding := _slower(
        "ITL p95", (stable.itl_p95_s, candidate.itl_p95_s), limits.itl_ratio, ITL_SLACK_S, (stable, candidate)
    ):
        yield finding
    if finding := _dearer(seen, limits.cost_ratio):
        yield finding


def numbers(rollout: Rollout, seen: Evidence) -> Data:
    """Return what the judge looks at, for events."""
    data: Data = {"weight": seen.weight, "target": rollout.target, "step": rollout.step + 1}
    for name, window, cost in (
        ("stable", seen.stable, seen.stable_cost),
        ("candidate", seen.candidate, seen.candidate_cost),
    ):
        data[f"{name}_requests"] = window.requests
        data[f"{name}_errors"] = window.errors
        data[f"{name}_ttft_p95_s"] = _rounded(window.ttft_p95_s)
        data[f"{name}_itl_p95_s"] = _rounded(window.itl_p95_s)
        data[f"{name}_seconds_per_1m_tokens"] = _rounded(_seconds_per_1m(window, cost))
    return data


def fisher(stable_errors: int, stable: int, candidate_errors: int, candidate: int) -> float:
    """Return the chance of at least ``candidate_errors`` failures on the candidate if both fail alike.

    One sided: 1 for a candidate that fails no larger share than the stable version.
    """
    if candidate_errors * stable <= stable_errors * candidate:
        return 1.0
    errors, whole = stable_errors + candidate_errors, stable + candidate
    most = min(errors, candidate)
    first = _log_choose(errors, candidate_errors) + _log_choose(whole - errors, candidate - candidate_errors)
    term = math.exp(first - _log_choose(whole, candidate))
    total = 0.0
    for count in range(candidate_errors, most + 1):
        total += term
        if term < total * 1e-12:
            break
        term *= (errors - count) * (candidate - count)
        term /= (count + 1) * (whole - errors - candidate + count + 1)
    return min(total, 1.0)


def cost_per_1m(window: Window, cost: Cost) -> float | None:
    """Return what a million tokens cost in the unit of ``cost.price``; in accelerator hours where that is unknown."""
    seconds = _seconds_per_1m(window, cost)
    return None if seconds is None else seconds / 3600.0 * (cost.price or 1.0)


# --- before the first request ------------------------------------------------------


def _judge_start(rollout: Rollout, start: Start, now: float) -> Decision | None:
    data: Data = {"attempts": start.attempts, "ready": start.ready}
    if start.ready > 0:
        if start.attempts < ATTEMPTS_MAX or start.attempts <= start.stable_attempts:
            return None
        reason = f"replicas of the candidate ended {start.attempts} times in a row: {start.trouble}"
        return Decision(Verdict.ROLL_BACK, reason, data)
    if start.is_hopeless or start.attempts >= ATTEMPTS_MAX:
        times = "" if start.is_hopeless else f"; {start.attempts} starts failed"
        return Decision(Verdict.ROLL_BACK, f"the candidate cannot start: {start.trouble}{times}", data)
    if start.is_asleep:
        return Decision(Verdict.WAIT, "the endpoint sleeps; the candidate is judged when requests come", data)
    waited_s = now - max(rollout.asked_at, start.since)
    if waited_s > rollout.thresholds.ready_within_s:
        why = f": {start.trouble}" if start.trouble else ""
        limit = f"{rollout.thresholds.ready_within_s:g} s"
        return Decision(Verdict.ROLL_BACK, f"the candidate was not ready within {limit}{why}", data)
    trouble = f": {start.trouble}" if start.trouble else ""
    if start.attempts:
        trouble = f" (start {start.attempts} of {ATTEMPTS_MAX} failed{trouble})"
    return Decision(Verdict.WAIT, f"no replica of the candidate is ready yet{trouble}", data)


# --- comparisons -------------------------------------------------------------------


def _watch(rollout: Rollout, seen: Evidence, now: float) -> Decision:
    starting = _judge_start(rollout, seen.start, now)
    if starting is not None and starting.verdict is Verdict.ROLL_BACK:
        return starting
    if stop := _hard_stop(seen.candidate):
        return Decision(Verdict.ROLL_BACK, f"with all traffic {stop}", numbers(rollout, seen))
    return Decision(Verdict.WAIT, f"it is {rollout.state}")


def _hard_stop(candidate: Window) -> str | None:
    if candidate.requests < STOP_REQUESTS or candidate.error_share <= STOP_SHARE:
        return None
    return f"the candidate failed {candidate.errors} of {candidate.requests} requests"


def _failures(stable: Window, candidate: Window, more: float) -> Finding | None:
    if candidate.error_share <= stable.error_share + more:
        return None
    chance = fisher(stable.errors, stable.requests, candidate.errors, candidate.requests)
    reason = (
        f"the candidate failed {candidate.errors} of {candidate.requests} requests ({candidate.error_share:.1%}), "
        f"stable {stable.errors} of {stable.requests} ({stable.error_share:.1%})"
    )
    if chance >= ALPHA:
        return Finding(reason, is_sure=False)
    return Finding(f"{reason}; by chance that happens once in {1 / max(chance, 1e-9):.0f}", is_sure=True)


def _slower(
    what: str,
    values: tuple[float | None, float | None],
    ratio_max: float,
    slack_s: float,
    windows: tuple[Window, Window],
) -> Finding | None:
    before, after = values
    if ratio_max <= 0 or before is None or after is None:
        return None
    if after <= before * ratio_max or after - before <= slack_s:
        return None
    # Only time to first token has a median beside it.
    spreads = [_spread(window) if what.startswith("TTFT") else _SPREAD for window in windows]
    error = _P95_ERROR * math.sqrt(
        sum(spread**2 / window.requests for spread, window in zip(spreads, windows, strict=True))
    )
    is_sure = math.log(after / max(before, 1e-9)) > math.log(ratio_max) + SURE_Z * error
    reason = (
        f"{what} of the candidate is {_ms(after)}, of stable {_ms(before)}: more than {ratio_max:g} times as long "
        f"({windows[1].requests} and {windows[0].requests} requests)"
    )
    return Finding(reason, is_sure=is_sure)


def _spread(window: Window) -> float:
    if not window.ttft_p50_s or not window.ttft_p95_s:
        return _SPREAD
    # A quarter of a bucket's width is the least that a histogram can tell.
    return max(math.log(window.ttft_p95_s / window.ttft_p50_s) / _P95_Z, 0.14)


def _dearer(seen: Evidence, ratio_max: float) -> Finding | None:
    stable, candidate = cost_per_1m(seen.stable, seen.stable_cost), cost_per_1m(seen.candidate, seen.candidate_cost)
    if ratio_max <= 0 or not stable or candidate is None:
        return None
    if not _are_comparable(seen.stable_cost, seen.candidate_cost):
        return None
    if candidate <= stable * ratio_max:
        return None
    # Sums of many requests: their logarithm errs by about the spread of one over the root of their number.
    error = math.sqrt(1.0 / seen.stable.requests + 1.0 / seen.candidate.requests)
    reason = (
        f"a million tokens of the candidate cost {candidate / stable:.2f} times those of stable, "
        f"more than {ratio_max:g} times"
    )
    return Finding(reason, is_sure=math.log(candidate / stable) > math.log(ratio_max) + SURE_Z * error)


def _are_comparable(stable: Cost, candidate: Cost) -> bool:
    if stable.price > 0 and candidate.price > 0:
        return True
    return stable.kind == candidate.kind and stable.price == candidate.price


def _seconds_per_1m(window: Window, cost: Cost) -> float | None:
    """Return the accelerator seconds of a million tokens."""
    tokens = window.prompt_tokens + window.completion_tokens
    if tokens == 0 or window.service_s <= 0:
        return None
    return window.service_s / max(cost.slots, 1) * max(cost.accelerators, 1) / tokens * 1e6


# --- time and number ---------------------------------------------------------------


def _not_yet(rollout: Rollout, seen: Evidence, now: float) -> str:
    """Return what is missing before the next step, "" for nothing."""
    limits = rollout.thresholds
    if seen.weight < rollout.target:
        return f"its replicas for {rollout.target} % are not ready yet ({seen.start.ready} are)"
    since_s = now - max(rollout.step_began_at, seen.start.ready_at)
    had, needed = seen.candidate.requests, limits.min_requests
    if had == 0:
        return f"no request reached the candidate in {since_s:.0f} s; it needs {needed} to be judged"
    if had < needed:
        return f"the candidate had {had} of {needed} requests"
    if seen.stable.requests < min(STABLE_REQUESTS, needed):
        return f"stable had only {seen.stable.requests} requests in the same time: nothing to compare with"
    if since_s < limits.min_step_s:
        return f"{had} requests were good enough; this step lasts at least {limits.min_step_s:g} s"
    return ""


def _praise(seen: Evidence) -> str:
    stable, candidate = seen.stable, seen.candidate
    parts = [
        f"{candidate.errors} of {candidate.requests} requests failed (stable {stable.errors} of {stable.requests})"
    ]
    for what, before, after in (
        ("TTFT p95", stable.ttft_p95_s, candidate.ttft_p95_s),
        ("ITL p95", stable.itl_p95_s, candidate.itl_p95_s),
    ):
        if before is not None and after is not None:
            parts.append(f"{what} {_ms(after)} (stable {_ms(before)})")
    return "as good as stable: " + ", ".join(parts)


def _log_choose(whole: int, part: int) -> float:
    if part < 0 or part > whole:
        return -math.inf
    return math.lgamma(whole + 1) - math.lgamma(part + 1) - math.lgamma(whole - part + 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
