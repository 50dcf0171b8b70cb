"""What changes too often for the routing table, told to every gateway about twice a second.

Sums of the ledger for keys and tenants with a quota, each with how far the
gateways' journals were delivered when it was taken; what replicas' own metrics
pages said, and how fast engines were seen to be; which requests one of the
gateways refuses because they take engines down. A gateway counts on by itself between two of them and while
none come, so a store that is away costs precision and never admission.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from modelyard.clock import Clock
from modelyard.control.terms import TermsDesk
from modelyard.domain.routing_table import EngineSpeed, ReplicaSnapshot, Spent, Tidings
from modelyard.domain.tenants import ApiKey, Limits, Tenant, model_subject
from modelyard.policy.utc import day_name, day_of, month_name
from modelyard.stores import ControlStore, JournalPosition, SpentRow, StoreUnavailableError, TableFeed, UsageStore

INTERVAL_S = 0.5
LOOK_S = 10.0
"""Pause between two looks at all keys and tenants for quotas; a change made here is known at once (``refresh``)."""

_log = logging.getLogger(__name__)


def no_speeds() -> Sequence[EngineSpeed]:
    """Return what is known of engines' speeds where nobody learns them."""
    return ()


def no_snapshots() -> Sequence[ReplicaSnapshot]:
    """Return what is known of replicas where nobody looks at them."""
    return ()


class TidingsPublisher:
    """Gathers tidings and pushes them to ``feed``.

    ``snapshots`` says what is known of replicas now, ``speeds`` of their engines.
    """

    def __init__(
        self,
        *,
        store: ControlStore,
        usage: UsageStore,
        feed: TableFeed,
        clock: Clock,
        snapshots: Callable[[], Sequence[ReplicaSnapshot]] = no_snapshots,
        speeds: Callable[[], Sequence[EngineSpeed]] = no_speeds,
        terms: TermsDesk | None = None,
    ) -> None:
        self._store = store
        self._usage = usage
        self._feed = feed
        self._clock = clock
        self._snapshots = snapshots
        self._speeds = speeds
        self._speeds_told_s = float("-inf")
        self._terms = terms
        self._day = 0
        self._tenants: list[Tenant] = []
        self._keys: list[ApiKey] = []
        self._looked_s = float("-inf")
        self._last: Tidings | None = None
        self._is_away = False
        # A sum that was taken earlier must not be told later.
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<TidingsPublisher: {len(self._last.spent) if self._last else 0} sums>"

    async def run(self) -> None:
        """Publish until cancelled; while the store is away, tell of replicas alone."""
        while True:
            try:
                await self.publish()
            except StoreUnavailableError as error:
                if not self._is_away:
                    _log.warning("what is spent of quotas cannot be read: %s", error)
                self._is_away = True
                if snapshots := tuple(self._snapshots()):
                    self._feed.tell(Tidings(snapshots))
            else:
                self._is_away = False
            await asyncio.sleep(INTERVAL_S)

    async def refresh(self) -> None:
        """Push what is so now, with the keys and tenants that are stored now.

        Raises:
            StoreUnavailableError: nothing was pushed.
        """
        self._looked_s = float("-inf")
        await self.publish()

    async def publish(self) -> None:
        """Push what is so now, if it is not what was pushed last.

        Raises:
            StoreUnavailableError: nothing was pushed.
        """
        async with self._turn:
            spent, delivered = await self._spent()
            tidings = Tidings(tuple(self._snapshots()), spent, delivered, self._refused(), self._new_speeds())
            last = self._last
            # Replicas that nobody looked at since are no news; the gateways keep what they were told.
            if tidings.snapshots or tidings.speeds or last is None or _lasting(tidings) != _lasting(last):
                self._last = tidings
                self._feed.tell(tidings)

    def _new_speeds(self) -> tuple[EngineSpeed, ...]:
        """Return engines' speeds when it is time to tell them: they change slowly, and a new gateway can wait."""
        now_s = self._clock.monotonic_s()
        if now_s - self._speeds_told_s < LOOK_S:
            return ()
        self._speeds_told_s = now_s
        return tuple(self._speeds())

    def _refused(self) -> tuple[tuple[int, float], ...]:
        """Return what any gateway refuses because it takes engines down."""
        found: dict[int, float] = {}
        for report in self._feed.reports().values():
            for print_, until_s in report.refused:
                found[print_] = max(until_s, found.get(print_, 0.0))
        return tuple(sorted(found.items()))

    async def _spent(self) -> tuple[tuple[Spent, ...], dict[str, tuple[str, int]]]:
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= LOOK_S:
            tenants, keys = await self._store.tenants(), await self._store.keys()
            keys = [key for key in keys if key.revoked_at is None]
            if self._terms is not None:
                tenants, keys = await self._terms.tenants(tenants), await self._terms.keys(keys)
            self._tenants, self._keys, self._looked_s = tenants, keys, now_s
        by_model = {tenant.id for tenant in self._tenants if tenant.limits.model_budgets}
        by_model |= {key.tenant_id for key in self._keys if key.limits.model_budgets}
        owners = by_model | {tenant.id for tenant in self._tenants if tenant.limits.has_quota}
        owners |= {key.tenant_id for key in self._keys if key.limits.has_quota}
        if not owners:
            return (), {}
        # A wall clock that goes back must not bring back a day whose quota is spent. It may have been seen ahead by a
        # gateway alone, which takes no sums of a day before its own: the quota of a new key would stay unknown.
        seen = (report.day for report in self._feed.reports().values())
        self._day = max(self._day, day_of(self._clock.unix_s()), *seen)
        ahead = {tenant.id for tenant in self._tenants if tenant.limits.nanousd_total is not None}
        rows, positions = await self._usage.spent(owners, day=self._day, totals_of=ahead, models_of=by_model)
        return spent_of(self._tenants, self._keys, rows, day=self._day), _by_source(positions)


