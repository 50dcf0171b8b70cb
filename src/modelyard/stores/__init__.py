"""Stores: state outside a process, one folder or file a backend.

This is the contract. Every method is one transaction: it happens wholly or
not at all. ``tests/conformance`` runs the same suites against every backend.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from modelyard.domain.catalog import ModelVersion
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress
from modelyard.domain.fleet import GuestSeat, Replica
from modelyard.domain.leases import Leases
from modelyard.domain.requests import Finish, KeptRequest
from modelyard.domain.routing_table import Heartbeat, RoutingTable, Tidings
from modelyard.domain.tenants import ApiKey, Tenant
from modelyard.domain.usage import EVERYTHING, JournalRecord, Moment, UsageBucket, UsageFilter, UsageRow
from modelyard.domain.why import Ask, RequestStory, Told
from modelyard.stores.batches import BatchesFullError as BatchesFullError
from modelyard.stores.batches import BatchStore as BatchStore
from modelyard.stores.billing import BillingStore as BillingStore
from modelyard.stores.books import BookStore as BookStore
from modelyard.stores.books import EventSink as EventSink
from modelyard.stores.books import MeterRefusedError as MeterRefusedError
from modelyard.stores.books import Meters as Meters
from modelyard.stores.books import SinkError as SinkError
from modelyard.stores.events import Backlog as Backlog
from modelyard.stores.events import EventStore as EventStore
from modelyard.stores.events import Replayed as Replayed
from modelyard.stores.events import WebhookStore as WebhookStore
from modelyard.stores.files import ContentMissingError as ContentMissingError
from modelyard.stores.files import ContentWriter as ContentWriter
from modelyard.stores.files import FileContents as FileContents
from modelyard.stores.files import FileStore as FileStore
from modelyard.stores.files import Held as Held
from modelyard.stores.uploads import UploadStore as UploadStore


class StoreUnavailableError(Exception):
    """The store is locked or gone; nothing was changed. Becomes 503 ``storage_unavailable``."""


class SupersededError(StoreUnavailableError):
    """Another controller leads; nothing was changed, and nothing of this one's will be."""


class AlreadyExistsError(Exception):
    """A row with this id or name exists. Becomes 409."""


class TooManyGroupsError(ValueError):
    """More groups than an answer should have. Becomes 400."""


EventData = dict[str, str | int | float | bool | None]


class Event(msgspec.Struct, frozen=True):
    """Something that happened to an endpoint, with its reason; ``at`` is unix seconds."""

    at: float
    endpoint_id: str
    kind: str
    reason: str
    replica_id: str = ""
    data: EventData = {}
    """The numbers behind the reason, for ``modelyard why``."""


class Leader(msgspec.Struct, frozen=True):
    """The controller that may act. ``epoch`` grows with each change of leader, ``beat`` while one lives."""

    holder: str
    epoch: int
    beat: int


class LeaderStore(Protocol):
    """Which of several controllers leads. All methods raise ``StoreUnavailableError``."""

    async def leader(self) -> Leader | None:
        """Return the leader of now, None if there never was one."""
        ...

    async def lead(self, holder: str, *, after: int) -> bool:
        """Make ``holder`` the leader of epoch ``after + 1``, if ``after`` is still the epoch; say whether it is.

        From then on every write through this store is refused with ``SupersededError`` once another one leads.
        """
        ...

    async def beat(self, epoch: int) -> bool:
        """Show that the leader of ``epoch`` lives; say whether it still leads."""
        ...

    async def resign(self, epoch: int) -> None:
        """Let the next one lead at once."""
        ...


