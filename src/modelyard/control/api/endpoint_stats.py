"""What happened to an endpoint and its releases in the last seconds, from what gateways count."""

from typing import Annotated

import msgspec

from modelyard.control.api.access import find_endpoint
from modelyard.control.context import Context
from modelyard.domain.signals import Window
from modelyard.domain.tenants import Scope
from modelyard.policy.signals import KEPT_S, TICK_S
from modelyard.web.routes import AnyRoute, Call, Empty, Route

RATES_S = (10, 60, 300)


class StatsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far back."""

    window: Annotated[
        float, msgspec.Meta(ge=TICK_S, le=KEPT_S, description="Seconds; the answer says what it covers exactly.")
    ] = 60.0


class WindowView(msgspec.Struct, frozen=True, kw_only=True):
    """One window. A quantile of nothing is null; ``error_share`` counts failures that are not the caller's."""

    window_s: float
    requests: int
    errors: int
    error_share: float
    requests_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    itl_p95_s: float | None
    latency_p99_s: float | None
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    running_mean: float
    """Requests that replicas had at once, on average."""


class ReleaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """The window of one release."""

    version: str
    model_id: str
    weight: int
    stats: WindowView


class EndpointStats(msgspec.Struct, frozen=True, kw_only=True):
    """The windows of an endpoint."""

    id: str
    name: str
    object: str = "endpoint.stats"
    stats: WindowView
    arrivals_per_s: dict[str, float]
    """Requests that came, a second, over the last 10, 60 and 300 seconds; refused ones are not in it."""
    queued: int
    queued_max: int
    """Most that waited at once in the window."""
    predicted_wait_s: float
    """How long a request that came now would wait, at the gateway where that is longest."""
    releases: list[ReleaseStats]


class Stats:
    """The route of statistics; it comes before endpoints', whose names may hold slashes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared route."""
        path, summary = "/v1/endpoints/{endpoint:path}/stats", "What happened in the last seconds"
        return [Route("GET", path, Scope.MANAGE, summary, self.stats, Empty, StatsQuery, EndpointStats)]

    async def stats(self, call: Call[Empty, StatsQuery]) -> EndpointStats:
        """Return the windows of the endpoint and of each of its releases."""
        context, seconds = self._context, call.query.window
        signals = context.signals
        endpoint = await find_endpoint(context.store, call.identity, call.path("endpoint"))
        names = {one.id: one.version for one in await context.store.versions(tenant_id=endpoint.tenant_id)}
        demands = [
            demand
            for report in context.gateways().values()
            for demand in report.endpoints
            if demand.endpoint_id == endpoint.id
        ]
        return EndpointStats(
            id=endpoint.id,
            name=endpoint.name,
            stats=window_view(signals.window(endpoint.id, None, seconds)),
            arrivals_per_s={str(span): round(signals.arrival_rate(endpoint.id, span), 4) for span in RATES_S},
            queued=sum(demand.queued for demand in demands),
            queued_max=signals.queued_max(endpoint.id, seconds),
            predicted_wait_s=max((demand.wait_s for demand in demands), default=0.0),
            releases=[
                ReleaseStats(
                    version=names.get(release.version_id, release.version_id),
                    model_id=release.version_id,
                    weight=release.weight,
                    stats=window_view(signals.window(endpoint.id, release.version_id, seconds)),
                )
                for release in endpoint.releases
            ],
        )


def window_view(window: Window) -> WindowView:
    """Return what is shown of a window."""
    seconds = window.seconds
    return WindowView(
        window_s=round(seconds, 3),
        requests=window.requests,
        errors=window.errors,
        error_share=window.error_share,
        requests_per_s=window.requests / seconds,
        ttft_p50_s=window.ttft_p50_s,
        ttft_p95_s=window.ttft_p95_s,
        ttft_p99_s=window.ttft_p99_s,
        itl_p95_s=window.itl_p95_s,
        latency_p99_s=window.latency_p99_s,
        prompt_tokens_per_s=window.prompt_tokens / seconds,
        completion_tokens_per_s=window.completion_tokens / seconds,
        running_mean=window.service_s / seconds,
    )
