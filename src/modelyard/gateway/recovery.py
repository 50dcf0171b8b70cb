"""What becomes of a request whose engine failed it: another replica, the rest of the answer from there, or an error.

Before the client has anything, the whole request goes to another replica.
After that only the rest of the answer can, and only where its text is all
that it depends on (``failover.py``). Both take from the endpoint's retry
budget, so that a failure of many cannot become a storm. A request that took
engines down is not tried again (``policy/suspects.py``).
"""

import logging
from typing import TYPE_CHECKING

from modelyard import errors
from modelyard.errors import ApiError
from modelyard.gateway import engine_request, failover, memory, waiting
from modelyard.gateway.progress import FIRST_TOKEN
from modelyard.gateway.relay import as_chunk
from modelyard.gateway.side_requests import GUEST_MISSING
from modelyard.gateway.upstream import CONNECT_TIMEOUT
from modelyard.policy.breaker import Failure
from modelyard.policy.dispatch import ReplicaLoad, Verdict
from modelyard.policy.job import NEVER_S
from modelyard.policy.retries import ATTEMPTS_MAX
from modelyard.policy.suspects import fingerprint

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange

_log = logging.getLogger(__name__)

ANSWER = "complete answer"


def prints_of(exchange: "Exchange") -> tuple[int, int]:
    """Return what tells the request from others, by the body that engines get: among its tenant's own, and among all.

    No two endpoints have the same: what a tenant's own engines die of must not be refused to others who call theirs by
    the same name. And at a shared endpoint one tenant's crashes must not have a question refused that others ask too:
    whoever sends something deadly, different each time, beside a common question, makes that look like the cause. So
    all tenants are only judged by crashes where there was nothing else.
    """
    body = engine_request.unsalted(exchange.first_body)
    everybodys = fingerprint(b"%b/%b" % (exchange.endpoint.route.id.encode(), body))
    return fingerprint(b"%d/%b" % (everybodys, exchange.key.record.tenant_id.encode())), everybodys


def is_suspect(exchange: "Exchange") -> bool:
    """Say whether the request is known to take engines down."""
    suspects, now_s = exchange.gateway.suspects, _now_s(exchange)
    return any(suspects.is_refused(print_, now_s) for print_ in prints_of(exchange))


def answered(exchange: "Exchange") -> None:
    """Note that an engine answered the request and lives; one that only went on with an answer was asked less."""
    if exchange.reply is not None and exchange.reply.is_continued:
        return
    for print_ in prints_of(exchange):
        exchange.gateway.suspects.answered(print_)


def keeps_text(exchange: "Exchange") -> bool:
    """Say whether the text of the answer is worth keeping: somebody else could go on with it."""
    endpoint = exchange.endpoint
    return endpoint.dispatcher.has_choice and failover.can_continue(exchange.call, endpoint.route.engine_extras)


def not_reached(exchange: "Exchange", reason: str) -> None:
    """Go elsewhere: no connection could be opened."""
    if exchange.is_reopening:
        # So it was not just an idle connection that closed: the engine died with the request on it.
        lost(exchange)
        return
    # How long a connection may take is the endpoint's own setting: a guest's must not put its host out for others.
    is_own = reason == CONNECT_TIMEOUT and exchange.replica is not None and bool(exchange.replica.route.seat_of)
    exchange.replica_failed(Failure.SILENT if is_own else Failure.UNREACHABLE, reason)
    if retry(exchange, reason):
        return
    if reason == CONNECT_TIMEOUT:
        exchange.fail(errors.engine_connect_timeout(exchange.endpoint.patience.connect_s))
    else:
        exchange.fail(errors.engine_unavailable(exchange.endpoint.route.name))


def lost(exchange: "Exchange", *, is_stale: bool = False) -> None:
    """Deal with an engine that is gone, or closed the connection without its answer.

    ``is_stale``: it was an idle connection before, and nothing came back. Most often the engine closed it just as we
    wrote into it, which is nobody's failure; whether the engine lives tells a new connection.
    """
    if is_stale and exchange.replica is not None:
        address = (exchange.replica.route.host, exchange.replica.route.port)
        exchange.is_reopening = True
        exchange.gateway.pool.open(address, exchange, timeout_s=exchange.endpoint.patience.connect_s)
        return
    exchange.is_reopening = False
    reason = "connection lost in a stream" if exchange.has_begun else "connection lost"
    may_retry = not _took_it_down(exchange)
    exchange.replica_failed(Failure.UNREACHABLE, reason)
    if not may_retry and is_suspect(exchange):
        exchange.gateway.presence.report_now()
        exchange.fail(errors.request_crashes_engine())
    elif not may_retry or not retry(exchange, reason):
        exchange.fail(errors.engine_lost() if exchange.has_begun else _unavailable(exchange))