class ControlStore(Protocol):
    """What the controller remembers: tenants, keys, registry, endpoints, replicas, events.

    All methods raise ``StoreUnavailableError``.
    """

    async def ping(self) -> None:
        """Prove that the store can be written, now."""
        ...

    async def add_tenant(self, tenant: Tenant) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id or name."""
        ...

    async def put_tenant(self, tenant: Tenant) -> None:
        """Replace the tenant of this id."""
        ...

    async def tenants(self) -> list[Tenant]:
        """Return all, oldest first."""
        ...

    async def add_key(self, key: ApiKey) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id."""
        ...

    async def put_key(self, key: ApiKey) -> None:
        """Replace the key of this id."""
        ...

    async def keys(self, *, tenant_id: str | None = None) -> list[ApiKey]:
        """Return all of a tenant (or of all), oldest first, revoked ones too."""
        ...

    async def add_version(self, version: ModelVersion) -> None:
        """Add; raises ``AlreadyExistsError`` for a taken id or (tenant, name, version)."""
        ...

    async def remove_version(self, version_id: str) -> bool:
        """Forget a version; say False, and keep it, while an endpoint, a replica that lives or an adapter uses it.

        What is kept of its replicas that ended goes with it. What came after it comes after what it came after.
        """
        ...

    async def put_version(self, version: ModelVersion) -> None:
        """Replace the status, digest and sizes of the version of this id."""
        ...

    async def versions(self, *, tenant_id: str | None = None) -> list[ModelVersion]:
        """Return all of a tenant (or of all), oldest first."""
        ...

    async def add_deployment(self, version: ModelVersion, endpoint: Endpoint) -> None:
        """Add both in one transaction; raises ``AlreadyExistsError`` for a taken endpoint name of the tenant."""
        ...

    async def add_endpoint(self, endpoint: Endpoint) -> None:
        """Add one of known versions; raises ``AlreadyExistsError`` for a taken name, ``KeyError`` for no version."""
        ...

    async def add_release(self, version: ModelVersion, endpoint: Endpoint, *, events: Sequence[Event] = ()) -> None:
        """Add the version and replace the endpoint of this id, and append the events of that change.

        Raises ``AlreadyExistsError`` for a taken version.
        """
        ...

    async def put_endpoint(self, endpoint: Endpoint, *, events: Sequence[Event] = ()) -> None:
        """Replace the endpoint of this id, and append the events of that change."""
        ...

    async def put_outlook(
        self,
        endpoint_id: str,
        *,
        status: EndpointStatus,
        progress: Progress,
        failure: str,
        events: Sequence[Event] = (),
    ) -> None:
        """Replace what is told of the endpoint of this id, and nothing that was asked of it; append ``events``.

        A reconciler that read the endpoint before it was changed or deleted cannot undo that.
        """
        ...

    async def remove_endpoint(self, endpoint_id: str) -> None:
        """Forget an endpoint, its replicas and events; the ledger keeps its rows."""
        ...

    async def endpoints(self, *, tenant_id: str | None = None) -> list[Endpoint]:
        """Return all of a tenant (or of all), oldest first."""
        ...

    async def put_replica(self, replica: Replica) -> None:
        """Add or replace the replica of this id; the seats on one that is there stay as they are."""
        ...

    async def put_guests(self, replica_id: str, guests: tuple[GuestSeat, ...]) -> None:
        """Replace the seats on the replica of this id, and nothing else of it."""
        ...

    async def remove_replica(self, replica_id: str) -> None:
        """Forget a replica."""
        ...

    async def replicas(self, *, endpoint_id: str | None = None) -> list[Replica]:
        """Return all (of an endpoint), by id."""
        ...

    async def add_event(self, event: Event) -> None:
        """Append; only the last 200 of an endpoint are kept. Some are events of its tenant too."""
        ...

    async def events(self, endpoint_id: str, *, limit: int) -> list[Event]:
        """Return the newest ``limit``, oldest first."""
        ...

    async def observed_load_s(self, version_id: str) -> list[float]:
        """Return the last (at most 10) measured seconds from start to ready of this version."""
        ...

    async def observed_loads(self) -> Mapping[str, list[float]]:
        """Return the same of every version that was measured, by its id."""
        ...

    async def add_observed_load(self, version_id: str, seconds: float) -> None:
        """Remember one measured load time."""
        ...

    async def forecasts(self) -> dict[str, bytes]:
        """Return the stored forecast profile of each endpoint that has one, by its id."""
        ...

    async def put_forecasts(self, profiles: Mapping[str, bytes], *, at: float) -> None:
        """Add or replace profiles by endpoint id; those of endpoints that do not exist are dropped."""
        ...

    async def engine_fits(self) -> dict[str, bytes]:
        """Return what is stored of engines' speeds, by version."""
        ...

    async def put_engine_fits(self, fits: Mapping[str, bytes], *, at: float) -> None:
        """Add or replace by version; those of versions that do not exist are dropped. They go with their version."""
        ...

    async def close(self) -> None:
        """Give back connections and threads."""
        ...


