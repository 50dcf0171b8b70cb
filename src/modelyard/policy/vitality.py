"""Whether a replica lives: a fold over probes.

The readiness probe alone is a bad judge of a replica that serves: a saturated
engine answers it late, and one whose compute thread hangs answers it at once.
So any sign of life counts (a probe answered, tokens counted, a request that
succeeded), and answering probes without ever producing a token while requests
run is no life.
"""

import msgspec

from modelyard.policy.reconcile import Vital

STALL_FACTOR = 4
"""A replica may answer probes without a token for this many hang timeouts (2 minutes by default): one long prompt on
a slow machine is computed for that long before its first token."""


class Probe(msgspec.Struct, frozen=True):
    """One look. ``running`` and ``tokens`` (a total that only grows) are None where the engine did not say."""

    now_s: float
    is_answering: bool
    running: int | None = None
    tokens: float | None = None
    has_served: bool = False
    """A gateway got a good answer since the last look."""


class Pulse(msgspec.Struct, frozen=True):
    """What ``judge`` keeps.

    ``alive_s``: the last sign of life; ``moved_s``: when it last produced something or had nothing to do.
    """

    since_s: float
    alive_s: float
    moved_s: float
    was_ready: bool = False
    tokens: float | None = None


class Verdict(msgspec.Struct, frozen=True):
    """The state, why, and what to remember."""

    vital: Vital
    reason: str
    pulse: Pulse


def first_pulse(now_s: float, *, was_ready: bool) -> Pulse:
    """Return the memory of a replica that is watched from now on."""
    return Pulse(since_s=now_s, alive_s=now_s, moved_s=now_s, was_ready=was_ready)


def judge(pulse: Pulse, probe: Probe, *, hang_timeout_s: float, load_timeout_s: float) -> Verdict:
    """Return what ``probe`` means after everything before it."""
    now_s = probe.now_s
    has_moved = probe.tokens is not None and pulse.tokens is not None and probe.tokens != pulse.tokens
    is_alive = probe.is_answering or has_moved or probe.has_served
    # Only a page that says so proves that nothing runs; silence leaves the clock where it is.
    is_idle = probe.running == 0
    pulse = Pulse(
        since_s=pulse.since_s,
        alive_s=now_s if is_alive else pulse.alive_s,
        moved_s=now_s if has_moved or is_idle or probe.has_served else pulse.moved_s,
        was_ready=pulse.was_ready or probe.is_answering,
        tokens=pulse.tokens if probe.tokens is None else probe.tokens,
    )
    if not pulse.was_ready:
        if now_s - pulse.since_s >= load_timeout_s:
            return Verdict(Vital.HUNG, f"it was not ready within {load_timeout_s:.0f} s", pulse)
        return Verdict(Vital.LOADING, "", pulse)
    if now_s - pulse.alive_s >= hang_timeout_s:
        return Verdict(Vital.HUNG, f"it gave no sign of life for {hang_timeout_s:g} s", pulse)
    stall_s = STALL_FACTOR * hang_timeout_s
    if probe.running and pulse.tokens is not None and now_s - pulse.moved_s >= stall_s:
        return Verdict(Vital.HUNG, f"it has requests running and produced no token for {stall_s:g} s", pulse)
    return Verdict(Vital.READY, "", pulse)
