"""What happens to the requests of every deployment within one tick, as columns of numbers.

A deployment is one line before ``ready`` replicas of ``slots`` each. A request takes T(b) = fixed + b · shared seconds
on a replica with b requests at once (``models.Profile``); lengths are taken as exponential, so that of n requests
n · (1 − e^(−dt/T)) end within a tick, give or take a binomial spread (without it lines before busy replicas come out
half as long). What comes is admitted while slots are free, the rest waits in order of arrival.

Three approximations, held against a simulation of every request in ``tests/unit/sim/fleet/test_queue.py``:

* within a tick requests come evenly, and the batch is the mean of its two ends;
* while nobody stands in line at either end of a tick, some wait within it: as in a queue of as many servers as slots
  (Sakasegawa's formula, which is exact for one server and close for many);
* the first token takes the prompt, slowed by others' prompts as in a processor shared by them, and two steps.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Step(NamedTuple):
    """What a tick did. ``running`` and ``waiting`` are at its end, ``service_s`` is T at that batch."""

    admitted: Floats
    done: Floats
    running: Floats
    waiting: Floats
    service_s: Floats
    batch: Floats


class Line(NamedTuple):
    """What there is at the begin of a tick: requests that run, that wait, and that come within it."""

    running: Floats
    waiting: Floats
    arrived: Floats


class Replicas(NamedTuple):
    """What serves: replicas that are ready, the slots of each, and how long requests take there."""

    ready: Floats
    slots: Floats
    fixed_s: Floats
    shared_s: Floats


def step(
    line: Line, replicas: Replicas, tick_s: float, *, luck: Floats | None = None, beside: Floats | float = 0.0
) -> Step:
    """Serve one tick.

    ``luck`` are standard normal numbers, by which more or fewer requests end than on average; ``beside`` are lines of
    batches on each replica, which slow the others down and hold no slot that somebody else wants.
    """
    running, waiting, arrived = line
    ready, slots, fixed_s, shared_s = replicas
    room = ready * slots
    offered = waiting + arrived
    some = np.maximum(ready, 1.0)
    # The batch halfway: from what runs now to what would at the end, at the pace of now.
    before = np.minimum(running / some, slots)
    light_s = fixed_s + np.minimum(before + beside, slots) * shared_s
    stay = np.exp(-tick_s / light_s)
    end = np.minimum((running * stay + offered * light_s * (1.0 - stay) / tick_s) / some, slots)
    batch = (before + end) / 2
    service_s = fixed_s + np.minimum(batch + beside, slots) * shared_s
    stay = np.exp(-tick_s / service_s)
    gone = 1.0 - stay
    rest = running * stay
    if luck is not None:
        rest = np.clip(rest + luck * np.sqrt(rest * gone), 0.0, running)
    # With arrivals at an even pace, in the end pace · T · (1 − e^(−dt/T)) of them still run.
    kept = service_s * gone / tick_s
    most = np.maximum(room - rest, 0.0) / kept
    admitted = np.where(ready > 0, np.minimum(offered, most), 0.0)
    after = rest + admitted * kept
    return Step(admitted, running + admitted - after, after, offered - admitted, service_s, batch)


def wait_within(pace: Floats, servers: Floats, service_s: Floats, burst: Floats) -> tuple[Floats, Floats]:
    """Return the share of requests that wait for a slot within a tick without a line, and for how long those do.

    ``pace`` is requests/s of the last minute (that of one tick would take every cluster for a steady load), ``burst``
    the variance of their counts over the mean (1: Poisson).
    """
    servers = np.maximum(servers, 1.0)
    load = np.minimum(pace * service_s / servers, 0.99)
    share = load ** (np.sqrt(2 * (servers + 1)) - 1)
    mean_s = service_s * (burst + 1) / 2 / (servers * (1 - load))
    return np.minimum(share, 1.0), mean_s


def first_token_s(pace: Floats, ready: Floats, prompt_s: Floats, step_s: Floats) -> Floats:
    """Return the mean seconds from dispatch to the first token; ``pace`` is requests/s of all replicas."""
    reading = np.minimum(pace * prompt_s / np.maximum(ready, 1.0), 0.9)
    return prompt_s / (1.0 - reading) + 2.0 * step_s
