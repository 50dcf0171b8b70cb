"""The routing table, compiled for look-ups, and what outlives a table.

A new table replaces records; the counters that belong to them (allowances of
keys and tenants, dispatchers of endpoints) stay. Everything here is in memory:
the data plane asks nobody while a request waits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from modelyard.config import GatewayConfig
from modelyard.domain.demand import EndpointDemand, ReplicaReport, Report
from modelyard.domain.endpoints import Timeouts
from modelyard.domain.routing_table import EndpointRoute, EngineSpeed, RoutingTable
from modelyard.domain.signals import ReleaseCounts
from modelyard.gateway.accounts import Accounts, KeyState
from modelyard.policy import waits
from modelyard.policy.admission import OutputPredictor
from modelyard.policy.breaker import Tolerance
from modelyard.policy.dispatch import Dispatcher, DispatchRules, ReplicaLoad, Waiter
from modelyard.policy.engine_model import Speed
from modelyard.policy.pricelist import NEVER, Sheet, most_of, sheet
from modelyard.policy.queueing import BATCH_BAND
from modelyard.policy.seats import Seats
from modelyard.policy.tallies import TOLD_S, ReleaseTally

W = TypeVar("W", bound=Waiter)

CHARS_PER_TOKEN = 4.0
"""First guess of a model's text length per token, until real usage is known."""
QUIET_S = 12.0
"""Longer than the windows in which retries and bad answers are counted."""
CALIBRATION_WEIGHT = 0.05
CALIBRATION_CHARS_MIN = 256
"""Shorter prompts say more of the chat template than of the text."""
TEMPLATE_DOWN_WEIGHT = 0.5
TEMPLATE_TOKENS_MAX = 200.0
"""No template adds more; what does is a picture or tools."""


class Patience(NamedTuple):
    """How long an endpoint's engine may take: to accept a connection, to its first token, between two, in all."""

    connect_s: float
    first_token_s: float
    token_s: float
    total_s: float

    @classmethod
    def of(cls, timeouts: Timeouts, settings: GatewayConfig) -> "Patience":
        """Return the endpoint's own values, and the gateway's where it has none."""
        return cls(
            timeouts.connect_s or settings.connect_timeout_s,
            timeouts.first_token_s or settings.first_token_timeout_s,
            timeouts.token_s or settings.token_timeout_s,
            timeouts.total_s or settings.total_timeout_s,
        )


