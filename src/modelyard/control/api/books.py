"""The books: whether they balance, how sinks stand, what accelerators cost. For admins: it is of all tenants."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from modelyard.control.context import Context
from modelyard.control.replica_book import OVER
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.tenants import Scope
from modelyard.domain.usage import NANO_PER_USD
from modelyard.errors import conflict, invalid_value
from modelyard.metering.events import SinkStatus
from modelyard.metering.prices import usd
from modelyard.metering.reconcile import Check, Difference, Findings
from modelyard.metering.reconcile.invoices import InvoiceLine, ledger_and_invoice
from modelyard.metering.reconcile.journals import journals_and_ledger, rows_and_roll_ups
from modelyard.metering.reconcile.replicas import ledger_and_engines
from modelyard.metering.reconcile.stripe import ledger_and_stripe
from modelyard.metering.stripe_reports import StripeReports
from modelyard.policy import gpu_costs
from modelyard.policy.free_accelerators import FreeAccelerators, free_accelerators
from modelyard.stores import BookStore
from modelyard.web.routes import AnyRoute, Call, Empty, Route
from modelyard.web.streams import event_stream

DAY_S = 86_400
HOUR_S = 3600
WEEK_S = 7 * DAY_S
SPAN_MAX_S = 400 * DAY_S
LINES_MAX = 100_000

_Unix = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799, description="Unix seconds.")]
_Tolerance = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From when to when; by default the last day, or week."""

    since: _Unix | None = None
    until: _Unix | None = None


class ReconcileQuery(Span, frozen=True, forbid_unknown_fields=True):
    """Which time."""

    tolerance: _Tolerance = 0.02
    """How much more an engine may have done than was billed, as a share."""


class ReconcileBody(ReconcileQuery, frozen=True, forbid_unknown_fields=True):
    """Which time, and a provider's invoice."""

    invoice: Annotated[list[InvoiceLine], msgspec.Meta(max_length=LINES_MAX)] = []


class BilledByHand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events for Stripe that raised an alarm and were billed otherwise."""

    identifiers: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1000)]
    """As a reconciliation names them."""


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared and found. ``balances``: nothing differs, and everything could be compared."""

    object: str = "reconciliation"
    since: int
    until: int
    currency: str
    """What amounts are in, those that are called ``…nanousd`` too."""
    balances: bool
    checks: list[Check]


