"""Of the many things that happen to an endpoint, its owner's webhooks are told of few."""

import pytest

from modelyard.domain.endpoints import Stage
from modelyard.domain.events import EventType
from modelyard.policy.announcements import STAGE, announced


@pytest.mark.parametrize(
    ("kind", "stage", "told"),
    [
        ("running", Stage.READY, EventType.DEPLOYMENT_READY),
        ("scaling", Stage.READY, EventType.DEPLOYMENT_READY),
        ("scaling", Stage.LOADING, None),
        ("provisioning", Stage.DOWNLOADING, None),
        ("stopped", Stage.QUEUED, None),
        ("failed", Stage.QUEUED, EventType.DEPLOYMENT_FAILED),
        ("scaled", None, None),
        ("replica_ready", None, None),
        ("replica_failed", None, None),
        ("deployed", None, None),
        ("changed", None, None),
        ("rollout_began", None, EventType.ROLLOUT_STARTED),
        ("rollout_step", None, EventType.ROLLOUT_STEP),
        ("rollout_weight", None, None),
        ("rollout_paused", None, None),
        ("rollout_promoted", None, EventType.ROLLOUT_PROMOTED),
        ("rollout_ended", None, None),
        ("rollout_rolled_back", None, EventType.DEPLOYMENT_ROLLED_BACK),
    ],
)
def test_what_is_told(kind: str, stage: Stage | None, told: EventType | None) -> None:
    assert announced(kind, {} if stage is None else {STAGE: stage.value}) is told
