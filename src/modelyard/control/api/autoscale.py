"""How an endpoint's size is decided, as it is asked for; shared by deployments and changes."""

from typing import Annotated, Any

import msgspec

from modelyard.control.api.faults import Fault
from modelyard.domain import autoscale_bounds
from modelyard.domain.endpoints import Autoscale, IdleTime, Scaling, Tier

_Float = float | msgspec.UnsetType
_Whole = int | msgspec.UnsetType


class AutoscaleBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When replicas are added and removed, and how many; what is left out stays. Defaults are the documented ones."""

    tier: Annotated[
        str | msgspec.UnsetType | None,
        msgspec.Meta(description="Pinned 'hot', 'warm' or 'cold'; null: as the traffic has it."),
    ] = msgspec.UNSET
    node_pool: Annotated[str | msgspec.UnsetType, msgspec.Meta(description="Nodes that replicas run on.")] = (
        msgspec.UNSET
    )
    check_s: Annotated[_Float, msgspec.Meta(description="Pause between two looks at the gates (s).")] = msgspec.UNSET
    up_queue: Annotated[_Whole, msgspec.Meta(description="Grow above so many queued requests (requests).")] = (
        msgspec.UNSET
    )
    up_queue_s: Annotated[_Float, msgspec.Meta(description="… for longer than this (s).")] = msgspec.UNSET
    up_utilization: Annotated[_Float, msgspec.Meta(description="Grow above this utilisation (%).")] = msgspec.UNSET
    up_utilization_s: Annotated[_Float, msgspec.Meta(description="… for longer than this (s).")] = msgspec.UNSET
    up_latency_factor: Annotated[
        _Float, msgspec.Meta(description="Grow when p99 is above so many times the target (times).")
    ] = msgspec.UNSET
    up_latency_s: Annotated[_Float, msgspec.Meta(description="… for longer than this (s).")] = msgspec.UNSET
    up_kv: Annotated[_Float, msgspec.Meta(description="Grow when KV caches are fuller than this (%).")] = msgspec.UNSET
    up_kv_s: Annotated[_Float, msgspec.Meta(description="… for longer than this (s).")] = msgspec.UNSET
    down_queue_s: Annotated[_Float, msgspec.Meta(description="Shrink only after so long without a queue (s).")] = (
        msgspec.UNSET
    )
    down_utilization: Annotated[_Float, msgspec.Meta(description="… and below this utilisation (%).")] = msgspec.UNSET
    down_utilization_s: Annotated[_Float, msgspec.Meta(description="… for longer than this (s).")] = msgspec.UNSET
    target_ttft_s: Annotated[_Float, msgspec.Meta(description="Time to the first token that is promised (s).")] = (
        msgspec.UNSET
    )
    target_latency_s: Annotated[
        float | msgspec.UnsetType | None,
        msgspec.Meta(description="Time to the end of an answer; set, p99 is of these. null: of first tokens (s)."),
    ] = msgspec.UNSET
    load_share_up: Annotated[
        _Float, msgspec.Meta(description="How busy replicas are meant to be after growing (%).")
    ] = msgspec.UNSET
    load_share_down: Annotated[
        _Float, msgspec.Meta(description="How busy replicas are meant to be after shrinking (%).")
    ] = msgspec.UNSET
    backlog_s: Annotated[_Float, msgspec.Meta(description="Time in which what waits is to be served (s).")] = (
        msgspec.UNSET
    )
    idle: Annotated[
        str | msgspec.UnsetType,
        msgspec.Meta(
            description="'fixed': scale_to_zero_after_idle_seconds. From the gaps there were: 'learned' outlasts 99 of "
            "100, 'priced' weighs prewarm_cold_cost_s against waiting. An idle time that is named makes it fixed."
        ),
    ] = msgspec.UNSET
    prewarm: Annotated[bool | msgspec.UnsetType, msgspec.Meta(description="Start before requests are expected.")] = (
        msgspec.UNSET
    )
    prewarm_s: Annotated[_Float, msgspec.Meta(description="How long before, on top of the time of a load (s).")] = (
        msgspec.UNSET
    )
    prewarm_budget: Annotated[_Float, msgspec.Meta(description="GPU-hours a day for waiting (h).")] = msgspec.UNSET
    prewarm_cold_cost_s: Annotated[
        _Float, msgspec.Meta(description="What an avoided cold start is worth (s of one accelerator).")
    ] = msgspec.UNSET
    batch_scales: Annotated[
        bool | msgspec.UnsetType,
        msgspec.Meta(
            description="Lines of batches start replicas; false: they run on what is idle, one stays for them."
        ),
    ] = msgspec.UNSET
    nap_s: Annotated[
        _Float,
        msgspec.Meta(description="An engine that can sleep does so after this long without need; 0: never (s)."),
    ] = msgspec.UNSET
    burst_pool: Annotated[
        str | msgspec.UnsetType, msgspec.Meta(description="Node pool to use when all others are full; '': none.")
    ] = msgspec.UNSET


def changed_autoscale(
    body: AutoscaleBody, before: Autoscale, scaling: Scaling, *, idle_s: _Float = msgspec.UNSET
) -> tuple[Autoscale, list[Fault]]:
    """Return ``before`` with what ``body`` asks for, and what is wrong with that; ``idle_s``: the idle time it names.

    Whoever names a time means it, unless the same request says what is to be made of it.
    """
    asked: dict[str, Any] = {} if idle_s is msgspec.UNSET else {"idle": IdleTime.FIXED}
    asked |= {
        name: value for name in AutoscaleBody.__struct_fields__ if (value := getattr(body, name)) is not msgspec.UNSET
    }
    faults = [Fault(f"autoscale.{name}", reason) for name, reason in autoscale_bounds.faults(asked)]
    if faults:
        return before, faults
    if "idle" in asked:
        asked["idle"] = IdleTime(asked["idle"])
    if asked.get("tier") is not None:
        asked["tier"] = Tier(asked["tier"])
    after = msgspec.structs.replace(before, **asked)
    flaws = autoscale_bounds.contradictions(after, scaling)
    return after, [Fault(f"autoscale.{name}", reason) for name, reason in flaws]