class Sinks(msgspec.Struct, frozen=True, kw_only=True):
    """How every sink of usage stands."""

    object: str = "list"
    data: list[SinkStatus]
    has_more: bool = False


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What accelerators cost, whose cost that is, and what is wasted; nano-dollars are exact, ``…_usd`` the same."""

    object: str = "gpu_costs"
    since: int
    until: int
    currency: str
    """What amounts are in, those that are called ``…_usd`` too."""
    cost_usd: str
    revenue_usd: str
    margin_usd: str
    waste_usd: str
    accelerator_hours: float
    utilisation: float
    """Share of ready time with a request."""
    endpoints: list[gpu_costs.EndpointCost]
    customers: list[gpu_costs.CustomerCost]
    waste: list[gpu_costs.Waste]
    free: list[FreeAccelerators]
    """What has no replica now, and is in no sum above."""


_ToCheck = tuple[str, Callable[[], Coroutine[Any, Any, Check]]]


class Books:
    """The routes of the books."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        path, admin = "/v1/reconciliation", Scope.ADMIN
        example = {"since": 1_793_491_200, "until": 1_796_083_200, "tolerance": 0.01}
        return [
            Route("GET", path, admin, "Whether the books balance", self.get, Empty, ReconcileQuery, Reconciliation),
            Route(
                "POST",
                path,
                admin,
                "The same as events",
                self.stream,
                ReconcileBody,
                Empty,
                Reconciliation,
                200,
                example,
            ),
            Route("GET", "/v1/exports", admin, "Sinks of usage", self.sinks, Empty, Empty, Sinks),
            Route(
                "POST",
                "/v1/exports/stripe/billed-by-hand",
                admin,
                "Note what was billed by hand",
                self.by_hand,
                BilledByHand,
                Empty,
                Sinks,
                200,
                {"identifiers": ["modelyard-ten-3f-modelyard_cost-1793491200-0"]},
            ),
            Route("GET", "/v1/organization/gpu-costs", admin, "Cost of GPUs", self.costs, Empty, Span, CostReport),
        ]

    async def get(self, call: Call[Empty, ReconcileQuery]) -> Reconciliation:
        """Compare all but an invoice."""
        query = call.query
        asked = ReconcileBody(query.since, query.until, query.tolerance)
        since, until = self._span(asked, DAY_S)
        return self._reconciled(since, until, [await check() for _, check in await self._checks(asked, since, until)])

    async def stream(self, call: Call[ReconcileBody, Empty]) -> Response:
        """Compare all; an event before and behind each comparison, and the whole at the end."""
        since, until = self._span(call.body, DAY_S)
        return event_stream(self._events(await self._checks(call.body, since, until), since, until))

    async def sinks(self, call: Call[Empty, Empty]) -> Sinks:
        """Return how sinks stand."""
        return Sinks(data=self._context.books.statuses())

    async def by_hand(self, call: Call[BilledByHand, Empty]) -> Sinks:
        """Note that these were billed by hand: they raise no alarm any more; return how sinks stand."""
        if (stripe := self._context.books.stripe) is None:
            raise conflict("Stripe is not enabled here ('stripe.enabled').")
        if unknown := await stripe.note_by_hand(set(call.body.identifiers)):
            raise invalid_value("identifiers", f"no event that needs somebody is called '{unknown[0][:100]}'")
        return Sinks(data=self._context.books.statuses())

    async def costs(self, call: Call[Empty, Span]) -> CostReport:
        """Return what accelerators cost in whole hours."""
        since, until = self._span(call.query, WEEK_S)
        start, end = int(since // HOUR_S * HOUR_S), int(-(-until // HOUR_S) * HOUR_S)
        books = self._context.books.store
        hours = await books.replica_sums(since=start, until=end)
        uses = await books.endpoint_use(since=start, until=end)
        setups = {one.id: _setup(one) for one in await self._context.store.endpoints() if not one.is_deleted}
        now_s = self._context.clock.unix_s()
        names = {one.id: one.name for one in await self._context.store.tenants()}
        report = await asyncio.to_thread(gpu_costs.report, hours, uses, setups, now_s=now_s)
        cost = sum(one.cost_nanousd for one in report.endpoints)
        revenue = sum(one.revenue_nanousd for one in report.endpoints)
        ready_s = sum(hour.ready_s for hour in hours)
        return CostReport(
            since=start,
            until=end,
            currency=self._context.config.billing.currency,
            cost_usd=usd(cost),
            revenue_usd=usd(revenue),
            margin_usd=usd(revenue - cost),
            waste_usd=usd(sum(one.nanousd for one in report.waste)),
            accelerator_hours=sum(one.accelerator_hours for one in report.endpoints),
            utilisation=sum(hour.busy_s for hour in hours) / ready_s if ready_s else 0.0,
            endpoints=report.endpoints,
            customers=[
                msgspec.structs.replace(one, tenant_name=names.get(one.tenant_id, "")) for one in report.customers
            ],
            waste=report.waste,
            free=await self._free(),
        )

    async def _free(self) -> list[FreeAccelerators]:
        nodes = [seen.node for seen in self._context.nodes().values()]
        living = [one for one in await self._context.store.replicas() if one.state not in OVER]
        usd_prices = self._context.config.fleet.accelerator_prices
        prices = {kind: round(price * NANO_PER_USD) for kind, price in usd_prices.items()}
        return free_accelerators(nodes, [one.placement for one in living], prices)

    def _span(self, asked: Span, default_s: float) -> tuple[float, float]:
        until = self._context.clock.unix_s() if asked.until is None else asked.until
        since = max(0.0, until - default_s) if asked.since is None else asked.since
        if since > until:
            raise invalid_value("since", "it is after 'until'")
        if until - since > SPAN_MAX_S:
            raise invalid_value("since", "the time is longer than 400 days")
        return since, until

    async def _checks(self, asked: ReconcileBody, since: float, until: float) -> list[_ToCheck]:
        context, books = self._context, self._context.books.store
        kept = await context.usage.kept_since()
        start, end = int(since // HOUR_S * HOUR_S), int(until // HOUR_S * HOUR_S)
        found: list[_ToCheck] = [
            ("journal and ledger", lambda: journals_and_ledger(context.data.journal, books, kept_since=kept)),
            ("rows and roll-ups", lambda: rows_and_roll_ups(books, since=start, until=end, kept_since=kept)),
            ("ledger and engines", lambda: self._engines_check(since, until, asked.tolerance)),
        ]
        if context.books.statuses():
            found.append(("sinks of usage", self._sinks_check))
        if (stripe := context.books.stripe) is not None:
            found.append(("ledger and Stripe", lambda: _stripe_check(stripe, books, start, end)))
        if asked.invoice:
            names = await self._provider_names()
            compare = ledger_and_invoice
            found.append(
                (
                    "ledger and the provider's invoice",
                    lambda: compare(books, asked.invoice, names, since=since, until=until, tolerance=asked.tolerance),
                )
            )
        return found

    async def _engines_check(self, since: float, until: float, tolerance: float) -> Check:
        endpoints = await self._context.store.endpoints()
        return await ledger_and_engines(
            self._context.books.store,
            since=since,
            until=until,
            tolerance=tolerance,
            now_s=self._context.clock.unix_s(),
            shadows={release.version_id for one in endpoints for release in one.releases if release.shadow},
        )

    async def _sinks_check(self) -> Check:
        """Return what sinks want somebody to do."""
        findings = Findings("sinks of usage", "sinks")
        for sink in self._context.books.statuses():
            findings.compared += 1
            if sink.alarm:
                findings.add(Difference(subject=sink.sink, what=sink.alarm))
        return findings.check()

    async def _provider_names(self) -> dict[str, str]:
        """Return what providers call the models of versions that they run."""
        engines = self._context.engines
        return {
            version.id: str(version.options.get("model") or version.name)
            for version in await self._context.store.versions()
            if (engine := engines.get(version.framework)) is not None and engine.is_remote
        }

    async def _events(self, checks: list[_ToCheck], since: float, until: float) -> AsyncIterator[str]:
        done: list[Check] = []
        for name, check in checks:
            yield _encode({"type": "checking", "name": name})
            done.append(await check())
            yield _encode({"type": "checked", "check": done[-1], "currency": self._context.config.billing.currency})
        yield _encode({"type": "result", "result": self._reconciled(since, until, done)})

    def _reconciled(self, since: float, until: float, checks: list[Check]) -> Reconciliation:
        return Reconciliation(
            since=int(since),
            until=int(until),
            currency=self._context.config.billing.currency,
            balances=all(check.is_good for check in checks),
            checks=checks,
        )


async def _stripe_check(stripe: StripeReports, books: BookStore, since: int, until: int) -> Check:
    # What settled since it last looked at hours of before is no difference: it is about to be reported.
    await stripe.catch_up()
    return await ledger_and_stripe(books, stripe.meters, stripe.counted, since=since, until=until)


def _encode(event: dict[str, Any]) -> str:
    return msgspec.json.encode(event).decode()


def _setup(endpoint: Endpoint) -> gpu_costs.Setup:
    rollout, scaling = endpoint.rollout, endpoint.scaling
    weighted = sum(release.weight > 0 for release in endpoint.releases)
    since = rollout.began_at if rollout is not None and rollout.is_open and weighted > 1 else None
    return gpu_costs.Setup(
        endpoint.name,
        endpoint.tenant_id,
        scaling.min_replicas,
        scaling.max_replicas,
        scaling.scale_to_zero,
        since,
        scaling.idle_s,
        endpoint.host_id,
        bool(endpoint.pool),
    )
