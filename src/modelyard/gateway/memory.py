"""What a gateway remembers of its last requests, for whoever asks why one went the way it did.

Written once a request, at its end, as a tuple of what was there anyway: under
a microsecond, some 500 bytes, and nothing of a prompt or an answer. Words and
objects are only made of it when somebody asks. What was refused before any
engine had it has a ring of its own, so that a storm of refusals does not drive
out what was served; so has what came without a good key, which is nobody's.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from modelyard.domain.usage import Price
from modelyard.domain.why import Bound, Considered, Line, Move, RequestStory
from modelyard.errors import ApiError
from modelyard.gateway.accounts import KeyState
from modelyard.gateway.billing import Outcome
from modelyard.gateway.sse import Usage
from modelyard.policy.job import Look, Looks
from modelyard.policy.pricing import billed
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.routing import UNKNOWN_ENGINE
from modelyard.policy.stories import spill_text
from modelyard.policy.tallies import ReleaseTally

if TYPE_CHECKING:
    from modelyard.domain.tenants import Rates
    from modelyard.gateway.catalog import Catalog, EndpointState
    from modelyard.gateway.exchange import Exchange

STRANGERS_MAX = 500
"""Requests without a good key that are remembered."""
MOVES_MAX = 16
"""Replicas that had no room for a request, of which so many are remembered."""
INDEX_S = 1.0
"""How old an index may be: who asks in a loop must not have everything searched each time."""
INDEX_KEPT_S = 5.0
NEWEST = 500
"""What is searched of each ring beside the index."""


class _Ended(NamedTuple):
    """A request that ended. The order is that of ``RequestMemory.ended``."""

    request_id: str
    tenant_id: str
    key_id: str
    endpoint_id: str
    model: str
    route: str
    arrived_unix_s: float
    latency_s: float
    queued_s: float
    first_s: float | None
    version_id: str
    replica_id: str
    beside: int
    http_status: int
    code: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    units: float
    price: Price
    reserved_tokens: int
    attempts: int
    looks: Looks | None
    moves: list[Move] | None
    line: Line | None
    refusal: "Refused | None"
    was_sent: bool
    spilled: tuple[int, int, int] | None


class Refused(NamedTuple):
    """What is kept of an error: not the exception itself, whose traceback holds the request."""

    message: str
    retry_after_s: float | None
    facts: dict[str, str | int | float]


class _TurnedAway(NamedTuple):
    """A request that was refused before it was admitted."""

    request_id: str
    tenant_id: str
    key_id: str
    endpoint_id: str
    model: str
    route: str
    arrived_unix_s: float
    http_status: int
    code: str
    refusal: Refused


class RequestMemory:
    """The last requests of one gateway worker ``name``, and the tallies of their releases.

    ``served`` and ``refused`` are how many are remembered of each.
    """

    def __init__(self, name: str, *, served: int, refused: int) -> None:
        self.name = name
        self._served: deque[tuple[object, ...]] = deque(maxlen=served)
        self._refused: deque[tuple[object, ...]] = deque(maxlen=refused)
        self._away: deque[_TurnedAway] = deque(maxlen=refused)
        self._strangers: deque[_TurnedAway] = deque(maxlen=min(refused, STRANGERS_MAX))
        self._index: dict[object, tuple[object, ...]] = {}
        """What is remembered by request id; made when somebody asks, and dropped when nobody does any more."""
        self._indexed_s = float("-inf")

    def __repr__(self) -> str:
        return f"<RequestMemory: {len(self._served)} served, {len(self._refused) + len(self._away)} refused>"

    # --- written ---

    def ended(self, exchange: "Exchange", outcome: Outcome, usage: Usage, units: float, now_s: float) -> None:
        """Count a request in its release, and remember it; called while it still has its replica."""
        endpoint, reservation, job = exchange.endpoint, exchange.reservation, exchange.job
        record, route = exchange.key.record, endpoint.route
        latency_s = now_s - exchange.arrived_s
        # What it lost by making way says nothing of the release that answers it.
        lost_s = job.dispatched_s - exchange.arrived_s - exchange.queued_s if exchange.gave_way else 0.0
        first_s = exchange.progress.first_token_s
        if first_s is not None:
            first_s -= exchange.arrived_s
        completion = usage.completion_tokens or 0
        replica = exchange.replica
        version_id = replica_id = ""
        if replica is not None:
            version_id, replica_id = replica.version_id, replica.route.id
            tally = endpoint.tallies.get(version_id)
            if tally is None:
                tally = endpoint.tallies[version_id] = ReleaseTally()
            service_s = now_s - job.dispatched_s
            # A line of a batch has a day: that it waited says nothing of its release, and must start no replicas.
            seen_s = service_s if exchange.batch_line else latency_s - lost_s
            seen_first_s = None if first_s is None else first_s - lost_s
            tally.ended(outcome.http_status, seen_s, seen_first_s, service_s, usage.prompt_tokens, completion, now_s)
        ring = self._served if exchange.has_intent else self._refused
        ring.append(
            (
                exchange.request_id, record.tenant_id, record.id, route.id, route.name, exchange.route,
                exchange.arrived_unix_s, latency_s, exchange.queued_s, first_s, version_id, replica_id, job.beside,
                outcome.http_status, outcome.code, usage.prompt_tokens,
                usage.cached_tokens if usage.prompt_tokens_details is not None else 0,
                completion, units, exchange.prices.of(version_id), reservation.tokens, exchange.attempts,
                job.looks, exchange.moves, exchange.line, exchange.refusal, exchange.was_sent,
                job.spilled,
            )
        )  # fmt: skip

    def turned_away(
        self,
        request_id: str,
        route: str,
        error: ApiError,
        key: KeyState | None,
        model: str,
        endpoint: "EndpointState[Exchange] | None",
        now_unix_s: float,
    ) -> None:
        """Remember a request that was refused before it was admitted."""
        endpoint_id = endpoint.route.id if endpoint is not None else ""
        tenant_id, key_id = (key.record.tenant_id, key.record.id) if key is not None else ("", "")
        ring = self._strangers if key is None else self._away
        ring.append(
            _TurnedAway(
                request_id, tenant_id, key_id, endpoint_id, model, route, now_unix_s,
                error.status, error.code or "error", refused_of(error),
            )
        )  # fmt: skip

    # --- read, hardly ever ---

    def sizes(self) -> list[tuple[tuple[str, ...], float]]:
        """Return how many are remembered, by kind."""
        refused = len(self._refused) + len(self._away) + len(self._strangers)
        return [(("served",), len(self._served)), (("refused",), refused)]

    def story(self, request_id: str, catalog: "Catalog[Exchange]", *, now_s: float) -> RequestStory | None:
        """Return what is remembered of a request, and what ``catalog`` now knows of its limits; None: nothing.

        Right after a burst of more than ``NEWEST`` others it may be found only ``INDEX_S`` later.
        """
        raw = self._find(request_id, now_s)
        if raw is None:
            return None
        if isinstance(raw, _TurnedAway):
            return self._short(raw, catalog)
        return self._whole(_Ended(*raw), catalog)  # type: ignore[arg-type]  # as ``ended`` wrote it

    def tidy(self, now_s: float) -> None:
        """Drop the index when nobody has asked for a while; called by the sweep."""
        if self._index and now_s - self._indexed_s > INDEX_KEPT_S:
            self._index = {}

    def _find(self, request_id: str, now_s: float) -> tuple[object, ...] | None:
        rings: tuple[deque[tuple[object, ...]] | deque[_TurnedAway], ...] = (
            self._served, self._refused, self._away, self._strangers,
        )  # fmt: skip
        if now_s - self._indexed_s > INDEX_S:
            self._indexed_s = now_s
            self._index = {raw[0]: raw for ring in rings for raw in ring}
        if (found := self._index.get(request_id)) is not None:
            return found
        for ring in rings:
            for raw in islice(reversed(ring), NEWEST):
                if raw[0] == request_id:
                    return raw
        return None

    def _whole(self, ended: _Ended, catalog: "Catalog[Exchange]") -> RequestStory:
        endpoint = catalog.by_id(ended.endpoint_id)
        tokens = (ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens)
        names = endpoint.dispatcher.names if endpoint is not None else {}
        refusal = ended.refusal or Refused("", None, {})
        return RequestStory(
            request_id=ended.request_id,
            tenant_id=ended.tenant_id,
            key_id=ended.key_id,
            source=self.name,
            arrived_at=ended.arrived_unix_s,
            route=ended.route,
            model=ended.model,
            endpoint_id=ended.endpoint_id,
            status=ended.http_status,
            code=ended.code,
            message=refusal.message,
            retry_after_s=refusal.retry_after_s,
            facts=refusal.facts,
            bounds=_bounds(catalog, ended.key_id, ended.model),
            reserved_tokens=ended.reserved_tokens,
            was_sent=ended.was_sent,
            waited_s=ended.queued_s if ended.attempts else ended.latency_s,
            line=ended.line,
            version_id=ended.version_id,
            replica_id=ended.replica_id,
            fallback=spill_text(*ended.spilled) if ended.spilled is not None else "",
            beside=ended.beside if ended.attempts else None,
            considered=considered_of(ended.looks, ended.replica_id, names.get),
            moves=tuple(ended.moves or ()),
            attempts=ended.attempts,
            ttft_s=ended.first_s,
            latency_s=ended.latency_s,
            prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens,
            completion_tokens=ended.completion_tokens,
            units=ended.units,
            cost_nanousd=billed(ended.price, *tokens, ended.units)[1],
        )

    def _short(self, turned: _TurnedAway, catalog: "Catalog[Exchange]") -> RequestStory:
        return RequestStory(
            request_id=turned.request_id,
            tenant_id=turned.tenant_id,
            key_id=turned.key_id,
            source=self.name,
            arrived_at=turned.arrived_unix_s,
            route=turned.route,
            model=turned.model,
            endpoint_id=turned.endpoint_id,
            status=turned.http_status,
            code=turned.code,
            message=turned.refusal.message,
            retry_after_s=turned.refusal.retry_after_s,
            facts=turned.refusal.facts,
            bounds=_bounds(catalog, turned.key_id, turned.model),
        )


def moved(exchange: "Exchange", replica: ReplicaLoad, reason: str, service_s: float, now_s: float) -> None:
    """Note that the request left a replica that failed it, and count that in the release."""
    endpoint = exchange.endpoint
    move = Move(replica.route.id, replica.version_id, now_s - exchange.arrived_s, reason)
    if exchange.moves is None:
        exchange.moves = []
    exchange.moves.append(move)
    tally = endpoint.tallies.get(replica.version_id)
    if tally is None:
        tally = endpoint.tallies[replica.version_id] = ReleaseTally()
    tally.moved(service_s, now_s)


def put_back(exchange: "Exchange", replica: ReplicaLoad, now_s: float, reason: str = "it was full") -> None:
    """Note that a replica had no room for the request, or has none any more; that is nobody's failure."""
    if exchange.moves is None:
        exchange.moves = []
    if len(exchange.moves) < MOVES_MAX:
        exchange.moves.append(Move(replica.route.id, replica.version_id, now_s - exchange.arrived_s, reason))


