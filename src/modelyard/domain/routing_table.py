"""The immutable snapshot that control writes and gateways serve from."""

import msgspec

from modelyard.domain.endpoints import Progress, Serving
from modelyard.domain.prices import Tariff
from modelyard.domain.tenants import ApiKey, Tenant
from modelyard.domain.usage import Price


class ReplicaRoute(msgspec.Struct, frozen=True, array_like=True):
    """Where a ready replica listens. ``slots``: requests it takes at once. ``is_draining``: nothing new goes there.

    ``kv_tokens``: tokens that fit its KV cache, by the engine's own block count; 0 unknown.
    """

    id: str
    host: str
    port: int
    secret: str
    slots: int
    is_draining: bool = False
    kv_tokens: int = 0
    model_name: str = ""
    """What its engine calls itself where that is not the endpoint's name."""
    seat_of: str = ""
    """The replica that this is a seat on, for a guest: its slots and its KV cache are shared by everybody there, and
    its ``id`` is of the seat alone. "": a replica of the endpoint's own."""


class ReleaseRoute(msgspec.Struct, frozen=True):
    """A release with its ready replicas."""

    version_id: str
    weight: int
    replicas: tuple[ReplicaRoute, ...]
    shadow: int = 0
    fallback: int = 0
    """Its turn where the releases with weight have no room, or none of them serves; 0: never."""
    price: Price | None = None
    """Its own price, where that is not the endpoint's."""
    is_remote: bool = False
    """It runs at somebody else's, who is paid for whatever is asked: nothing is asked twice without need."""


class EndpointRoute(msgspec.Struct, frozen=True):
    """Everything a gateway must know of an endpoint.

    ``routes`` are the API paths its engine serves (``/v1/chat/completions``);
    ``engine_extras`` are request fields that only this engine understands
    (``cache_salt``, ``top_k``, …). ``context_length`` is in tokens, 0 unknown.
    ``progress`` and ``failure`` say why there is no replica.
    """

    id: str
    tenant_id: str
    name: str
    is_shared: bool
    created_at: int
    releases: tuple[ReleaseRoute, ...]
    routes: frozenset[str]
    engine_extras: frozenset[str]
    context_length: int
    price: Price
    progress: Progress
    failure: str = ""
    serving: Serving = Serving()
    fallback_routes: frozenset[str] = frozenset()
    """Paths that every fallback serves, too; a request for another waits for the releases with weight."""
    fallback_extras: frozenset[str] = frozenset()
    tariffs: tuple[Tariff, ...] = ()
    """All its prices, past the present one too, the strongest first; empty: ``price``, and those of releases."""


class RoutingTable(msgspec.Struct, frozen=True, tag="table"):
    """The whole snapshot. ``revision`` only grows; gateways ignore an older one of the same ``epoch``."""

    epoch: str
    revision: int
    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    endpoints: tuple[EndpointRoute, ...]


class TableChange(msgspec.Struct, frozen=True, tag="change"):
    """What makes the table ``revision`` of the table ``base`` of the same ``epoch``.

    Rows that are there already are replaced in their place, others come at the end; ``gone_…`` are ids of rows that
    are no more.
    """

    epoch: str
    base: int
    revision: int
    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    endpoints: tuple[EndpointRoute, ...] = ()
    gone_tenants: tuple[str, ...] = ()
    gone_keys: tuple[str, ...] = ()
    gone_endpoints: tuple[str, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every second. While ``is_authoritative`` is false (database locked or gone) a gateway must not
    judge keys it does not know: it answers 503 instead of 401."""

    is_authoritative: bool
    reason: str = ""


class ReplicaSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """What a replica's own metrics page said ``age_s`` ago; None is not reported, never 0."""

    replica_id: str
    age_s: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


class EngineSpeed(msgspec.Struct, frozen=True, array_like=True):
    """How fast the engine of a version was seen to be, in seconds: for an iteration, and more of it for each running
    request, token of a prompt that it reads, and token held (``policy/engine_model.py``)."""

    version_id: str
    step_s: float
    request_s: float
    prefill_token_s: float
    kv_token_s: float


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """What a key or tenant with a quota has in the ledger for the current day and month (UTC), and in all.

    ``day`` and ``month`` are like ``2026-11-29`` and ``2026-11``. A row is for what came from one ``source`` (a
    worker's journal); a subject that spent nothing has one row of zeros.
    """

    subject_id: str
    day: str
    month: str
    day_tokens: int
    month_tokens: int
    day_nanousd: int
    month_nanousd: int
    source: str = ""
    total_nanousd: int | None = None
    """All that it ever cost; told of who pays in advance only."""


class Tidings(msgspec.Struct, frozen=True, tag="tidings"):
    """What changes too often for the table: loads of replicas, and sums against quotas.

    ``delivered`` tells how far each gateway's journal is part of ``spent``: the segment and offset by its source.
    """

    snapshots: tuple[ReplicaSnapshot, ...] = ()
    spent: tuple[Spent, ...] = ()
    delivered: dict[str, tuple[str, int]] = {}
    refused: tuple[tuple[int, float], ...] = ()
    """Fingerprints of requests that take engines down, and until when (monotonic seconds) they are refused."""
    speeds: tuple[EngineSpeed, ...] = ()
    """Told now and then, and then all of them; without any they are as they were."""
