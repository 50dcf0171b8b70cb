"""``GET /v1/endpoints/{endpoint}/forecast``: when requests are expected, how good that was, and a backtest."""

import asyncio
from typing import Annotated

import msgspec

from modelyard.control.api.access import find_endpoint
from modelyard.control.api.faults import Fault, refusal
from modelyard.control.context import Context
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.tenants import Scope
from modelyard.policy import forecast, prewarming
from modelyard.policy.backtest import Backtest, backtest
from modelyard.policy.releases import main_release
from modelyard.web.routes import AnyRoute, Call, Empty, Route

HOURS_MAX = 168
DAYS_MAX = 366
DAY_S = 86_400


class ForecastQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far ahead."""

    hours: Annotated[int, msgspec.Meta(ge=1, le=HOURS_MAX, description="Hours to show, from now.")] = 24


class BacktestQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of the ledger to replay."""

    days: Annotated[int, msgspec.Meta(ge=1, le=DAYS_MAX, description="Days of the endpoint's own history.")] = 28


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """Ten minutes to come."""

    at: int
    probability: float
    requests_per_second: float
    is_prewarmed: bool
    """A replica is started for it, if the day's budget allows."""


class ForecastView(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of an endpoint, and what became of earlier expectations."""

    endpoint_id: str
    name: str
    prewarm: bool
    weeks_learned: float
    """Faded evidence: 1 after one week, 3.3 at most."""
    threshold: float
    """Probability from which waiting for requests is cheaper than a cold start."""
    load_s: float
    hits: int
    misses: int
    wasted: int
    hit_rate: float | None
    precision: float | None
    budget_gpu_hours: float
    spent_today_gpu_hours: float
    spent_gpu_hours: float
    slots: list[SlotView]


class BacktestView(msgspec.Struct, frozen=True, kw_only=True):
    """A replay of the endpoint's requests, with and without the forecast."""

    endpoint_id: str
    name: str
    load_s: float
    idle_s: float
    result: Backtest | None
    """Null when the ledger has no requests of these days."""


class ForecastPages:
    """The routes of forecasts."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        one, manage = "/v1/endpoints/{endpoint:path}/forecast", Scope.MANAGE
        summary = "Replay an endpoint's requests with and without its forecast"
        return [
            Route("GET", f"{one}/backtest", manage, summary, self.backtest, Empty, BacktestQuery, BacktestView),
            Route("GET", one, manage, "When requests are expected", self.show, Empty, ForecastQuery, ForecastView),
        ]

    async def show(self, call: Call[Empty, ForecastQuery]) -> ForecastView:
        """Return what is expected in the hours to come."""
        context = self._context
        endpoint = await find_endpoint(context.store, call.identity, call.path("endpoint"))
        profile = context.forecast(endpoint.id) or forecast.Profile()
        (load_s, accelerators), now_s = await self._start(endpoint), context.clock.unix_s()
        limit, score = prewarming.threshold(endpoint.autoscale, load_s, accelerators), profile.score
        is_today = score.day == int(now_s // DAY_S)
        first = forecast.slot_of(now_s)
        return ForecastView(
            endpoint_id=endpoint.id,
            name=endpoint.name,
            prewarm=endpoint.autoscale.prewarm,
            weeks_learned=round(forecast.weeks_seen(profile), 2),
            threshold=round(limit, 3),
            load_s=round(load_s, 1),
            hits=score.hits,
            misses=score.misses,
            wasted=score.wasted,
            hit_rate=score.hit_rate,
            precision=score.precision,
            budget_gpu_hours=endpoint.autoscale.prewarm_budget,
            spent_today_gpu_hours=round(score.day_s / 3600 if is_today else 0.0, 3),
            spent_gpu_hours=round(score.waiting_s / 3600, 3),
            slots=[
                SlotView(
                    at=slot.begin_s,
                    probability=round(slot.probability, 3),
                    requests_per_second=round(slot.rate, 4),
                    is_prewarmed=endpoint.autoscale.prewarm and slot.probability > limit,
                )
                for slot in forecast.coming(profile, first, call.query.hours * 3600 // forecast.SLOT_S)
            ],
        )

    async def backtest(self, call: Call[Empty, BacktestQuery]) -> BacktestView:
        """Replay what the ledger has of the endpoint."""
        context = self._context
        endpoint = await find_endpoint(context.store, call.identity, call.path("endpoint"))
        now_s = context.clock.unix_s()
        rows = await context.usage.arrivals(endpoint.id, since=now_s - call.query.days * DAY_S, until=now_s)
        (load_s, accelerators), idle_s = await self._start(endpoint), endpoint.scaling.idle_s
        history = {begin_s // forecast.SLOT_S: number for begin_s, number in rows.items()}
        result = None
        if history:
            try:
                result = await asyncio.to_thread(
                    backtest,
                    history,
                    endpoint.autoscale,
                    idle_s=idle_s,
                    load_s=load_s,
                    accelerators=accelerators,
                    last=forecast.slot_of(now_s),
                )
            except ValueError as error:
                raise refusal("This cannot be replayed.", [Fault("days", str(error))]) from None
        return BacktestView(endpoint_id=endpoint.id, name=endpoint.name, load_s=load_s, idle_s=idle_s, result=result)

    async def _start(self, endpoint: Endpoint) -> tuple[float, int]:
        """Return how long a replica takes to load, and its accelerators, as the endpoint's last pass knew them."""
        found = self._context.size(endpoint.id)
        if found is not None:
            return found[0].load_s, found[0].accelerators
        measured = await self._context.store.observed_load_s(main_release(endpoint).version_id)
        return sorted(measured)[len(measured) // 2] if measured else 0.0, 1
