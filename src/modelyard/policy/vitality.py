"""Whether a replica lives: a fold over probes.

The readiness probe alone is a bad judge of a replica that serves: a saturated
engine answers it late, and one whose compute thread hangs answers it at once.
So any sign of life counts (a probe answered, tokens counted, a request that
succeeded), and answering probes without ever producing a token while requests
run is no life, once every prompt could have been read.
"""

import msgspec

from modelyard.policy.reconcile import Vital

STALL_FACTOR = 4
"""A replica never answers probes without a token for more than this many hang timeouts (2 minutes by default)."""
SLOWEST_TOKENS_PER_S = 20.0
"""Slowest reading of a prompt that is left alone: a large model on a laptop. Engines count a prompt when it is read, so
that a long one looks like a hang until then (F8)."""


class Probe(msgspec.Struct, frozen=True):
    """One look. ``running`` and ``progress`` (a total that grows while it computes) are None where the engine did not
    say."""

    now_s: float
    is_answering: bool
    running: int | None = None
    progress: float | None = None
    has_served: bool = False
    """A gateway got a good answer since the last look."""
    reading: int | None = None
    """Tokens of prompts that it may still have to read, as gateways count them; None: they do not say."""


class Pulse(msgspec.Struct, frozen=True):
    """What ``judge`` keeps.

    ``alive_s``: the last sign of life; ``moved_s``: when it last produced something, had nothing to do or began to have
    something to do.
    """

    since_s: float
    alive_s: float
    moved_s: float
    was_ready: bool = False
    progress: float | None = None
    is_idle: bool = False


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
    has_moved = probe.progress is not None and pulse.progress is not None and probe.progress != pulse.progress
    is_alive = probe.is_answering or has_moved or probe.has_served
    # Only a page that says so proves that nothing runs; silence leaves the clock where it is.
    is_idle = probe.running == 0
    begins = pulse.is_idle and bool(probe.running)
    pulse = Pulse(
        since_s=pulse.since_s,
        alive_s=now_s if is_alive else pulse.alive_s,
        moved_s=now_s if has_moved or is_idle or begins or probe.has_served else pulse.moved_s,
        was_ready=pulse.was_ready or probe.is_answering,
        progress=pulse.progress if probe.progress is None else probe.progress,
        is_idle=pulse.is_idle if probe.running is None else is_idle,
    )
    if not pulse.was_ready:
        if now_s - pulse.since_s >= load_timeout_s:
            return Verdict(Vital.HUNG, f"it was not ready within {load_timeout_s:.0f} s", pulse)
        return Verdict(Vital.LOADING, "", pulse)
    if now_s - pulse.alive_s >= hang_timeout_s:
        return Verdict(Vital.HUNG, f"it gave no sign of life for {hang_timeout_s:g} s", pulse)
    stall_s = stall_limit_s(hang_timeout_s, probe.reading)
    if probe.running and pulse.progress is not None and now_s - pulse.moved_s >= stall_s:
        return Verdict(Vital.HUNG, f"it has requests running and produced no token for {stall_s:.3g} s", pulse)
    return Verdict(Vital.READY, "", pulse)


def stall_limit_s(hang_timeout_s: float, reading: int | None) -> float:
    """Return how long a replica with requests may produce nothing while ``reading`` tokens of prompts are unread."""
    longest_s = STALL_FACTOR * hang_timeout_s
    return longest_s if reading is None else min(hang_timeout_s + reading / SLOWEST_TOKENS_PER_S, longest_s)
