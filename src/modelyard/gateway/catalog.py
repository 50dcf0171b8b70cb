"""The routing table, compiled for look-ups, and what outlives a table.

A new table replaces records; the counters that belong to them (allowances of
keys and tenants, dispatchers of endpoints) stay. Everything here is in memory:
the data plane asks nobody while a request waits.
"""

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from modelyard.domain.demand import EndpointDemand, ReplicaReport, Report
from modelyard.domain.routing_table import EndpointRoute, RoutingTable
from modelyard.domain.tenants import ApiKey, Identity, Limits, Scope, Tenant
from modelyard.ids import hash_secret, parse_api_key
from modelyard.policy.dispatch import Dispatcher, ReplicaLoad
from modelyard.policy.limits import Allowance, share

W = TypeVar("W")

CHARS_PER_TOKEN = 4.0
"""First guess of a model's text length per token, until real usage is known."""
CALIBRATION_WEIGHT = 0.05
CALIBRATION_CHARS_MIN = 256
"""Shorter prompts say more of the chat template than of the text."""


@dataclass(slots=True)
class TenantState:
    """A tenant with what is left of its limits."""

    record: Tenant
    allowance: Allowance


@dataclass(slots=True)
class KeyState:
    """A key with what is left of its limits; ``allowances`` are the key's and its tenant's."""

    record: ApiKey
    tenant: TenantState
    allowance: Allowance
    allowances: tuple[Allowance, ...]
    models: frozenset[str] | None
    identity: Identity
    may_infer: bool
    proven: bytes = b""
    """The last token that proved this key, in memory only: comparing it costs a tenth of a hash."""


@dataclass(slots=True, eq=False)
class EndpointState(Generic[W]):
    """An endpoint with its dispatcher and what was learnt of it."""

    route: EndpointRoute
    dispatcher: Dispatcher[W]
    last_request_s: float
    arrivals: int = 0
    in_flight: int = 0
    chars_per_token: float = CHARS_PER_TOKEN
    mean_s: float = 1.0
    """Smoothed seconds of an answer, for ``retry-after``."""

    def prompt_tokens(self, text_length: int) -> int:
        """Estimate the tokens of a prompt, from what this model's engine told of earlier ones."""
        return max(1, int(text_length / self.chars_per_token))

    def learn(self, *, text_length: int, prompt_tokens: int, seconds: float) -> None:
        """Take a finished answer into account."""
        # More tokens than characters are pictures or tools, and tell nothing of the text of others.
        if text_length >= CALIBRATION_CHARS_MIN and 0 < prompt_tokens <= text_length:
            self.chars_per_token += CALIBRATION_WEIGHT * (text_length / prompt_tokens - self.chars_per_token)
        self.mean_s += CALIBRATION_WEIGHT * (seconds - self.mean_s)

    def retry_after_s(self) -> float:
        """Return when a place in the line should be free: its length over the rate it drains at."""
        slots = sum(replica.slots for replica in self.dispatcher.replicas) or 1
        return max(1.0, min(60.0, (len(self.dispatcher.line) + 1) * self.mean_s / slots))