@dataclass(slots=True, eq=False)
class EndpointState(Generic[W]):
    """An endpoint with its dispatcher and what was learnt of it."""

    route: EndpointRoute
    dispatcher: Dispatcher[W]
    last_request_s: float
    arrivals: int = 0
    batch_arrivals: int = 0
    """Lines of batches among them."""
    in_flight: int = 0
    wanted_until_s: float = 0.0
    """Until when it is wanted awake by somebody who came while it slept, though a fallback answered, or they left."""
    is_gone: bool = False
    """Whether the last table has no such endpoint."""
    chars_per_token: float = CHARS_PER_TOKEN
    template_tokens: float = 0.0
    """Tokens that the chat template adds to a prompt, from short ones."""
    templates_seen: int = 0
    """Short prompts that it was learnt from."""
    mean_s: float = waits.ANSWER_S
    """Smoothed seconds of an answer, for ``retry-after`` while the line's own rate is unknown."""
    has_answered: bool = False
    """Whether ``mean_s`` has an answer in it; until then it is what engines' pages tell."""
    patience: Patience = field(init=False)
    remote: frozenset[str] = frozenset()
    """Versions that run at somebody else's."""
    outputs: OutputPredictor = field(default_factory=OutputPredictor)
    tallies: dict[str, ReleaseTally] = field(default_factory=dict)
    """What was counted of each release, by version."""
    sheets: dict[str, Sheet] = field(default_factory=dict)
    """Prices by tenant, as they were for its last request; under "" where nobody has one of its own."""
    batch_sheets: dict[str, tuple[Sheet, Sheet]] = field(default_factory=dict)
    """By tenant, prices and what lines of batches pay instead of them."""
    batch_lines: dict[W, None] = field(default_factory=dict)
    """Lines of batches that are on a replica, the youngest last: they make way for everybody else."""

    def is_quiet(self, now_s: float) -> bool:
        """Say whether nothing has happened lately that needs to be looked at."""
        return not self.in_flight and not self.dispatcher.has_ejected and now_s - self.last_request_s > QUIET_S

    def sheet(self, tenant_id: str, now_unix_s: float) -> Sheet:
        """Return what requests of a tenant cost that arrive now."""
        known = self.sheets.get(tenant_id if self.route.tariffs else "")
        if known is not None and known.since <= now_unix_s < known.until:
            return known
        return self._sheet(tenant_id, now_unix_s)

    def batch_sheet(self, tenant_id: str, now_unix_s: float, factor_micro: int) -> Sheet:
        """Return what lines of batches of a tenant cost that arrive now; they come by the thousand."""
        plain = self.sheet(tenant_id, now_unix_s)
        known = self.batch_sheets.get(tenant_id)
        if known is None or known[0] is not plain:
            known = self.batch_sheets[tenant_id] = (plain, plain.for_batch(factor_micro))
        return known[1]

    def _sheet(self, tenant_id: str, now_unix_s: float) -> Sheet:
        route = self.route
        if not route.tariffs:
            by_version = {one.version_id: one.price for one in route.releases if one.price is not None}
            found = Sheet(route.price, by_version, most_of(route.price, by_version), -NEVER, NEVER)
            return self.sheets.setdefault("", found)
        version_ids = [one.version_id for one in route.releases]
        found = sheet(route.tariffs, tenant_id=tenant_id, version_ids=version_ids, now_unix_s=now_unix_s)
        self.sheets[tenant_id] = found
        return found

    def prompt_tokens(self, text_length: int) -> int:
        """Estimate the tokens of a prompt, from what this model's engine told of earlier ones."""
        return int(self.template_tokens + text_length / self.chars_per_token) or 1

    def learn(self, text_length: int, prompt_tokens: int, seconds: float) -> None:
        """Take a finished answer into account."""
        # More tokens than characters are pictures or tools, and tell nothing of the text of others.
        # What the template adds is added to every estimate, so that the text alone must give the rest.
        of_text = prompt_tokens - self.template_tokens
        if text_length >= CALIBRATION_CHARS_MIN and prompt_tokens <= text_length and of_text >= 1:
            self.chars_per_token += CALIBRATION_WEIGHT * (text_length / of_text - self.chars_per_token)
        elif 0 < text_length < CALIBRATION_CHARS_MIN:
            # What a short prompt has beyond its text is the chat template's.
            beyond = max(0.0, prompt_tokens - text_length / self.chars_per_token)
            if beyond <= TEMPLATE_TOKENS_MAX:
                self._learn_template(beyond)
        self.mean_s += CALIBRATION_WEIGHT * (seconds - self.mean_s)
        self.has_answered = True

    def _learn_template(self, beyond: float) -> None:
        """Take what a short prompt had beyond its text for the template's: all of the first one, for streams that are
        left are billed by it from then on. Less is believed at once: tools and the like add to a prompt, too."""
        self.templates_seen += 1
        weight = max(CALIBRATION_WEIGHT, 1 / self.templates_seen)
        if beyond < self.template_tokens:
            weight = max(weight, TEMPLATE_DOWN_WEIGHT)
        self.template_tokens += weight * (beyond - self.template_tokens)

    def is_remote(self, version_id: str) -> bool:
        """Say whether a version runs at somebody else's, who is paid for whatever is asked."""
        return version_id in self.remote

    def expect(self, speeds: Mapping[str, EngineSpeed]) -> None:
        """Take how fast its engines are from what their pages told the controller, until they have answered here."""
        if self.has_answered and self.dispatcher.model.samples:
            return
        for release in self.route.releases:
            if release.weight and (told := speeds.get(release.version_id)) is not None:
                speed = Speed(told.step_s, told.request_s, told.prefill_token_s, told.kv_token_s)
                self.dispatcher.expect(speed)
                if not self.has_answered:
                    self.mean_s = waits.answer_s(speed, max((one.slots for one in release.replicas), default=1))
                return

    def retry_after_s(self, now_s: float) -> float:
        """Return when a place in the line should be free."""
        return waits.retry_after_s(self.dispatcher, now_s=now_s, mean_s=self.mean_s)

    def wait_s(self, now_s: float) -> float:
        """Predict how long a request that came now would wait; 0 where nobody is, loaded or not."""
        eta_s = self.route.progress.eta_s
        return waits.wait_s(self.dispatcher, now_s=now_s, in_flight=self.in_flight, mean_s=self.mean_s, eta_s=eta_s)


