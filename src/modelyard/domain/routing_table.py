"""The immutable snapshot that control writes and gateways serve from."""

import msgspec

from modelyard.domain.endpoints import Progress
from modelyard.domain.tenants import ApiKey, Tenant
from modelyard.domain.usage import Price


class ReplicaRoute(msgspec.Struct, frozen=True, array_like=True):
    """Where a ready replica listens. ``slots``: requests it takes at once. ``is_draining``: nothing new goes there."""

    id: str
    host: str
    port: int
    secret: str
    slots: int
    is_draining: bool = False


class ReleaseRoute(msgspec.Struct, frozen=True):
    """A release with its ready replicas."""

    version_id: str
    weight: int
    replicas: tuple[ReplicaRoute, ...]


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


class RoutingTable(msgspec.Struct, frozen=True, tag="table"):
    """The whole snapshot. ``revision`` only grows; gateways ignore an older one of the same ``epoch``."""

    epoch: str
    revision: int
    tenants: tuple[Tenant, ...]
    keys: tuple[ApiKey, ...]
    endpoints: tuple[EndpointRoute, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every second. While ``is_authoritative`` is false (database locked or gone) a gateway must not
    judge keys it does not know: it answers 503 instead of 401."""

    is_authoritative: bool
    reason: str = ""
