"""How long a request before one endpoint will wait, as far as a gateway can tell.

The line's own rate says it best (``queueing.DrainRate``). Until that is known,
the mean time of an answer and the number of slots do; for a model that loads,
what the controller expects of the load.
"""

from modelyard.policy.admission import OUTPUT_DEFAULT
from modelyard.policy.dispatch import Dispatcher, W
from modelyard.policy.engine_model import Speed

ANSWER_S = 1.0
"""What an answer is taken to last while nobody knows."""
RETRY_AFTER_S = (1.0, 60.0)
"""What a caller is told to wait is between these."""


def wait_s(dispatcher: Dispatcher[W], *, now_s: float, in_flight: int, mean_s: float, eta_s: float | None) -> float:
    """Predict how long a request that came now would wait; 0 where nobody is, loaded or not.

    ``in_flight`` counts those who wait, too; ``mean_s`` is what an answer takes; ``eta_s`` what a load still takes.
    """
    if not in_flight:
        return 0.0
    waiting = len(dispatcher.line)
    if dispatcher.is_cold:
        return eta_s or 0.0 if waiting else 0.0
    slots = sum(replica.slots for replica in dispatcher.replicas if not replica.is_draining)
    if not waiting and dispatcher.running < slots:
        return 0.0
    predicted_s = dispatcher.wait_s(now_s=now_s) if waiting else None
    return predicted_s if predicted_s is not None else (waiting + 1) * mean_s / max(1, slots)


def retry_after_s(dispatcher: Dispatcher[W], *, now_s: float, mean_s: float) -> float:
    """Return when a place in the line should be free: what waits over the rate it drains at."""
    predicted_s = dispatcher.wait_s(now_s=now_s)
    if predicted_s is None:
        slots = sum(replica.slots for replica in dispatcher.replicas) or 1
        predicted_s = (len(dispatcher.line) + 1) * mean_s / slots
    return max(RETRY_AFTER_S[0], min(RETRY_AFTER_S[1], predicted_s))


def answer_s(speed: Speed, slots: int) -> float:
    """Return what an answer of usual length should take on an engine of this speed, when all its slots are taken."""
    return OUTPUT_DEFAULT * speed.iteration_s(slots, 0.0, 4.0 * OUTPUT_DEFAULT * slots)
