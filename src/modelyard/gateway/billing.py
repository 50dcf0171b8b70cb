"""What an exchange is billed: its journal records, and usage where the engine told none.

The engine's own count is the truth. Where an answer ends without it, tokens
are those that were relayed, and the prompt is estimated from earlier answers of
the same model; such rows are marked as estimated and round in the customer's
favour.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from modelyard.domain.usage import Intent, Settle, Unit, UsageStatus
from modelyard.gateway import engine_errors
from modelyard.gateway.sse import Usage
from modelyard.policy.dispatch import ReplicaLoad

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange


class Outcome(NamedTuple):
    """How a request ended, as the ledger will say."""

    status: UsageStatus
    http_status: int
    code: str


NO_UNIT = Unit.NONE
"""To be had without a look into the enumeration, which costs as much as three attributes."""
SUCCESS = Outcome(UsageStatus.SUCCESS, 200, "")
CLIENT_CLOSED = Outcome(UsageStatus.CLIENT_CLOSED, 499, "client_closed")


def intent_of(exchange: "Exchange", replica: ReplicaLoad) -> Intent:
    """Return the record that goes to the journal before anything goes to an engine."""
    route = exchange.endpoint.route
    record = exchange.key.record
    return Intent(
        exchange.request_id,
        exchange.arrived_unix_s,
        record.tenant_id,
        record.id,
        route.id,
        route.name,
        replica.version_id,
        exchange.route,
        exchange.call.is_stream,
        exchange.prompt_estimate,
        exchange.reservation.tokens,
        exchange.prices.of(replica.version_id),
        *_of_batch(exchange, replica.version_id),
    )


def _of_batch(exchange: "Exchange", version_id: str) -> tuple[str, int] | tuple[()]:
    """Return the line of a batch, and the factor that its price has already; nothing for other requests."""
    return (exchange.batch_line, exchange.prices.of(version_id).batch_micro or 0) if exchange.batch_line else ()


def estimate(exchange: "Exchange", completion_tokens: int) -> Usage:
    """Return usage for ``completion_tokens`` that were seen, with an estimated prompt."""
    prompt = exchange.endpoint.prompt_tokens(exchange.call.text_length)
    return Usage(prompt_tokens=prompt, completion_tokens=completion_tokens, total_tokens=prompt + completion_tokens)


def usage_or_estimate(exchange: "Exchange", told: Usage | None, body: bytes) -> tuple[Usage, bool]:
    """Return the usage of a whole answer, and whether it is an estimate because the engine told none."""
    if told is not None:
        return told, False
    if exchange.call.meter is not None:
        return Usage(completion_tokens=0), False
    return estimate(exchange, engine_errors.count_tokens(body)), True


def partial_usage(exchange: "Exchange", outcome: Outcome) -> Usage:
    """Return what a request without its engine's final usage is billed: what the client can have seen.

    A request that failed before its first token is free; one whose client left is billed its prompt, since the engine
    had it, unless it was put out and waits again. A line of a batch whose worker left will be run again, and is
    billed then.
    """
    if exchange.batch_line:
        return Usage(completion_tokens=0)
    relay = exchange.relay
    tokens = relay.tokens if relay is not None else 0
    if relay is not None and exchange.reply is not None and (told := exchange.reply.usage(relay)) is not None:
        return told
    is_put_out = exchange.gave_way and exchange.replica is None
    if not tokens and (outcome.status is not UsageStatus.CLIENT_CLOSED or not exchange.was_sent or is_put_out):
        return Usage(completion_tokens=0)
    return estimate(exchange, tokens)


def give_back(exchange: "Exchange", usage: Usage, units: float, now_s: float) -> None:
    """Settle the reservation, at the price of who answered."""
    replica = exchange.replica
    exchange.reservation.settle(
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens or 0,
        now_s=now_s,
        units=units,
        price=exchange.prices.of(replica.version_id if replica is not None else exchange.begun_on),
    )


def settle(
    exchange: "Exchange",
    outcome: Outcome,
    usage: Usage,
    *,
    now_s: float,
    is_estimated: bool,
    units: float = 0.0,
    unit: Unit = NO_UNIT,
    then: Callable[[], None],
) -> None:
    """Write the settlement to the journal, then call ``then``; count it, and learn from it."""
    gateway = exchange.gateway
    endpoint = exchange.endpoint
    prompt = usage.prompt_tokens
    cached = usage.cached_tokens
    completion = usage.completion_tokens or 0
    first_s = exchange.progress.first_token_s
    seconds = now_s - exchange.arrived_s
    replica = exchange.replica
    moved_to, moved_price = "", None
    if replica is not None and replica.version_id != exchange.begun_on:
        moved_to, moved_price = replica.version_id, exchange.prices.of(replica.version_id)
    gateway.journal.settle(
        Settle(
            exchange.request_id,
            # By the clock that never jumps: a wall clock that is set meanwhile makes no request end before it began.
            exchange.arrived_unix_s + seconds,
            prompt,
            cached,
            completion,
            outcome.status,
            outcome.http_status,
            outcome.code,
            (first_s - exchange.arrived_s) * 1000 if first_s is not None else None,
            seconds * 1000,
            replica.route.id if replica is not None else "",
            exchange.attempts,
            is_estimated,
            units,
            unit,
            moved_to,
            moved_price,
            usage.reasoning_tokens if usage.completion_tokens_details is not None else 0,
            usage.audio_input_tokens if usage.prompt_tokens_details is not None else 0,
            usage.audio_output_tokens if usage.completion_tokens_details is not None else 0,
        ),
        then,
    )
    gateway.metrics.used(endpoint.route.name, prompt, cached, completion)
    if not is_estimated:
        endpoint.learn(exchange.call.text_length, prompt, seconds)
        if completion and outcome is SUCCESS:
            endpoint.outputs.observe(exchange.key.record.tenant_id, completion)
