"""For how long each signal has been above its threshold, or calm: the source's triggers, kept as moments.

A gate remembers since when its signal stands on one side. Time in which
nothing is known counts for neither side: missing data is never taken for
missing demand, nor for overload.
"""

from collections.abc import Iterator

import msgspec

from modelyard.domain.endpoints import Autoscale


class Gates(msgspec.Struct, frozen=True):
    """Since when (monotonic seconds) each condition holds; None: it does not."""

    queue_s: float | None = None
    utilization_s: float | None = None
    latency_s: float | None = None
    kv_s: float | None = None
    empty_s: float | None = None
    """No request has waited since."""
    unused_s: float | None = None
    """Utilisation has been low since."""


class Signals(msgspec.Struct, frozen=True):
    """What gates watch. Shares are 0 to 1; None is not known."""

    queued: int
    utilization: float | None
    kv_use: float | None
    latency_s: float | None


SHUT = Gates()
"""What is remembered of nothing."""


def watch(gates: Gates, rules: Autoscale, seen: Signals, now_s: float) -> Gates:
    """Return ``gates`` with what is seen now."""
    use, kv = seen.utilization, seen.kv_use
    return Gates(
        queue_s=_since(gates.queue_s, seen.queued > rules.up_queue, now_s),
        utilization_s=_since(gates.utilization_s, use is not None and use * 100 > rules.up_utilization, now_s),
        latency_s=_since(
            gates.latency_s, seen.latency_s is not None and seen.latency_s > latency_limit_s(rules), now_s
        ),
        kv_s=_since(gates.kv_s, kv is not None and kv * 100 > rules.up_kv, now_s),
        empty_s=_since(gates.empty_s, seen.queued == 0, now_s),
        unused_s=_since(gates.unused_s, use is not None and use * 100 < rules.down_utilization, now_s),
    )


def latency_limit_s(rules: Autoscale) -> float:
    """Return the p99 above which the latency gate opens."""
    target_s = rules.target_ttft_s if rules.target_latency_s is None else rules.target_latency_s
    return rules.up_latency_factor * target_s


def reason_up(gates: Gates, rules: Autoscale, seen: Signals, now_s: float) -> str:
    """Return why to grow: the first gate that is open, or "" when none is."""
    return next(_open(gates, rules, seen, now_s), "")


def _open(gates: Gates, rules: Autoscale, seen: Signals, now_s: float) -> Iterator[str]:
    if (held_s := _held(gates.queue_s, now_s)) > rules.up_queue_s:
        yield f"{seen.queued} requests queued, more than {rules.up_queue} for {held_s:.0f} s"
    if (held_s := _held(gates.utilization_s, now_s)) > rules.up_utilization_s:
        yield f"utilisation {_percent(seen.utilization)}, above {rules.up_utilization:g} % for {held_s:.0f} s"
    if (held_s := _held(gates.latency_s, now_s)) > rules.up_latency_s:
        kind = "time to first token" if rules.target_latency_s is None else "latency"
        limit_s = latency_limit_s(rules)
        yield f"p99 {kind} {seen.latency_s or 0:.1f} s, above {limit_s:g} s for {held_s:.0f} s"
    if (held_s := _held(gates.kv_s, now_s)) > rules.up_kv_s:
        yield f"KV cache {_percent(seen.kv_use)} full, above {rules.up_kv:g} % for {held_s:.0f} s"


def calm_left_s(gates: Gates, rules: Autoscale, now_s: float) -> float | None:
    """Return the seconds until all down gates have been calm for long enough; None while one is not calm at all."""
    if gates.empty_s is None or gates.unused_s is None:
        return None
    # More than the time, as the source says: at the very second it is not yet over.
    return max(
        rules.down_queue_s - _held(gates.empty_s, now_s), rules.down_utilization_s - _held(gates.unused_s, now_s)
    )


def calm_text(gates: Gates, now_s: float) -> str:
    """Return how long it has been calm."""
    return f"no queue for {_held(gates.empty_s, now_s):.0f} s, little used for {_held(gates.unused_s, now_s):.0f} s"


def _since(since_s: float | None, is_so: bool, now_s: float) -> float | None:  # noqa: FBT001 - the condition itself
    if not is_so:
        return None
    return now_s if since_s is None else since_s


def _held(since_s: float | None, now_s: float) -> float:
    return -1.0 if since_s is None else now_s - since_s


def _percent(share: float | None) -> str:
    return f"{100 * (share or 0):.0f} %"