class JournalPosition(msgspec.Struct, frozen=True):
    """How far a journal was read: ``offset`` bytes of ``segment`` of the gateway worker ``source``."""

    source: str
    segment: str
    offset: int


class SpentRow(msgspec.Struct, frozen=True):
    """What a key spent in a day and its month, as far as it came from the journal of ``source``."""

    tenant_id: str
    key_id: str
    source: str
    day_tokens: int
    month_tokens: int
    day_nanousd: int
    month_nanousd: int
    total_nanousd: int = 0
    """All that it ever cost; told only where it was asked for."""
    model: str = ""
    """Of this model alone, and then only ``month_nanousd`` is told; beside the row of all."""


class UsageStore(Protocol):
    """The ledger and its roll-ups: a projection of the journals, at least once and idempotent by request id."""

    async def apply(self, records: Sequence[JournalRecord], position: JournalPosition) -> None:
        """Store ``records`` and the new position in one transaction; records seen before change nothing.

        An ``Intent`` opens a request, ``Mark`` raises what it would be billed, the first ``Settle`` writes its
        ledger row and hourly roll-up and closes it for good.
        """
        ...

    async def positions(self) -> list[JournalPosition]:
        """Return how far each journal was read."""
        ...

    async def open_requests(self) -> int:
        """Return how many intents have no settle yet."""
        ...

    async def usage(  # noqa: PLR0913 - all that a question may say
        self,
        *,
        tenant_id: str | None,
        key_id: str | None,
        model: str | None,
        since: float,
        until: float,
        group_by: Sequence[str],
        where: UsageFilter = EVERYTHING,
        tz: str = "UTC",
        counts: Collection[str] | None = None,
    ) -> list[UsageBucket]:
        """Return sums over rows with ``since`` <= created_at < ``until`` (unix seconds, filters ANDed).

        ``group_by`` has any of ``tenant``, ``key``, ``model``, ``endpoint``, ``version``, ``route``, ``status``,
        ``batch`` (``true``, ``false``), ``minute``, ``hour`` (``2026-11-29T14:00:00Z``, UTC's), ``day`` and ``month``
        (``2026-11-29``, ``2026-11``, those of ``tz``, an IANA time zone); ordered by the groups; one total bucket when
        empty. Minutes are of rows that are kept. Where rows are not kept any more, ``since``, ``until`` and the starts
        of days that are no whole hours move down to the start of theirs. ``counts`` names what is wanted of a sum
        (``requests``, ``prompt_tokens`` and so on; ``units_micro`` for units), where that is not all; the rest is 0.

        Raises:
            TooManyGroupsError: the answer would have hundreds of thousands of groups.
        """
        ...

    async def arrivals(self, endpoint_id: str, *, since: float, until: float) -> dict[int, int]:
        """Return how many requests of an endpoint came in each ten minutes, by their start in unix seconds.

        Rows with ``since`` <= created_at < ``until``; ten minutes without a request are left out, and lines of batches.
        """
        ...

    async def spent(
        self, tenant_ids: Collection[str], *, day: int, totals_of: Collection[str] = (), models_of: Collection[str] = ()
    ) -> tuple[list[SpentRow], list[JournalPosition]]:
        """Return what each key of these tenants has in the ledger for ``day`` (since 1970) and for its whole month.

        Rows of ``totals_of``, which are some of these tenants, also tell what it ever cost; of ``models_of`` there are
        more rows, one for each model.
        The sums are exact, by the arrival of requests, and hold at least all that the returned positions cover.
        """
        ...

    async def rows(
        self, *, tenant_id: str | None, since: float, limit: int, request_id: str | None = None, endpoint_id: str = ""
    ) -> list[UsageRow]:
        """Return ledger rows, newest first; those of an endpoint are only looked for among the newest 20,000."""
        ...

    async def rows_between(
        self, where: UsageFilter, *, since: float, until: float, after: Moment | None, limit: int
    ) -> list[UsageRow]:
        """Return ledger rows with ``since`` <= created_at < ``until``, oldest first, those after a moment."""
        ...

    async def kept_since(self) -> int:
        """Return the hour (unix seconds) from which on all rows are there; 0 if none was ever removed."""
        ...

    async def oldest_row(self) -> float | None:
        """Return when the oldest row arrived that is there."""
        ...

    async def forget_rows(self, *, before: int, limit: int) -> int:
        """Remove at most ``limit`` rows that arrived before that hour, oldest first; return how many.

        Roll-ups keep what they have. From then on records of requests that arrived before are not applied: they were,
        and their rows may be gone.
        """
        ...


