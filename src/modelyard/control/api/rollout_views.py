"""What is shown of a rollout."""

from collections.abc import Mapping

import msgspec

from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.rollouts import RolloutKind, RolloutMode, RolloutState
from modelyard.policy.rollouts import weight_of


class JudgementView(msgspec.Struct, frozen=True, kw_only=True):
    """What the judge said, at which weight, and the numbers behind it."""

    at: int
    weight: int
    verdict: str
    """``wait``, ``promote`` or ``roll_back``."""
    reason: str
    data: dict[str, str | int | float | bool | None]


class LimitsView(msgspec.Struct, frozen=True, kw_only=True):
    """What the candidate must hold against the stable version in the same time; a ratio of 0 is not compared."""

    step_seconds: float
    min_requests: int
    error_share_more: float
    ttft_ratio: float
    itl_ratio: float
    cost_ratio: float
    ready_within_seconds: float


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout: from which version to which, how far, and why."""

    object: str = "rollout"
    kind: RolloutKind
    mode: RolloutMode
    state: RolloutState
    reason: str
    stable: str
    stable_id: str
    candidate: str
    candidate_id: str
    weight: int
    """Percent of the requests that the candidate answers now."""
    target: int
    """Percent of this step; while it is more than ``weight``, the replicas for it are not ready yet."""
    steps: list[int]
    step: int
    """From 1."""
    began_at: int
    ended_at: int | None
    keep_previous_seconds: float
    kept_until: int | None
    """Until when the previous version keeps its replicas, so that a rollback takes no load."""
    auto: LimitsView
    judgements: list[JudgementView]
    """The newest twenty, oldest first."""


def rollout_view(endpoint: Endpoint, versions: Mapping[str, ModelVersion]) -> RolloutView | None:
    """Return what is shown of the rollout of ``endpoint``, None where there was none."""
    rollout = endpoint.rollout
    if rollout is None:
        return None
    limits = rollout.thresholds
    # One that was rolled back may have been removed from the registry since: then its id is its name.
    names = {version_id: version.version for version_id, version in versions.items()}
    return RolloutView(
        kind=rollout.kind,
        mode=rollout.mode,
        state=rollout.state,
        reason=rollout.reason or (rollout.judgements[-1].reason if rollout.judgements else ""),
        stable=names.get(rollout.stable_id, rollout.stable_id),
        stable_id=rollout.stable_id,
        candidate=names.get(rollout.candidate_id, rollout.candidate_id),
        candidate_id=rollout.candidate_id,
        weight=weight_of(endpoint, rollout.candidate_id),
        target=rollout.target,
        steps=list(rollout.steps),
        step=rollout.step + 1,
        began_at=int(rollout.began_at),
        ended_at=int(rollout.ended_at) or None,
        keep_previous_seconds=rollout.keep_s,
        kept_until=int(rollout.kept_until) or None,
        auto=LimitsView(
            step_seconds=limits.min_step_s,
            min_requests=limits.min_requests,
            error_share_more=limits.error_share_more,
            ttft_ratio=limits.ttft_ratio,
            itl_ratio=limits.itl_ratio,
            cost_ratio=limits.cost_ratio,
            ready_within_seconds=limits.ready_within_s,
        ),
        judgements=[
            JudgementView(at=int(one.at), weight=one.weight, verdict=one.verdict, reason=one.reason, data=one.data)
            for one in rollout.judgements
        ],
    )