def _report_on(load: ReplicaLoad) -> ReplicaReport:
    """Return what the controller should know of a replica, or of a guest's seat on one."""
    if load.route.seat_of:
        return ReplicaReport(load.route.id, load.own, load.failures, load.failure_reason)
    return ReplicaReport(load.route.id, load.running, load.failures, load.failure_reason, load.pending_tokens)


def _names(route: EndpointRoute) -> tuple[str, str, bool]:
    """Return what an endpoint is found by, beside its id."""
    return route.tenant_id, route.name, route.is_shared


class Catalog(Generic[W]):
    """Everything the gateway knows. ``workers`` divide limits and slots; this is number ``worker``."""

    def __init__(
        self,
        *,
        worker: int,
        settings: GatewayConfig,
        deliver: Callable[[W, ReplicaLoad], bool],
        chance: Callable[[], float],
        source: str = "",
        currency: str = "USD",
    ) -> None:
        workers = settings.workers
        self._worker = worker
        self._workers = workers
        self._settings = settings
        self._rules = DispatchRules(
            places=settings.queue_max,
            bytes_max=settings.queue_bytes_max,
            # Of slots each worker has a part, of memory as well: several that count all of it would fill it over.
            kv_share_max=settings.kv_share_max / workers,
            retry_share_max=settings.retry_share_max,
            kept_share_max=settings.kept_share_max,
            tolerance=Tolerance(
                error_share_max=settings.error_share_max, ejection_share_max=settings.ejection_share_max
            ),
        )
        self._deliver = deliver
        self._chance = chance
        self._seats = Seats()
        self.accounts = Accounts(worker=worker, workers=workers, source=source, currency=currency)
        self.table: RoutingTable | None = None
        self._endpoints: dict[str, EndpointState[W]] = {}
        self._own: dict[tuple[str, str], EndpointState[W]] = {}
        self._shared: dict[str, EndpointState[W]] = {}
        self._speeds: dict[str, EngineSpeed] = {}
        """How fast engines are, by version, as it was last told."""

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
        if present is None or present.tenants is not table.tenants or present.keys is not table.keys:
            self.accounts.take(table.tenants, table.keys, now_s=now_s)
        self._take_endpoints(table, now_s)

    def key(self, token: bytes, pepper: bytes, *, now_unix_s: float) -> tuple[KeyState | None, bool]:
        """Return the key that ``token`` proves (or None), and whether its id is known at all."""
        return self.accounts.key(token, pepper, now_unix_s=now_unix_s)

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
            # One request may come and go between two looks of the controller.
            queued = len(endpoint.dispatcher.line) or int(now_s < endpoint.wanted_until_s)
            idle_s = 0.0 if queued or endpoint.in_flight else now_s - endpoint.last_request_s
            endpoints.append(
                EndpointDemand(
                    endpoint.route.id,
                    queued,
                    endpoint.in_flight,
                    idle_s,
                    endpoint.arrivals,
                    endpoint.wait_s(now_s),
                    endpoint.dispatcher.line.depths[BATCH_BAND] if queued else 0,
                    len(endpoint.batch_lines),
                    endpoint.batch_arrivals,
                )
            )
            replicas += [_report_on(load) for load in endpoint.dispatcher.replicas]
        return Report(endpoints, replicas, *((self.table.epoch, self.table.revision) if self.table else ()))

    def by_id(self, endpoint_id: str) -> EndpointState[W] | None:
        """Return an endpoint of the table."""
        return self._endpoints.get(endpoint_id)

    def releases(self, *, now_s: float) -> list[ReleaseCounts]:
        """Return what was counted of every release that had a request lately; the others begin at 0 again."""
        found = []
        for endpoint_id, endpoint in self._endpoints.items():
            if not endpoint.tallies:
                continue
            for version_id, tally in list(endpoint.tallies.items()):
                if now_s - tally.changed_s > TOLD_S:
                    del endpoint.tallies[version_id]
                else:
                    found.append(tally.counts(endpoint_id, version_id))
        return found

    def expect(self, told: Iterable[EngineSpeed]) -> None:
        """Take over how fast the engines of versions are, all that are known."""
        before, self._speeds = self._speeds, {one.version_id: one for one in told}
        # Most of ten thousand are as they were, and requests wait while all endpoints are gone through.
        news = {name: one for name, one in self._speeds.items() if before.get(name) != one}
        if news:
            for endpoint in self._endpoints.values():
                endpoint.expect(news)

    def _take_endpoints(self, table: RoutingTable, now_s: float) -> None:
        changed = [
            (state, route)
            for route in table.endpoints
            if (state := self._endpoints.get(route.id)) is None or state.route is not route or state.is_gone
        ]
        is_renamed = len(table.endpoints) != len(self._endpoints)
        for state, route in changed:
            is_renamed = is_renamed or state is None or state.is_gone or _names(state.route) != _names(route)
        touched = [one for one in (self._take_route(state, route, now_s) for state, route in changed) if one]
        if is_renamed:
            touched += self._take_names(table)
        # A table is whole, however little of it changed.
        for state in touched:
            releases = () if state.is_gone else state.route.releases
            state.dispatcher.update(
                [
                    (r.version_id, r.weight, r.shadow, [(one, self._slots(one.slots)) for one in r.replicas])
                    for r in releases
                ],
                now_s=now_s,
                fallbacks={r.version_id: r.fallback for r in releases if r.fallback},
            )
            if not state.dispatcher.is_asleep:
                state.wanted_until_s = 0.0
        if self._seats.news:
            # A guest came to a replica that others wait for already, and whose own route is as it was.
            self._seats.news = False
            for state in self._endpoints.values():
                state.dispatcher.stand()

    def _take_route(
        self, state: EndpointState[W] | None, route: EndpointRoute, now_s: float
    ) -> EndpointState[W] | None:
        """Take over a route that is another object than before; return its state if it differs."""
        is_news = state is None or state.is_gone or state.route != route
        if state is None:
            dispatcher = Dispatcher(
                route.id, rules=self._rules, deliver=self._deliver, chance=self._chance, seats=self._seats
            )
            state = self._endpoints[route.id] = EndpointState(route, dispatcher, last_request_s=now_s)
        state.route, state.is_gone = route, False
        state.remote = frozenset(release.version_id for release in route.releases if release.is_remote)
        state.patience = Patience.of(route.serving.timeouts, self._settings)
        state.sheets, state.batch_sheets = {}, {}
        if is_news:
            state.expect(self._speeds)
        return state if is_news else None

    def _take_names(self, table: RoutingTable) -> list[EndpointState[W]]:
        """Find endpoints by the names of ``table``; return those that it no longer has."""
        kept: dict[str, EndpointState[W]] = {}
        own: dict[tuple[str, str], EndpointState[W]] = {}
        shared: dict[str, EndpointState[W]] = {}
        for route in table.endpoints:
            kept[route.id] = state = self._endpoints[route.id]
            own[route.tenant_id, route.name] = own[route.tenant_id, route.id] = state
            if route.is_shared:
                shared[route.name] = shared[route.id] = state
        gone = [state for endpoint_id, state in self._endpoints.items() if endpoint_id not in kept]
        for state in gone:
            state.is_gone = True
            if state.in_flight:
                kept[state.route.id] = state
        self._endpoints, self._own, self._shared = kept, own, shared
        return gone

    def _slots(self, slots: int) -> int:
        # Every worker must be able to use every replica, or a request could wait for ever at one of them.
        return slots if self._workers == 1 else max(1, slots // self._workers + (self._worker < slots % self._workers))
