"""A request that waits: for a cold model, or in the line of a busy one.

A stream is told how it goes: ``: loading 42 %, ~8 s`` at once, since a load
takes long anyway, and ``: queued, position 3, ~4 s`` only after a while, since
a request that is refused before that gets a proper status.
"""

from typing import TYPE_CHECKING

from modelyard import errors
from modelyard.errors import ApiError
from modelyard.gateway import answers, memory
from modelyard.gateway.relay import as_chunk
from modelyard.policy.dispatch import Verdict

if TYPE_CHECKING:
    from modelyard.gateway.catalog import EndpointState
    from modelyard.gateway.exchange import Exchange


def begin(exchange: "Exchange", *, is_cold: bool) -> None:
    """Stand in line."""
    memory.joined(exchange, is_cold=is_cold)
    if not exchange.call.is_stream:
        return
    if is_cold:
        comment(exchange)
    else:
        exchange.comment_due_s = exchange.arrived_s + exchange.gateway.settings.loading_comment_s


def comment(exchange: "Exchange") -> None:
    """Tell a stream that waits how it goes."""
    endpoint = exchange.endpoint
    now_s = exchange.gateway.clock.monotonic_s()
    if not exchange.client.is_streaming:
        exchange.client.start_stream(answers.stream_headers(exchange))
    if endpoint.dispatcher.is_cold_for(exchange.job):
        text = answers.loading_comment(endpoint.route.progress)
    elif exchange in endpoint.dispatcher.line:
        line = endpoint.dispatcher.line
        text = answers.queue_comment(line.position(exchange), endpoint.dispatcher.wait_s(exchange, now_s=now_s))
    else:
        text = b": working\n"
    exchange.client.write_stream(as_chunk(text))
    exchange.comment_due_s = now_s + exchange.gateway.settings.loading_comment_s


def expired(exchange: "Exchange") -> None:
    """Give up the place in line."""
    now_s = exchange.gateway.clock.monotonic_s()
    waited_s = now_s - exchange.arrived_s
    endpoint = exchange.endpoint
    route = endpoint.route
    if endpoint.dispatcher.is_cold_for(exchange.job):
        refuse(exchange, errors.model_loading(route.name, retry_after_s=route.progress.eta_s or 30.0))
    else:
        retry_after_s = endpoint.retry_after_s(now_s)
        refuse(exchange, errors.queue_timeout(route.name, waited_s, retry_after_s=retry_after_s))


def turned_away(exchange: "Exchange", verdict: Verdict) -> None:
    """Give up the place in line to a more urgent request, or because no replica will ever take this one."""
    endpoint = exchange.endpoint
    if verdict is Verdict.NEVER:
        refuse(exchange, never_fits(exchange))
    else:
        refuse(exchange, line_is_full(endpoint, exchange.gateway.clock.monotonic_s()))


def never_fits(exchange: "Exchange") -> ApiError:
    """Return the error for a request that no replica could take if it had nothing else to do."""
    route, tokens = exchange.endpoint.route, exchange.job.prompt_tokens
    if 0 < route.context_length < tokens:
        # Whatever its replicas had room for: no other deployment of these options would take it.
        return errors.context_exceeded(route.name, tokens, route.context_length)
    return errors.no_capacity(route.name)


def line_is_full(endpoint: "EndpointState[Exchange]", now_s: float) -> ApiError:
    """Return the error for a request that would wait too long, or for which there is no place."""
    error = errors.queue_full(endpoint.route.name, retry_after_s=endpoint.retry_after_s(now_s))
    dispatcher = endpoint.dispatcher
    error.facts = {
        "waiting": len(dispatcher.line),
        "places": dispatcher.line.places,
        "running": dispatcher.running,
        "slots": sum(replica.slots for replica in dispatcher.replicas),
        "predicted_wait_s": round(endpoint.wait_s(now_s), 3),
    }
    return error


def refuse(exchange: "Exchange", error: ApiError) -> None:
    """End a request that waits. ``error`` says that no engine had it; one that an engine failed is told so instead."""
    if exchange.has_begun:
        error = errors.engine_lost()
    elif exchange.has_intent and exchange.failed_on:
        error = errors.engine_unavailable(exchange.endpoint.route.name)
    exchange.fail(error)
