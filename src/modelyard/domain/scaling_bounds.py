"""What settings of ``Scaling`` may be: the API, and whoever simulates them, refuse the same."""

import math
from collections.abc import Iterator

from modelyard.domain.endpoints import Scaling

REPLICAS_MAX = 1000
IDLE_S_MAX = 30 * 86400
METRICS = ("queue_depth", "gpu_utilization")
"""What the source names; what the size follows is for ``policy/scaling.py`` to say."""


def faults(scaling: Scaling) -> Iterator[tuple[str, str]]:
    """Yield which settings cannot be, and what they may be."""
    yield from of_replicas(scaling.min_replicas, scaling.max_replicas, zero=scaling.scale_to_zero)
    yield from of_target(scaling.metric, scaling.target_value)
    yield from (("idle_s", reason) for reason in of_idle(scaling.idle_s))


def of_replicas(least: int, most: int | None, *, zero: bool) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with bounds of replicas; ``zero``: they may all sleep."""
    if not 0 <= least <= REPLICAS_MAX:
        yield "min_replicas", f"must be 0 to {REPLICAS_MAX}"
    if most is not None and not 1 <= most <= REPLICAS_MAX:
        yield "max_replicas", f"must be 1 to {REPLICAS_MAX}"
    elif most is not None and most < least:
        yield "max_replicas", f"must not be below min_replicas ({least})"
    if least == 0 and not zero:
        yield "min_replicas", "0 needs scaling.scale_to_zero: true"


def of_idle(idle_s: float) -> Iterator[str]:
    """Yield what is wrong with the quiet time before sleep."""
    if not 1 <= idle_s <= IDLE_S_MAX:
        yield f"must be 1 to {IDLE_S_MAX}"


def of_target(metric: str, target_value: float) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with what the size follows."""
    if metric not in METRICS:
        yield "metric", f"must be one of {', '.join(METRICS)}"
    if not (math.isfinite(target_value) and target_value > 0):
        yield "target_value", "must be above 0"
    elif metric == "gpu_utilization" and target_value > 100:
        yield "target_value", "is a percentage: at most 100"
