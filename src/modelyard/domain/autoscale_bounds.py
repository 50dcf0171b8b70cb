"""What settings of ``Autoscale`` may be: the API, and whoever simulates them, refuse the same."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from modelyard.domain.endpoints import Autoscale, IdleTime, Scaling, Tier

DAY_S = 86_400
RANGES: dict[str, tuple[float, float]] = {
    "check_s": (0.1, 3600),
    "up_queue": (0, 1_000_000),
    "up_queue_s": (0, DAY_S),
    "up_utilization": (1, 100),
    "up_utilization_s": (0, DAY_S),
    "up_latency_factor": (1, 100),
    "up_latency_s": (0, DAY_S),
    "up_kv": (1, 100),
    "up_kv_s": (0, DAY_S),
    "down_queue_s": (0, DAY_S),
    "down_utilization": (0, 100),
    "down_utilization_s": (0, DAY_S),
    "target_ttft_s": (0.01, 3600),
    "target_latency_s": (0.01, DAY_S),
    "load_share_up": (10, 100),
    "load_share_down": (10, 100),
    "backlog_s": (1, 3600),
    "prewarm_s": (0, 3600),
    "prewarm_budget": (0, 10_000),
    "prewarm_cold_cost_s": (0, DAY_S),
    "nap_s": (0, DAY_S),
}
_POOL_MAX = 64


def faults(asked: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield which settings cannot be, and what they may be; each is of the right type."""
    for name, kind in (("tier", Tier), ("idle", IdleTime)):
        value = asked.get(name)
        if value is not None and value not in {str(one) for one in kind}:
            yield name, f"must be one of {', '.join(kind)}"
    for name in ("burst_pool", "node_pool"):
        pool = asked.get(name, "")
        is_plain = all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in pool)
        if len(pool) > _POOL_MAX or not is_plain:
            yield name, f"use up to {_POOL_MAX} letters, digits, '.', '_' or '-'"
    for name, (least, most) in RANGES.items():
        value = asked.get(name)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            yield name, f"must be {least:g} to {most:g}"


def contradictions(rules: Autoscale, scaling: Scaling) -> Iterator[tuple[str, str]]:
    """Yield which settings do not go with others."""
    if rules.down_utilization >= rules.up_utilization:
        yield (
            "down_utilization",
            f"must be below up_utilization ({rules.up_utilization:g}), or the size never rests",
        )
    if rules.tier is Tier.COLD and not scaling.scale_to_zero:
        yield "tier", "'cold' needs scaling.scale_to_zero: true"
