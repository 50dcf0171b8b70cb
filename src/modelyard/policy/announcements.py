"""Which of the things that happen to an endpoint its tenant's webhooks are told of.

An endpoint has many events, most of which say why it has its size. A webhook
wants few: it can answer, it cannot, a rollout began, went on, or came back.
"""

from collections.abc import Mapping

from modelyard.domain.endpoints import EndpointStatus, Stage
from modelyard.domain.events import EventType

STAGE = "stage"
"""Name under which the event of a status says how far the endpoint is."""

_ROLLOUTS = {
    "rollout_began": EventType.ROLLOUT_STARTED,
    "rollout_step": EventType.ROLLOUT_STEP,
    "rollout_promoted": EventType.ROLLOUT_PROMOTED,
    "rollout_rolled_back": EventType.DEPLOYMENT_ROLLED_BACK,
}
_ANSWERING = (EndpointStatus.RUNNING.value, EndpointStatus.SCALING.value)


def announced(kind: str, data: Mapping[str, object]) -> EventType | None:
    """Return the event of the tenant that an event of an endpoint is, None where it is none.

    ``deployment.ready`` is said whenever it can answer; whoever stores it keeps the first of a version, and the first
    after a failure, so that neither sleep nor a change of size is news.
    """
    if kind == EndpointStatus.FAILED.value:
        return EventType.DEPLOYMENT_FAILED
    if kind in _ANSWERING and data.get(STAGE) == Stage.READY.value:
        return EventType.DEPLOYMENT_READY
    return _ROLLOUTS.get(kind)