class RequestStore(Protocol):
    """Requests whose answer is kept. All methods raise ``StoreUnavailableError``."""

    async def claim(self, request: KeptRequest) -> KeptRequest | None:
        """Add ``request``, or return the one that has its tenant, key and idempotency key, unless it has expired."""
        ...

    async def begin(self, request_ids: Collection[str]) -> None:
        """Note that engines have these; what is over stays so."""
        ...

    async def finish(self, finish: Finish, *, now: float) -> bool:
        """End a request that is not over; say whether it was.

        One that is released loses its idempotency key, and is forgotten if it was not detached; one that is dropped is
        forgotten in any case. The end of a detached one is an event, also to the URL that came with it.
        """
        ...

    async def request(self, request_id: str, *, tenant_id: str | None) -> KeptRequest | None:
        """Return the request of this id (of this tenant) with its answer."""
        ...

    async def detached(self, *, tenant_id: str | None, limit: int, after: KeptRequest | None) -> list[KeptRequest]:
        """Return detached requests (of this tenant) older than ``after``, newest first, without their answers."""
        ...

    async def open_requests(self) -> list[KeptRequest]:
        """Return what is queued or running, of all tenants, without answers."""
        ...

    async def cancelled(self, instance: str, *, since: float) -> list[str]:
        """Return the requests of a gateway process that were cancelled since then."""
        ...

    async def held(self, tenant_id: str) -> tuple[int, int]:
        """Return how many requests and bytes of answers are kept of a tenant."""
        ...

    async def forget(self, *, before: float) -> int:
        """Delete what expired before then and is over; return how many."""
        ...

    async def forget_request(self, request_id: str) -> None:
        """Delete one."""
        ...


class TableFeed(Protocol):
    """The controller's end of the feed: pushes tables to every gateway, receives their reports."""

    async def publish(self, table: RoutingTable) -> None:
        """Push a new table to all gateways, and to each that connects later."""
        ...

    def beat(self, heartbeat: Heartbeat) -> None:
        """Push a heartbeat."""
        ...

    def tell(self, tidings: Tidings) -> None:
        """Push tidings to all gateways, and to each that connects later, ahead of a table that waits."""
        ...

    def lease(self, gateway_id: str, leases: Leases) -> None:
        """Push leases to one gateway; nothing happens when it is not connected."""
        ...

    async def ask(self, request_id: str, *, timeout_s: float) -> RequestStory | None:
        """Return what the first gateway that remembers a request tells of it; None: none does, or not in time."""
        ...

    def reports(self) -> dict[str, Report]:
        """Return the last report of each connected gateway by its id."""
        ...

    def on_report(self, listener: Callable[[str, Report], None]) -> None:
        """Call ``listener(gateway_id, report)`` at every report, and with an empty report when a gateway leaves."""
        ...


class TableFollower(Protocol):
    """A gateway's end of the feed. It reconnects for ever, with a growing pause up to a second."""

    def updates(self) -> AsyncIterator[RoutingTable | Heartbeat | Tidings | Leases | Ask | None]:
        """Yield what arrives; None when the connection was lost."""
        ...

    def send(self, report: Report | Told) -> None:
        """Send at once if connected, else drop it (the next report has the whole state)."""
        ...

    async def close(self) -> None:
        """Disconnect and stop."""
        ...