class Catalog(Generic[W]):
    """Everything the gateway knows. ``workers`` divide limits and slots; this is number ``worker``."""

    def __init__(
        self,
        *,
        worker: int,
        workers: int,
        places: int,
        deliver: Callable[[W, ReplicaLoad], bool],
        chance: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._workers = workers
        self._places = places
        self._deliver = deliver
        self._chance = chance
        self.table: RoutingTable | None = None
        self._keys: dict[bytes, KeyState] = {}
        self._tenants: dict[str, TenantState] = {}
        self._endpoints: dict[str, EndpointState[W]] = {}
        self._own: dict[tuple[str, str], EndpointState[W]] = {}
        self._shared: dict[str, EndpointState[W]] = {}

    @property
    def endpoints(self) -> Iterable[EndpointState[W]]:
        """Return all endpoints of the table, and deleted ones that still have requests."""
        return self._endpoints.values()

    def take(self, table: RoutingTable, *, now_s: float) -> None:
        """Replace the table; one that is older than the present one of the same controller is ignored."""
        present = self.table
        if present is not None and present.epoch == table.epoch and table.revision <= present.revision:
            return
        self.table = table
        self._tenants = {tenant.id: self._tenant(tenant, now_s) for tenant in table.tenants}
        keys: dict[bytes, KeyState] = {}
        for record in table.keys:
            if (tenant := self._tenants.get(record.tenant_id)) is not None:
                keys[record.id.encode()] = self._key(record, tenant, now_s)
        self._keys = keys
        self._take_endpoints(table, now_s)

    def key(self, token: bytes, pepper: bytes, *, now_unix_s: float) -> tuple[KeyState | None, bool]:
        """Return the key that ``token`` proves (or None), and whether its id is known at all.

        After a rotation the secret before it counts too, until it expires. An unknown id goes through the same
        comparison as a wrong secret, so that time tells nothing (S16).
        """
        state = self._keys.get(token[3:11])
        if state is not None and state.proven and hmac.compare_digest(token, state.proven):
            return state, True
        text = token.decode("latin-1")
        digest = hash_secret(pepper, text[12:55])
        record = state.record if state is not None else None
        is_new = hmac.compare_digest(digest, record.secret_hash if record is not None else _NOBODY)
        is_proven = is_new or (record is not None and _proves_previous(record, digest, now_unix_s))
        if not is_proven or state is None or parse_api_key(text) is None:
            return None, state is not None
        if is_new:
            state.proven = token
        return state, True

    def endpoint(self, key: KeyState, name: str) -> EndpointState[W] | None:
        """Return the endpoint that ``key`` may call under ``name`` (its own tenant's before a shared one)."""
        if key.models is not None and name not in key.models:
            return None
        found = self._own.get((key.record.tenant_id, name))
        return found if found is not None else self._shared.get(name)

    def visible(self, key: KeyState) -> list[EndpointState[W]]:
        """Return all endpoints that ``key`` may call, by name."""
        tenant = key.record.tenant_id
        names = {name for owner, name in self._own if owner == tenant} | set(self._shared)
        found = ((name, self.endpoint(key, name)) for name in sorted(names))
        # Endpoints are also found by their id; a list shows each once.
        return [endpoint for name, endpoint in found if endpoint is not None and endpoint.route.name == name]

    def report(self, *, now_s: float) -> Report:
        """Return what the controller should know now."""
        endpoints = []
        replicas = []
        for endpoint in self._endpoints.values():
            queued = len(endpoint.dispatcher.line)
            idle_s = 0.0 if queued or endpoint.in_flight else now_s - endpoint.last_request_s
            endpoints.append(EndpointDemand(endpoint.route.id, queued, endpoint.in_flight, idle_s, endpoint.arrivals))
            replicas += [
                ReplicaReport(load.route.id, load.running, load.failures, load.failure_reason)
                for load in endpoint.dispatcher.replicas
            ]
        return Report(endpoints, replicas, *((self.table.epoch, self.table.revision) if self.table else ()))

    def _tenant(self, record: Tenant, now_s: float) -> TenantState:
        known = self._tenants.get(record.id)
        limits = self._share(record.limits)
        if known is None:
            return TenantState(record, Allowance.full(limits, now_s=now_s))
        if known.record.limits != record.limits:
            known.allowance.change(limits, now_s=now_s)
        known.record = record
        return known

    def _key(self, record: ApiKey, tenant: TenantState, now_s: float) -> KeyState:
        known = self._keys.get(record.id.encode())
        limits = self._share(record.limits)
        if known is None:
            allowance = Allowance.full(limits, now_s=now_s)
        else:
            allowance = known.allowance
            if known.record.limits != record.limits:
                allowance.change(limits, now_s=now_s)
        models = frozenset(record.models) if record.models is not None else None
        identity = Identity(record.id, record.tenant_id, record.scopes)
        return KeyState(
            record,
            tenant,
            allowance,
            (allowance, tenant.allowance),
            models,
            identity,
            identity.may(Scope.INFERENCE),
        )

    def _share(self, limits: Limits) -> Limits:
        return share(limits, index=self._worker, of=self._workers)

    def _take_endpoints(self, table: RoutingTable, now_s: float) -> None:
        kept: dict[str, EndpointState[W]] = {}
        own: dict[tuple[str, str], EndpointState[W]] = {}
        shared: dict[str, EndpointState[W]] = {}
        for route in table.endpoints:
            state = self._endpoints.get(route.id)
            if state is None:
                dispatcher = Dispatcher(route.id, places=self._places, deliver=self._deliver, chance=self._chance)
                state = EndpointState(route, dispatcher, last_request_s=now_s)
            state.route = route
            kept[route.id] = state
            own[route.tenant_id, route.name] = own[route.tenant_id, route.id] = state
            if route.is_shared:
                shared[route.name] = shared[route.id] = state
        for endpoint_id, state in self._endpoints.items():
            if endpoint_id not in kept and state.in_flight:
                kept[endpoint_id] = state
        self._endpoints, self._own, self._shared = kept, own, shared
        live = {route.id for route in table.endpoints}
        for endpoint_id, state in kept.items():
            releases = state.route.releases if endpoint_id in live else ()
            state.dispatcher.update(
                [
                    (release.version_id, release.weight, [(r, self._slots(r.slots)) for r in release.replicas])
                    for release in releases
                ],
                now_s=now_s,
            )

    def _slots(self, slots: int) -> int:
        # Every worker must be able to use every replica, or a request could wait for ever at one of them.
        return slots if self._workers == 1 else max(1, slots // self._workers + (self._worker < slots % self._workers))


def _proves_previous(record: ApiKey, digest: bytes, now_unix_s: float) -> bool:
    previous = record.previous_hash
    if previous is None or not hmac.compare_digest(digest, previous):
        return False
    return now_unix_s < (record.previous_expires_at or 0)


_NOBODY = bytes(32)