def _took_it_down(exchange: "Exchange") -> bool:
    """Note who was on an engine when it was lost; say whether this request should not be tried on another."""
    replica = exchange.replica
    if not exchange.was_sent or replica is None:
        return False
    suspects = exchange.gateway.suspects
    start_id, has_begun, now_s = replica.replica_id, exchange.has_begun, _now_s(exchange)
    own, everybodys = prints_of(exchange)
    others_waiting = replica.unanswered - (exchange.job.pending_tokens > 0)
    was_alone = suspects.lost(
        own, start_id, others=replica.running - 1, others_waiting=others_waiting, has_begun=has_begun, now_s=now_s
    )
    if was_alone:
        start_id += " alone"
        suspects.lost(everybodys, start_id, others=0, others_waiting=0, has_begun=has_begun, now_s=now_s)
    return not (suspects.may_retry(own) and suspects.may_retry(everybodys))


def unseated(exchange: "Exchange") -> None:
    """Deal with an engine that does not have the guest: evicted behind our back, or the replica began anew.

    That is between us and the engine. The request goes to another seat, or waits until the controller, who is told at
    once, has had the guest loaded again; its seat is tried by a probe meanwhile (``policy/seats.py``).
    """
    seat = exchange.replica
    assert seat is not None, "answered by nobody"
    exchange.replica_failed(Failure.MISSING, GUEST_MISSING)
    dispatcher, gateway = exchange.endpoint.dispatcher, exchange.gateway
    gateway.presence.report_now()
    if exchange.has_begun or exchange.attempts - exchange.gave_way >= ATTEMPTS_MAX:
        exchange.fail(errors.engine_lost() if exchange.has_begun else _unavailable(exchange))
        return
    now_s = _now_s(exchange)
    service_s = now_s - exchange.job.dispatched_s
    exchange.replica = exchange.relay = None
    exchange.deadline_s = NEVER_S
    is_cold = dispatcher.is_cold
    wait_s = gateway.settings.load_wait_s if is_cold else gateway.settings.queue_wait_s
    verdict = dispatcher.unseat(exchange, seat, now_s=now_s, deadline_s=now_s + wait_s)
    memory.moved(exchange, seat, GUEST_MISSING, service_s, now_s)
    fields = {"request_id": exchange.request_id, "replica_id": seat.route.id}
    _log.warning("on another seat, or in line: %s", GUEST_MISSING, extra=fields)
    gateway.metrics.retried(exchange.endpoint.route.name)
    if isinstance(verdict, ReplicaLoad):
        exchange.dispatch(verdict)
    elif verdict is Verdict.WAIT:
        if exchange in dispatcher.line:
            waiting.begin(exchange, is_cold=is_cold)
    elif not exchange.is_over:
        exchange.fail(_unavailable(exchange))


def broke(exchange: "Exchange", error: ApiError) -> None:
    """Deal with a stream that makes no sense, or in which the engine itself reported an error."""
    exchange.replica_failed(Failure.BAD_ANSWER, error.code or "error")
    # What the engine itself calls an error may well be the request's.
    if error.code != "engine_error" and not exchange.has_begun and retry(exchange, error.message):
        return
    exchange.fail(error)


def silent(exchange: "Exchange", what: str) -> None:
    """Deal with an engine that said nothing in time."""
    relay = exchange.relay
    if relay is not None and relay.has_finish:
        exchange.finish_stream(relay, b"")
        return
    replica = exchange.replica
    exchange.replica_failed(Failure.SILENT, f"no {what} in time")
    has_moved = retry(exchange, f"no {what}")
    if replica is not None and replica.ejected_until_s and not exchange.endpoint.is_remote(replica.version_id):
        _leave(replica, exchange)
    if has_moved:
        return
    patience = exchange.endpoint.patience
    if what == FIRST_TOKEN:
        exchange.fail(errors.first_token_timeout(patience.first_token_s))
    else:
        exchange.fail(errors.token_timeout(patience.token_s))


def _leave(replica: ReplicaLoad, first: "Exchange") -> None:
    """Let those go elsewhere, too, who wait for their first token from an engine that is known to be silent.

    They would wait for all of their own time, which is long where prompts are. The oldest first.
    """
    gateway, now_s = first.gateway, _now_s(first)
    for other in list(gateway.exchanges):
        if other.replica is not replica or other is first or other.is_over or other.has_begun:
            continue
        # Not those that wait for a connection, which has a time of its own.
        is_sent = other.connection is not None and other.call.is_stream
        has_tries = len(other.failed_on) + 1 < ATTEMPTS_MAX
        may_leave = (
            is_sent and has_tries and other.endpoint.dispatcher.may_retry(other.job, [*other.failed_on, replica], now_s)
        )
        if may_leave and not retry(other, "its replica is silent") and not other.is_over:
            other.fail(_unavailable(other))


