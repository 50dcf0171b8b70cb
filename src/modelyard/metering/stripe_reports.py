"""Usage to Stripe: a projection of the ledger with a cursor of its own.

What a tenant used in an hour becomes one meter event, once the hour is over.
The event is written down with its value and its identifier before it is sent,
and neither ever changes, so a retry is a repetition. What settles later
becomes a further part of the same hour.

Stripe forgets identifiers after a day (``reference/faults.md`` 1.1). So an event whose
first try is about a day ago, and of which nobody knows whether it arrived, is
not sent again: Stripe's own summary of that hour is read first, and only one
of two answers lets it go on. Events of more than 35 days ago are not taken:
those need a person, and say so.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from modelyard.clock import Clock
from modelyard.config.books import Quantity, StripeConfig
from modelyard.domain.books import LedgerSum, MeterEvent, MeterStatus
from modelyard.domain.tenants import PLATFORM, Tenant
from modelyard.metering.events import SinkStatus
from modelyard.stores import BookStore, MeterRefusedError, Meters, SinkError, StoreUnavailableError

SINK = "stripe"
HOUR_S = 3600
DAY_S = 86_400
HOURS_END = 2**40
"""Behind every hour."""
TAKEN_S = 35 * DAY_S - HOUR_S
"""Oldest hour that is reported: Stripe takes 35 days, and we leave an hour for clocks and for the way."""
DEDUP_S = 23 * HOUR_S
"""How long a repetition is certainly known for one: Stripe says at least 24 hours."""
SWEEP_S = HOUR_S
"""Pause between two looks at all hours, for what settled late."""
SWEEP_DAYS = 40
TOGETHER = 100
"""Events that are read, and whose tries are written down, together."""
FAILURES_MAX = 3
"""Answers of failure after which Stripe is left alone until the next report; fewer are one event's own trouble, which
must not hold up everybody else's."""
PAUSE_MAX_S = 3600.0
DEFAULT_METERS: Mapping[str, Quantity] = {"modelyard_cost": "cost_nanousd"}

_log = logging.getLogger(__name__)
_Key = tuple[str, str, int]
"""Tenant, meter, hour."""


