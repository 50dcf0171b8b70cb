"""Lines of batches give up their slots to everybody else.

They fill what is idle, so there may be no slot left when somebody comes who
does not wait for hours. Then the youngest line on a replica is cut off: its
engine drops it within a step, its slot goes to whoever waits, and it stands in
line again, to begin anew. What it had generated is lost and costs nobody
anything; who is youngest loses least. A plane that sees its lines make way
sends fewer (``policy/batch_pace.py``).
"""

from itertools import islice
from typing import TYPE_CHECKING

from modelyard.gateway import memory, waiting
from modelyard.policy import making_way as policy
from modelyard.policy.dispatch import ReplicaLoad, Verdict
from modelyard.policy.job import NEVER_S

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange


LOOKED_AT_MAX = 1000
"""Requests of an endpoint that are looked at for one to be put out."""


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
    replica = line.replica
    if line.connection is None or replica is None or line.is_over or replica.is_draining or line.has_begun:
        return False  # without a connection: what opens one for it, or writes its intent, would come back for it
    # What somebody else's machines have been asked is paid for; to ask it again would be paid for again.
    return not line.endpoint.is_remote(replica.version_id)


def _can_begin_anew(exchange: "Exchange", now_s: float) -> bool:
    """Say whether one that is no line of a batch may give up its slot: nobody is told to wait much longer for it."""
    is_young = now_s - exchange.arrived_s < exchange.gateway.settings.queue_wait_s
    return exchange.may_make_way and is_young and _can_stop(exchange)


def _step_aside(line: "Exchange") -> None:
    replica = line.replica
    assert replica is not None, "it was on one"
    dispatcher = line.endpoint.dispatcher
    now_s = line.gateway.clock.monotonic_s()
    deadline_s = now_s + line.gateway.settings.queue_wait_s
    _leave(line, replica, "it made way for a request in real time", now_s=now_s, deadline_s=deadline_s)
    verdict = dispatcher.step_aside(line, replica, now_s=now_s, deadline_s=deadline_s)
    if isinstance(verdict, ReplicaLoad):
        line.dispatch(verdict)
    elif verdict is not Verdict.WAIT:
        waiting.turned_away(line, verdict)
    elif line in dispatcher.line:
        waiting.begin(line, is_cold=False)


def trade(exchange: "Exchange") -> None:
    """Hand ``exchange``, which waits and whose tenant asks for little, the place of one whose tenant has too many."""
    gateway, endpoint = exchange.gateway, exchange.endpoint
    now_s = gateway.clock.monotonic_s()
    # It ran, and would have been answered: that the next slot falls free late must not fail it.
    deadline_s = now_s + max(gateway.settings.queue_wait_s, endpoint.patience.total_s)
    traded = policy.trade(
        exchange,
        endpoint.dispatcher,
        islice((one for one in reversed(gateway.exchanges) if one.endpoint is endpoint), LOOKED_AT_MAX),
        can_stop=lambda one: _can_begin_anew(one, now_s),
        now_s=now_s,
        deadline_s=deadline_s,
    )
    if traded is None:
        return
    victim, replica = traded
    _leave(victim, replica, "it made way for a tenant that asks for little", now_s=now_s, deadline_s=deadline_s)
    # It may have held more than who came needs.
    endpoint.dispatcher.serve(now_s=now_s)
    if victim in endpoint.dispatcher.line:
        waiting.begin(victim, is_cold=False)


def _leave(exchange: "Exchange", replica: ReplicaLoad, why: str, *, now_s: float, deadline_s: float) -> None:
    """Take a request off its engine, to begin anew by ``deadline_s`` with all of its time."""
    exchange.gave_way += 1
    exchange.endpoint.batch_lines.pop(exchange, None)
    exchange.drop_connection()
    exchange.replica = exchange.relay = None
    exchange.is_reopening = False
    exchange.deadline_s = NEVER_S
    exchange.total_deadline_s = deadline_s + exchange.endpoint.patience.total_s
    memory.put_back(exchange, replica, now_s, why)
