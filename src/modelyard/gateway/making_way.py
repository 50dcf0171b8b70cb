"""Lines of batches give up their slots to everybody else.

They fill what is idle, so there may be no slot left when somebody comes who
does not wait for hours. Then the youngest line on a replica is cut off: its
engine drops it within a step, its slot goes to whoever waits, and it stands in
line again, to begin anew. What it had generated is lost and costs nobody
anything; who is youngest loses least. A plane that sees its lines make way
sends fewer (``policy/batch_pace.py``).
"""

from typing import TYPE_CHECKING

from modelyard.gateway import memory, waiting
from modelyard.policy import making_way as policy
from modelyard.policy.dispatch import ReplicaLoad, Verdict
from modelyard.policy.job import NEVER_S

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange


def make_way(exchange: "Exchange") -> None:
    """Cut off lines until ``exchange``, which waits, has a replica, or nothing is left to be cut off."""
    endpoint = exchange.endpoint
    policy.make_way(
        lambda: reversed(endpoint.batch_lines),
        waits=lambda: exchange in endpoint.dispatcher.line,
        can_stop=_can_stop,
        cut=_step_aside,
    )


def _can_stop(line: "Exchange") -> bool:
    if line.connection is None or line.replica is None or line.is_over:
        return False  # still on its way: what opens a connection for it, or writes its intent, would come back for it
    return not line.replica.is_draining and not line.has_begun


def _step_aside(line: "Exchange") -> None:
    replica = line.replica
    assert replica is not None, "it was on one"
    dispatcher, gateway = line.endpoint.dispatcher, line.gateway
    now_s = gateway.clock.monotonic_s()
    line.endpoint.batch_lines.pop(line, None)
    line.gave_way += 1
    line.drop_connection()
    line.replica = line.relay = None
    line.is_reopening = False
    line.deadline_s = NEVER_S
    # It begins anew, with all of its time.
    line.total_deadline_s = now_s + gateway.settings.queue_wait_s + line.endpoint.patience.total_s
    memory.put_back(line, replica, now_s, "it made way for a request in real time")
    deadline_s = now_s + gateway.settings.queue_wait_s
    verdict = dispatcher.step_aside(line, replica, now_s=now_s, deadline_s=deadline_s)
    if isinstance(verdict, ReplicaLoad):
        line.dispatch(verdict)
    elif verdict is not Verdict.WAIT:
        waiting.turned_away(line, verdict)
    elif line in dispatcher.line:
        waiting.begin(line, is_cold=False)