class StripeReports:
    """Reports what the ledger has; ``tenants`` returns all of them, ``spared`` those that Stripe does not bill.

    What a tenant uses while it is spared is written down as that, so that it is not billed later either.
    """

    def __init__(
        self,
        *,
        books: BookStore,
        meters: Meters,
        settings: StripeConfig,
        clock: Clock,
        tenants: Callable[[], Awaitable[Sequence[Tenant]]],
        spared: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        self._books = books
        self._meters = meters
        self._settings = settings
        self._counted: Mapping[str, Quantity] = settings.meters or DEFAULT_METERS
        self._clock = clock
        self._tenants = tenants
        self._spared = spared
        self._swept_s: float | None = None
        self._turn = asyncio.Lock()
        """Two that note at once would both write down the same part."""
        self._attempts: dict[str, int] = {}
        self._sent = 0
        self._pending = 0
        self._stuck = 0
        self._refusal = ""
        self._behind_since: float | None = None

    def __repr__(self) -> str:
        return f"<StripeReports: {self._sent} sent, {self._pending} to go, {self._stuck} stuck>"

    @property
    def meters(self) -> Meters:
        """Return Stripe."""
        return self._meters

    @property
    def counted(self) -> Mapping[str, Quantity]:
        """Return what each meter counts."""
        return self._counted

    def status(self) -> SinkStatus:
        """Return how it stands."""
        return SinkStatus(
            sink=SINK, sent=self._sent, pending=self._pending, behind_since=self._behind_since, alarm=self._alarm()
        )

    async def note_by_hand(self, identifiers: Collection[str]) -> list[str]:
        """Note that these events, which raise an alarm, were billed by hand; return those that do not.

        Raises:
            StoreUnavailableError: nothing was noted.
        """
        stuck = await self._books.meter_events(since=0, until=HOURS_END, status=MeterStatus.ALARM)
        found = {event.identifier: event for event in stuck if event.identifier in identifiers}
        unknown = [one for one in identifiers if one not in found]
        if not unknown:
            replace = msgspec.structs.replace
            await self._books.put_meter_events([replace(one, status=MeterStatus.BY_HAND) for one in found.values()])
            self._stuck = len(stuck) - len(found)
        return unknown

    async def run(self) -> None:
        """Report for ever; while Stripe or the store is away, pause longer and go on."""
        pause_s = self._settings.interval_s
        try:
            while True:
                try:
                    await self.report()
                except (StoreUnavailableError, SinkError) as error:
                    pause_s = max(self._settings.interval_s, min(pause_s * 2, PAUSE_MAX_S))
                    _log.warning("usage is not reported to Stripe now: %s; %d events wait", error, self._pending)
                else:
                    pause_s = self._settings.interval_s
                await asyncio.sleep(pause_s)
        finally:
            await self._meters.close()

    async def report(self) -> None:
        """Write down what is new, and send what waits.

        Raises:
            SinkError: Stripe cannot take it now; the rest waits.
            StoreUnavailableError: the books cannot be read or written.
        """
        begun = await self._noted()
        try:
            await self._send(begun)
        except SinkError:
            self._behind_since = self._behind_since or self._clock.unix_s()
            raise
        finally:
            await self._count(begun)
        self._behind_since = None

    async def catch_up(self) -> None:
        """Write down all that is new in hours that are over, what settled late too; nothing is sent.

        Raises:
            StoreUnavailableError: the books cannot be read or written.
        """
        self._swept_s = None
        await self._noted()

    # --- from the ledger to events --------------------------------------------------

    async def _noted(self) -> int:
        async with self._turn:
            return await self._note()

    async def _note(self) -> int:
        """Write down events of hours that are over; return the first hour that is Stripe's business."""
        now_s = self._clock.unix_s()
        cursors = await self._books.cursors(SINK)
        if "begun" not in cursors:
            # Not what was used before anybody thought of Stripe.
            hour = int(now_s // HOUR_S * HOUR_S)
            await self._books.put_cursor(SINK, "begun", "", hour)
            await self._books.put_cursor(SINK, "ledger", "", hour)
            return hour
        # A controller may have been killed between the two writes above.
        begun, done = cursors["begun"][1], cursors.get("ledger", cursors["begun"])[1]
        closed = int((now_s - self._settings.settle_s) // HOUR_S * HOUR_S)
        since = done
        is_sweep = self._swept_s is None or self._clock.monotonic_s() - self._swept_s >= SWEEP_S
        if is_sweep:
            since = max(begun, min(done, closed - SWEEP_DAYS * DAY_S))
        spared = await self._spared() if self._spared is not None else ()
        for start in range(since, closed, DAY_S):
            await self._note_span(start, min(start + DAY_S, closed), spared)
        if closed > done:
            await self._books.put_cursor(SINK, "ledger", "", closed)
        if is_sweep:
            self._swept_s = self._clock.monotonic_s()
        return begun

    async def _note_span(self, since: int, until: int, spared: Collection[str]) -> None:
        now_s = self._clock.unix_s()
        sums = await self._books.hourly(since=since, until=until)
        told, parts, waiting = _told(await self._books.meter_events(since=since, until=until))
        new: list[MeterEvent] = []
        for (tenant_id, hour), total in sums.items():
            if tenant_id == PLATFORM:
                continue
            for meter, quantity in self._counted.items():
                key = (tenant_id, meter, hour)
                value = quantity_of(total, quantity) - told.get(key, 0)
                if value < 0:
                    _log.error("Stripe was told %d more than the ledger has of %s at %d", -value, tenant_id, hour)
                # While nobody knows whether the last part arrived, a further one would make that unknowable.
                elif value and key not in waiting:
                    event = MeterEvent(tenant_id, meter, hour, parts.get(key, -1) + 1, value, now_s)
                    if tenant_id in spared:
                        event = msgspec.structs.replace(event, status=MeterStatus.SPARED)
                    elif now_s - hour > TAKEN_S:
                        event = _expired(event)
                    new.append(event)
        await self._books.add_meter_events(new)

    # --- from events to Stripe ------------------------------------------------------

    async def _send(self, begun: int) -> None:
        until = int(self._clock.unix_s()) + HOUR_S
        self._refusal = ""
        customers = await self._books.customers()
        failures: list[SinkError] = []
        after: MeterEvent | None = None
        while True:
            events = await self._books.meter_events(
                since=begun, until=until, status=MeterStatus.PENDING, after=after, limit=TOGETHER
            )
            if not events:
                break
            after = events[-1]
            await self._find_customers({event.tenant_id for event in events}, customers, failures)
            await self._send_together([one for one in events if one.tenant_id in customers], customers, failures)
        if failures:
            raise failures[0]

    async def _find_customers(
        self, tenant_ids: Collection[str], customers: dict[str, str], failures: list[SinkError]
    ) -> None:
        """Add to ``customers`` those of ``tenant_ids`` that are not there."""
        missing = sorted(set(tenant_ids) - customers.keys())
        names = {tenant.id: tenant.name for tenant in await self._tenants()} if missing else {}
        for tenant_id in missing:
            try:
                customer_id = await self._meters.ensure_customer(tenant_id, names.get(tenant_id, tenant_id))
            except MeterRefusedError as refusal:
                self._refusal = str(refusal)
            except SinkError as error:
                _note_failure(error, failures)
            else:
                await self._books.put_customer(tenant_id, customer_id)
                customers[tenant_id] = customer_id

    async def _send_together(
        self, events: Sequence[MeterEvent], customers: Mapping[str, str], failures: list[SinkError]
    ) -> None:
        """Write down that these are tried, try them, write down what came of it."""
        now_s = self._clock.unix_s()
        ready: list[tuple[MeterEvent, bool]] = []
        for event in events:
            checked = await self._checked(event, customers[event.tenant_id], now_s)
            if checked.status is MeterStatus.PENDING and not _is_in_doubt(checked, now_s):
                is_first = checked.tried_at is None
                if is_first:
                    checked = msgspec.structs.replace(checked, tried_at=now_s)
                ready.append((checked, is_first))
            await self._books.put_meter_events([checked])
        done: list[MeterEvent] = []
        try:
            for event, is_first in ready:
                try:
                    done.append(await self._try(event, customers[event.tenant_id], is_first=is_first))
                except SinkError as error:
                    _note_failure(error, failures)
        finally:
            await self._books.put_meter_events(done)

    async def _checked(self, event: MeterEvent, customer_id: str, now_s: float) -> MeterEvent:
        """Return the event as it may be sent now, or why not."""
        if _is_in_doubt(event, now_s):
            event = await self._looked_up(event, customer_id, now_s)
        if event.status is MeterStatus.PENDING and now_s - event.hour > TAKEN_S:
            return _expired(event)
        return event

    async def _looked_up(self, event: MeterEvent, customer_id: str, now_s: float) -> MeterEvent:
        """Ask Stripe's summaries whether an event arrived whose identifier may be forgotten."""
        until = event.hour + HOUR_S
        try:
            has = await self._meters.total(event.meter, customer_id, since=event.hour, until=until)
        except MeterRefusedError as refusal:
            self._refusal = str(refusal)
            return msgspec.structs.replace(event, reason=str(refusal))
        others = await self._books.meter_events(since=event.hour, until=until, status=MeterStatus.EXPORTED)
        before = sum(one.value for one in others if (one.tenant_id, one.meter) == (event.tenant_id, event.meter))
        replace = msgspec.structs.replace
        if has == before + event.value:
            return replace(event, status=MeterStatus.EXPORTED, exported_at=now_s, reason="found in Stripe's summary")
        if has == before:
            return replace(event, tried_at=None, reason="")
        reason = f"Stripe has {has} of this hour; {before} or {before + event.value} was expected"
        _log.error("%s: %s", event.identifier, reason)
        return replace(event, status=MeterStatus.ALARM, reason=reason)

    async def _try(self, event: MeterEvent, customer_id: str, *, is_first: bool) -> MeterEvent:
        attempt = self._attempts.get(event.identifier, 0)
        try:
            await self._meters.report(event, customer_id, timestamp=event.hour, attempt=attempt)
        except MeterRefusedError as refusal:
            # It has not arrived: once its reason is mended, it may go as if it were new. Of an earlier try whose answer
            # was lost the refusal says nothing, and its identifier may be forgotten by then.
            self._refusal = str(refusal)
            self._attempts[event.identifier] = attempt + 1
            return msgspec.structs.replace(event, tried_at=None if is_first else event.tried_at, reason=str(refusal))
        except SinkError as error:
            if error.is_answered:
                self._attempts[event.identifier] = attempt + 1
            raise
        self._attempts.pop(event.identifier, None)
        self._sent += 1
        exported_at = self._clock.unix_s()
        return msgspec.structs.replace(event, status=MeterStatus.EXPORTED, exported_at=exported_at, reason="")

    async def _count(self, begun: int) -> None:
        counts = await self._books.meter_counts(since=begun)
        self._pending, self._stuck = counts.get(MeterStatus.PENDING, 0), counts.get(MeterStatus.ALARM, 0)

    def _alarm(self) -> str:
        if self._stuck:
            return (
                f"{self._stuck} hours of usage cannot be reported to Stripe by themselves any more. "
                "'modelyard reconcile --since 400d' names them; bill them by hand."
            )
        if self._refusal:
            return f"Stripe refuses usage: {self._refusal}"
        if self._behind_since is not None and self._clock.unix_s() - self._behind_since > HOUR_S:
            return f"Stripe takes nothing; {self._pending} events wait. It takes hours of the last 35 days only."
        return ""


def _note_failure(error: SinkError, failures: list[SinkError]) -> None:
    """Remember a failure.

    Raises:
        SinkError: nobody answers, or too often with a failure.
    """
    failures.append(error)
    if not error.is_answered or len(failures) >= FAILURES_MAX:
        raise error


def _is_in_doubt(event: MeterEvent, now_s: float) -> bool:
    """Say whether an event may have arrived, and Stripe may have forgotten its identifier."""
    return event.tried_at is not None and now_s - event.tried_at > DEDUP_S


def quantity_of(total: LedgerSum, quantity: Quantity) -> int:
    """Return what a meter counts of a sum."""
    value: int = getattr(total, quantity)
    return value


def _told(events: Iterable[MeterEvent]) -> tuple[dict[_Key, int], dict[_Key, int], set[_Key]]:
    """Return what was written down, the last part, and what waits, by tenant, meter and hour."""
    told: dict[_Key, int] = {}
    parts: dict[_Key, int] = {}
    waiting: set[_Key] = set()
    for event in events:
        key = (event.tenant_id, event.meter, event.hour)
        told[key] = told.get(key, 0) + event.value
        parts[key] = max(parts.get(key, -1), event.part)
        if event.status is MeterStatus.PENDING:
            waiting.add(key)
    return told, parts, waiting


def _expired(event: MeterEvent) -> MeterEvent:
    reason = "it is older than the 35 days that Stripe takes"
    if event.tried_at is not None:
        reason += ", and may have arrived"
    _log.error("%s: %s; bill it by hand", event.identifier, reason)
    return msgspec.structs.replace(event, status=MeterStatus.ALARM, reason=reason)
