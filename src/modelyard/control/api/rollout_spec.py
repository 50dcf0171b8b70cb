"""What a canary may be asked for, and everything that can be wrong with it; pure."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from modelyard.control.api.deploy_spec import BASE
from modelyard.control.api.faults import Fault
from modelyard.domain.rollouts import STEPS, Rollout, RolloutMode, Thresholds
from modelyard.engines import Options
from modelyard.policy.releases import WHOLE

STEPS_MAX = 20
SECONDS_MAX = 604_800
RATIO_MAX = 1000
REQUESTS_MAX = 1_000_000

EXAMPLE = {"version": "v2", "weight": 10, "auto": {"step_seconds": 300, "min_requests": 100}}


class AutoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When it goes on and when back, always against the stable version in the same time; what is left out stays."""

    steps: Annotated[
        list[int] | msgspec.UnsetType, msgspec.Meta(description="Percents after 'weight', rising. [10, 25, 50, 100]")
    ] = msgspec.UNSET
    step_seconds: Annotated[float | msgspec.UnsetType, msgspec.Meta(description="Shortest time of a step. [300]")] = (
        msgspec.UNSET
    )
    min_requests: Annotated[
        int | msgspec.UnsetType, msgspec.Meta(description="Fewest requests to the candidate in a step. [100]")
    ] = msgspec.UNSET
    error_share_more: Annotated[
        float | msgspec.UnsetType,
        msgspec.Meta(description="How much larger its share of failed requests may be. [0.01]"),
    ] = msgspec.UNSET
    ttft_ratio: Annotated[
        float | msgspec.UnsetType, msgspec.Meta(description="Most TTFT p95 over the stable one's; 0: any. [1.5]")
    ] = msgspec.UNSET
    itl_ratio: Annotated[
        float | msgspec.UnsetType, msgspec.Meta(description="Most ITL p95 over the stable one's; 0: any. [1.5]")
    ] = msgspec.UNSET
    cost_ratio: Annotated[
        float | msgspec.UnsetType, msgspec.Meta(description="Most cost per million tokens; 0: any. [1.5]")
    ] = msgspec.UNSET
    ready_within_seconds: Annotated[
        float | msgspec.UnsetType, msgspec.Meta(description="Longest time to become ready at all. [1800]")
    ] = msgspec.UNSET


class CanaryRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version to try: one that exists, or with ``framework`` a new one. Alone, ``weight`` moves a running canary."""

    version: Annotated[str | None, msgspec.Meta(description="One that exists, or the name of the new one.")] = None
    framework: Annotated[str, msgspec.Meta(description="For a new version: the engine, like 'llamacpp'.")] = ""
    model_artifact: Annotated[str, msgspec.Meta(description="For a new version: where its weights are.")] = ""
    options: Annotated[Options, msgspec.Meta(description="For a new version: the engine's own settings.")] = {}
    base: Annotated[str, msgspec.Meta(description=BASE)] = ""
    weight: Annotated[int, msgspec.Meta(description="Percent of the requests that it answers first.")] = STEPS[0]
    mode: Annotated[
        str | msgspec.UnsetType,
        msgspec.Meta(description="'auto' judges, promotes and rolls back; 'manual' only rolls back what cannot start."),
    ] = msgspec.UNSET
    auto: AutoBody = AutoBody()
    keep_previous_seconds: Annotated[
        float | msgspec.UnsetType,
        msgspec.Meta(description="How long the previous version keeps its replicas after the end."),
    ] = msgspec.UNSET


def canary_faults(body: CanaryRequest) -> Iterator[Fault]:
    """Yield everything that is wrong with what is asked, beside the version itself."""
    if not 1 <= body.weight <= WHOLE:
        yield Fault("weight", f"must be 1 to {WHOLE}")
    if body.mode is not msgspec.UNSET and body.mode not in {str(mode) for mode in RolloutMode}:
        yield Fault("mode", f"must be one of {', '.join(RolloutMode)}")
    if not body.framework and (body.model_artifact or body.options):
        yield Fault("framework", "name the engine of the new version, or leave out 'model_artifact' and 'options'")
    auto = body.auto
    if auto.steps is not msgspec.UNSET:
        yield from _step_faults(auto.steps)
    if auto.min_requests is not msgspec.UNSET and not 1 <= auto.min_requests <= REQUESTS_MAX:
        yield Fault("auto.min_requests", f"must be 1 to {REQUESTS_MAX}")
    for name, most in (
        ("step_seconds", SECONDS_MAX),
        ("ready_within_seconds", SECONDS_MAX),
        ("error_share_more", 1),
        ("ttft_ratio", RATIO_MAX),
        ("itl_ratio", RATIO_MAX),
        ("cost_ratio", RATIO_MAX),
    ):
        yield from _range_fault(f"auto.{name}", getattr(auto, name), most)
    yield from _range_fault("keep_previous_seconds", body.keep_previous_seconds, SECONDS_MAX)


def _step_faults(steps: Sequence[int]) -> Iterator[Fault]:
    rising = all(before < after for before, after in itertools.pairwise(steps))
    if not 1 <= len(steps) <= STEPS_MAX or not rising or not all(1 <= step <= WHOLE for step in steps):
        yield Fault("auto.steps", f"give 1 to {STEPS_MAX} rising percents from 1 to {WHOLE}")


def _range_fault(param: str, value: float | msgspec.UnsetType, most: float) -> Iterator[Fault]:
    if value is not msgspec.UNSET and not (math.isfinite(value) and 0 <= value <= most):
        yield Fault(param, f"must be 0 to {most}")


def with_asked(rollout: Rollout, body: CanaryRequest) -> Rollout:
    """Return ``rollout`` with the thresholds, the mode and the steps that ``body`` names; what it leaves out stays."""
    auto = body.auto
    asked = {
        "min_step_s": auto.step_seconds,
        "min_requests": auto.min_requests,
        "error_share_more": auto.error_share_more,
        "ttft_ratio": auto.ttft_ratio,
        "itl_ratio": auto.itl_ratio,
        "cost_ratio": auto.cost_ratio,
        "ready_within_s": auto.ready_within_seconds,
    }
    thresholds: Thresholds = msgspec.structs.replace(
        rollout.thresholds, **{name: value for name, value in asked.items() if value is not msgspec.UNSET}
    )
    after = rollout.steps if auto.steps is msgspec.UNSET else auto.steps
    steps = (body.weight, *(step for step in after if step > body.weight))
    return msgspec.structs.replace(
        rollout,
        thresholds=thresholds,
        mode=rollout.mode if body.mode is msgspec.UNSET else RolloutMode(body.mode),
        steps=steps if steps[-1] == WHOLE else (*steps, WHOLE),
        keep_s=rollout.keep_s if body.keep_previous_seconds is msgspec.UNSET else body.keep_previous_seconds,
    )