def took_too_long(exchange: "Exchange") -> None:
    """End an answer that hit the total limit; that says nothing about the replica."""
    relay = exchange.relay
    if relay is not None and relay.has_finish:
        exchange.finish_stream(relay, b"")
    else:
        exchange.fail(errors.total_timeout(exchange.endpoint.patience.total_s))


def retry(exchange: "Exchange", reason: str) -> bool:
    """Move on to another replica if there is one that may help; say whether that is under way."""
    replica = exchange.replica
    if _is_complete(exchange):
        return True
    if replica is None or len(exchange.failed_on) + 1 >= ATTEMPTS_MAX:
        return False
    dispatcher = exchange.endpoint.dispatcher
    gateway = exchange.gateway
    now_s = gateway.clock.monotonic_s()
    body = b""
    if exchange.has_begun and not (body := _rest(exchange)):
        return False
    exchange.failed_on.append(replica)
    exchange.drop_connection()
    # All of it before anybody is asked: whoever gets the slot that is given back may change what happens to this one.
    exchange.replica = None
    exchange.is_reopening = False
    exchange.deadline_s = NEVER_S
    relay = exchange.relay
    if body and relay is not None:
        exchange.body = body
        exchange.job.fallback_s = NEVER_S  # nobody else's engine goes on in the middle of our answer
        exchange.comment_due_s = now_s + gateway.settings.loading_comment_s
        exchange.progress.interrupt(relay)
    else:
        exchange.relay = None
    deadline_s = now_s + gateway.settings.queue_wait_s
    service_s = now_s - exchange.job.dispatched_s
    verdict = dispatcher.retry(exchange, now_s=now_s, deadline_s=deadline_s)
    if verdict is None:
        exchange.replica = replica
        return False
    memory.moved(exchange, replica, reason, service_s, now_s)
    fields = {"request_id": exchange.request_id, "replica_id": replica.route.id}
    _log.warning("%s on another replica: %s", "going on" if body else "retry", reason, extra=fields)
    gateway.metrics.retried(exchange.endpoint.route.name)
    if isinstance(verdict, ReplicaLoad):
        exchange.dispatch(verdict)
        return True
    return verdict is Verdict.WAIT


def put_back(exchange: "Exchange") -> bool:
    """Let a request wait whose engine has no room for it; False when there is nothing to put back."""
    replica = exchange.replica
    if replica is None or exchange.has_begun:
        return False
    exchange.drop_connection()
    exchange.replica = exchange.relay = None
    exchange.is_reopening = False
    exchange.deadline_s = NEVER_S
    now_s = _now_s(exchange)
    memory.put_back(exchange, replica, now_s)
    # From the first time that it was sent: each new try must not begin the wait anew.
    sent_s = exchange.total_deadline_s - exchange.endpoint.patience.total_s
    deadline_s = sent_s + exchange.gateway.settings.queue_wait_s
    verdict = exchange.endpoint.dispatcher.put_back(exchange, replica, now_s=now_s, deadline_s=deadline_s)
    if isinstance(verdict, ReplicaLoad):
        exchange.dispatch(verdict)
    elif verdict is not Verdict.WAIT:
        waiting.turned_away(exchange, verdict)
    elif exchange in exchange.endpoint.dispatcher.line:
        waiting.begin(exchange, is_cold=False)
    return True


def _is_complete(exchange: "Exchange") -> bool:
    """End a stream that has all the tokens it may have, and lacks only its end; say whether it was one."""
    relay, reply = exchange.relay, exchange.reply
    if relay is None or reply is None or not relay.has_begun or not failover.is_used_up(exchange.call, relay.tokens):
        return False
    if (last := reply.cut_off(relay)) is None:
        return False
    exchange.finish_stream(relay, as_chunk(last))
    return True


def _rest(exchange: "Exchange") -> bytes:
    """Return the engine's request for the rest of the answer, nothing when there can be none."""
    reply, relay = exchange.reply, exchange.relay
    assert reply is not None, "a stream has a reply"
    assert relay is not None, "an answer that has begun has a relay"
    if (text := reply.interrupt(relay)) is None:
        return b""
    exchange.flush()
    extras = exchange.endpoint.route.engine_extras
    return failover.continued_body(exchange.first_body, exchange.call, text, relay.tokens, extras)


def _now_s(exchange: "Exchange") -> float:
    return exchange.gateway.clock.monotonic_s()


def _unavailable(exchange: "Exchange") -> ApiError:
    return errors.engine_unavailable(exchange.endpoint.route.name)
