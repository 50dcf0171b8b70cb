"""What a simulated gateway does with a request whose engine failed it, in the order of ``gateway/recovery.py``.

What decides is ``policy/``: the breaker ejects, the dispatcher has another
replica or a place in line if the budget of retries allows it, the suspects
say whether the request itself is the cause. ``tests/parity`` holds both ways
to each other.
"""

from math import inf
from typing import TYPE_CHECKING

from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import ReplicaLoad, Verdict
from modelyard.policy.retries import ATTEMPTS_MAX
from modelyard.policy.tallies import ReleaseTally
from modelyard.sim.requests import Request

if TYPE_CHECKING:
    from modelyard.sim.gateway import Gateway

UNAVAILABLE, TIMEOUT = 502, 504


def not_reached(gateway: "Gateway", request: Request, now_s: float) -> None:
    """Go elsewhere: no connection could be opened."""
    _failed(gateway, request, Failure.UNREACHABLE, "connection refused", now_s)
    if not retry(gateway, request, now_s):
        fail(gateway, request, "unreachable", now_s)


def lost(gateway: "Gateway", request: Request, now_s: float) -> None:
    """Deal with an engine that is gone."""
    may_retry = not _took_it_down(gateway, request, now_s)
    _failed(gateway, request, Failure.UNREACHABLE, "connection lost", now_s)
    if not may_retry and gateway.suspects.is_refused(request.number, now_s):
        fail(gateway, request, "deadly", now_s)
    elif not may_retry or not retry(gateway, request, now_s):
        fail(gateway, request, "lost", now_s)


def silent(gateway: "Gateway", request: Request, now_s: float) -> None:
    """Deal with an engine that said nothing in time."""
    replica = request.replica
    assert replica is not None, "nobody is silent"
    _failed(gateway, request, Failure.SILENT, "no token in time", now_s)
    has_moved = retry(gateway, request, now_s)
    if replica.ejected_until_s:
        _leave(gateway, replica, now_s)
    if not has_moved:
        fail(gateway, request, "silent", now_s)


def _leave(gateway: "Gateway", replica: ReplicaLoad, now_s: float) -> None:
    """Let those go elsewhere, too, who wait for their first token from an engine that is known to be silent."""
    waiting = [one for one in gateway.floor.on(replica.route.id) if one.replica is replica and not one.told]
    for other in sorted(waiting, key=lambda one: (one.arrival.at_s, one.number)):
        if (
            not other.arrival.is_stream
            or gateway.floor.tokens(other)
            or len(other.failed_on) + 1 >= ATTEMPTS_MAX
            or not gateway.dispatcher.may_retry(other.job, [*other.failed_on, replica], now_s)
        ):
            continue
        gateway.floor.stop(other)
        if not retry(gateway, other, now_s):
            fail(gateway, other, "unreachable", now_s)


def retry(gateway: "Gateway", request: Request, now_s: float) -> bool:
    """Move on to another replica if there is one that may help; say whether that is under way."""
    replica, job, dispatcher = request.replica, request.job, gateway.dispatcher
    if replica is None or len(request.failed_on) + 1 >= ATTEMPTS_MAX:
        return False
    if request.told and not (request.arrival.can_resume and dispatcher.has_choice):
        return False
    request.failed_on = [*request.failed_on, replica]
    request.replica = None
    if request.told:
        job.fallback_s = inf  # nobody else's engine goes on in the middle of our answer
    service_s = now_s - job.dispatched_s
    verdict = dispatcher.retry(request, now_s=now_s, deadline_s=now_s + gateway.queue_wait_s)
    if verdict is None:
        request.replica = replica
        return False
    gateway.tally(replica.version_id).moved(service_s, now_s)
    gateway.retried += 1
    if isinstance(verdict, ReplicaLoad):
        gateway.send(request, verdict)
        return True
    return verdict is Verdict.WAIT


def fail(gateway: "Gateway", request: Request, why: str, now_s: float) -> None:
    """End without an answer."""
    replica, request.replica = request.replica, None
    told = request.told
    prompt = request.arrival.prompt_tokens if told else 0
    gateway.lines.pop(request, None)
    gateway.in_flight -= 1
    gateway.last_request_s = now_s
    if replica is not None:
        tally: ReleaseTally = gateway.tally(replica.version_id)
        first_s = request.ttft_s if request.first_s < inf and request.arrival.is_stream else None
        status = TIMEOUT if why in {"silent", "long"} else UNAVAILABLE
        service_s = now_s - request.job.dispatched_s
        tally.ended(status, now_s - request.arrival.at_s, first_s, service_s, prompt, told, now_s)
    gateway.floor.refuse(request, why)
    if replica is not None:
        gateway.dispatcher.finish(replica, request.job, now_s=now_s, prompt_tokens=prompt, output_tokens=told)
    else:
        gateway.dispatcher.leave(request, now_s=now_s)


def _failed(gateway: "Gateway", request: Request, kind: Failure, reason: str, now_s: float) -> None:
    assert request.replica is not None, "failed by nobody"
    gateway.dispatcher.failed(request.replica, kind, reason, now_s=now_s)


def _took_it_down(gateway: "Gateway", request: Request, now_s: float) -> bool:
    """Note who was on an engine when it was lost; say whether this request should not be tried on another."""
    replica, suspects = request.replica, gateway.suspects
    assert replica is not None, "lost by nobody"
    suspects.lost(
        request.number,
        replica.replica_id,
        others=replica.running - 1,
        others_waiting=replica.unanswered - (request.job.pending_tokens > 0),
        has_begun=request.told > 0,
        now_s=now_s,
    )
    return not suspects.may_retry(request.number)
