"""When a replica counts as hung, and when slowness must be left alone (F6, F7, F8)."""

import pytest

from modelyard.policy.reconcile import Vital
from modelyard.policy.vitality import STALL_FACTOR, Probe, Pulse, first_pulse, judge

HANG_S = 30.0
LOAD_S = 600.0
STALL_S = STALL_FACTOR * HANG_S  # while gateways do not say what is unread


def follow(probes: list[Probe], *, was_ready: bool = True) -> list[Vital]:
    pulse: Pulse = first_pulse(0.0, was_ready=was_ready)
    vitals = []
    for probe in probes:
        verdict = judge(pulse, probe, hang_timeout_s=HANG_S, load_timeout_s=LOAD_S)
        assert verdict.reason or verdict.vital is not Vital.HUNG
        pulse = verdict.pulse
        vitals.append(verdict.vital)
    return vitals


STORIES = {
    "it loads, then answers": (
        False,
        [Probe(1, is_answering=False), Probe(400, is_answering=False), Probe(401, is_answering=True)],
        [Vital.LOADING, Vital.LOADING, Vital.READY],
    ),
    "it loads for ever": (
        False,
        [Probe(599, is_answering=False), Probe(600, is_answering=False)],
        [Vital.LOADING, Vital.HUNG],
    ),
    "it falls silent": (
        True,
        [Probe(1, is_answering=True), Probe(30.9, is_answering=False), Probe(31, is_answering=False)],
        [Vital.READY, Vital.READY, Vital.HUNG],
    ),
    "saturated: it answers no probe, but counts tokens": (
        True,
        [Probe(20.0 * n, is_answering=False, running=8, progress=100.0 * n) for n in range(1, 30)],
        [Vital.READY] * 29,
    ),
    "saturated: it answers nothing, but a gateway was served": (
        True,
        [Probe(20.0 * n, is_answering=False, has_served=True) for n in range(1, 30)],
        [Vital.READY] * 29,
    ),
    "its compute hangs while it answers probes": (
        True,
        [
            Probe(1, is_answering=True, running=1, progress=10),
            Probe(2, is_answering=True, running=1, progress=11),
            Probe(1 + STALL_S, is_answering=True, running=1, progress=11),
            Probe(2 + STALL_S, is_answering=True, running=1, progress=11),
        ],
        [Vital.READY, Vital.READY, Vital.READY, Vital.HUNG],
    ),
    "its compute hangs, and every prompt was read": (
        True,
        [
            Probe(1, is_answering=True, running=2, progress=10, reading=0),
            Probe(2, is_answering=True, running=2, progress=11, reading=0),
            Probe(31.9, is_answering=True, running=2, progress=11, reading=0),
            Probe(32, is_answering=True, running=2, progress=11, reading=0),
        ],
        [Vital.READY, Vital.READY, Vital.READY, Vital.HUNG],
    ),
    "it reads a prompt of 600 tokens, which may take half a minute longer": (
        True,
        [
            Probe(1, is_answering=True, running=1, progress=11, reading=600),
            Probe(59.9, is_answering=True, running=1, progress=11, reading=600),
            Probe(60, is_answering=True, running=1, progress=11, reading=600),
        ],
        [Vital.READY, Vital.READY, Vital.HUNG],
    ),
    "however long a prompt is, there is an end": (
        True,
        [
            Probe(STALL_S - 0.1, is_answering=True, running=1, progress=11, reading=1_000_000),
            Probe(STALL_S, is_answering=True, running=1, progress=11, reading=1_000_000),
        ],
        [Vital.READY, Vital.HUNG],
    ),
    "a request comes long after the last look": (
        True,
        [
            Probe(1, is_answering=True, running=0, progress=11, reading=0),
            Probe(29, is_answering=True, running=1, progress=11, reading=0),
            Probe(58.9, is_answering=True, running=1, progress=11, reading=0),
            Probe(59, is_answering=True, running=1, progress=11, reading=0),
        ],
        [Vital.READY, Vital.READY, Vital.READY, Vital.HUNG],
    ),
    "nothing runs, so there is nothing to produce": (
        True,
        [Probe(1000.0 * n, is_answering=True, running=0, progress=11) for n in range(1, 5)],
        [Vital.READY] * 4,
    ),
    "an engine that counts no tokens is judged by its probes alone": (
        True,
        [Probe(1000.0 * n, is_answering=True, running=3) for n in range(1, 5)],
        [Vital.READY] * 4,
    ),
}


@pytest.mark.parametrize(("was_ready", "probes", "vitals"), STORIES.values(), ids=STORIES.keys())
def test_verdicts_follow_the_story(was_ready: bool, probes: list[Probe], vitals: list[Vital]) -> None:
    assert follow(probes, was_ready=was_ready) == vitals