def _lasting(tidings: Tidings) -> tuple[object, ...]:
    return tidings.spent, tidings.delivered, tidings.refused


def spent_of(
    tenants: Iterable[Tenant], keys: Iterable[ApiKey], rows: Iterable[SpentRow], *, day: int
) -> tuple[Spent, ...]:
    """Return the sums of everyone who has a quota, by source; a row of zeros for who spent nothing yet.

    Of who pays in advance they also tell what was ever spent.
    """
    bounds: dict[str, Limits] = {tenant.id: tenant.limits for tenant in tenants} | {key.id: key.limits for key in keys}
    wanted = {subject for subject, limits in bounds.items() if limits.has_quota}
    ahead = {subject for subject in wanted if bounds[subject].nanousd_total is not None}
    wanted |= {model_subject(owner, model) for owner, limits in bounds.items() for model in limits.model_budgets}
    sums: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        owners = row.tenant_id, row.key_id
        for subject in (model_subject(owner, row.model) for owner in owners) if row.model else owners:
            if subject in wanted:
                amounts = sums.setdefault((subject, row.source), [0] * 5)
                spent = (row.day_tokens, row.month_tokens, row.day_nanousd, row.month_nanousd, row.total_nanousd)
                amounts[:] = [have + more for have, more in zip(amounts, spent, strict=True)]
    for subject in wanted - {subject for subject, _ in sums}:
        sums[subject, ""] = [0] * 5
    named = day_name(day), month_name(day)
    return tuple(
        Spent(subject, *named, day_tokens, month_tokens, of_day, of_month, source, ever if subject in ahead else None)
        for (subject, source), (day_tokens, month_tokens, of_day, of_month, ever) in sorted(sums.items())
    )


def _by_source(positions: Iterable[JournalPosition]) -> dict[str, tuple[str, int]]:
    return {position.source: (position.segment, position.offset) for position in positions}