def joined(exchange: "Exchange", *, is_cold: bool) -> None:
    """Note the waiting line as a request found it."""
    dispatcher = exchange.endpoint.dispatcher
    if exchange not in dispatcher.line:
        return
    ahead = dispatcher.line.position(exchange)
    predicted_s = dispatcher.wait_s(exchange, now_s=exchange.gateway.clock.monotonic_s())
    exchange.line = Line(ahead, predicted_s, is_cold)


def refused_of(error: ApiError) -> Refused:
    """Return what is kept of an error."""
    return Refused(error.message, error.retry_after_s, error.facts or {})


def considered_of(looks: Looks | None, replica_id: str, name_of: Callable[[int], str | None]) -> tuple[Considered, ...]:
    """Return the replicas that routing looked at, if the one that got the request was chosen from them."""
    found = []
    for raw in looks or ():
        look = Look(*raw)
        name = name_of(look.identity) or ""
        seen = Considered(name, look.running, look.slots, is_chosen=bool(name) and name == replica_id)
        if look.total_s != float("inf"):
            seen = Considered(
                seen.replica_id,
                seen.running,
                seen.slots,
                seen.is_chosen,
                int(look.matched * UNKNOWN_ENGINE.block_tokens),
                look.wait_s,
                look.prefill_s,
                look.total_s - look.wait_s - look.prefill_s,
                look.total_s,
            )
        found.append(seen)
    # One that was taken for its cached prompt when a slot fell free was not chosen from these.
    return tuple(found) if any(seen.is_chosen and seen.total_s is not None for seen in found) else ()


def _bounds(catalog: "Catalog[Exchange]", key_id: str, model: str) -> tuple[Bound, ...]:
    """Return every limit that requests of this key for this model are checked against."""
    state = catalog.accounts.by_id(key_id)
    if state is None:
        return ()
    found: list[Bound] = []
    for whose, limits in (("key", state.record.limits), ("tenant", state.tenant.record.limits)):
        found += _rates(whose, limits)
        for kind in ("tokens_per_day", "tokens_per_month", "nanousd_per_day", "nanousd_per_month"):
            if (limit := getattr(limits, kind)) is not None:
                found.append(Bound(whose, kind, limit))
        if model in limits.models:
            found += _rates(f"{whose} for this model", limits.models[model])
        if model in limits.model_budgets:
            found.append(Bound(f"{whose} for this model", "nanousd_per_month", limits.model_budgets[model]))
        if limits.nanousd_total is not None:
            found.append(Bound(whose, "money_prepaid", limits.nanousd_total))
    return tuple(found)


def _rates(whose: str, rates: "Rates") -> list[Bound]:
    kinds = ("requests_per_minute", "tokens_per_minute", "concurrency")
    return [Bound(whose, kind, limit) for kind in kinds if (limit := getattr(rates, kind)) is not None]
