"""How gateways treat an endpoint's requests, as it is asked for; shared by deployments and changes."""

import math
from collections.abc import Iterator
from typing import Annotated

import msgspec

from modelyard.config import GatewayConfig
from modelyard.control.api.faults import Fault
from modelyard.domain.endpoints import Serving, Sticky, Timeouts

TIMEOUT_S_MAX = 86_400
COALESCE_MS_MAX = 1000

_NAMES = ("connect_s", "first_token_s", "token_s", "total_s")

_Seconds = Annotated[
    float | msgspec.UnsetType | None, msgspec.Meta(description="Seconds; null: the gateway's own setting.")
]


class TimeoutsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long an engine gets; what is left out stays."""

    connect_s: _Seconds = msgspec.UNSET
    first_token_s: _Seconds = msgspec.UNSET
    token_s: _Seconds = msgspec.UNSET
    total_s: _Seconds = msgspec.UNSET


class ServingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are treated; what is left out stays."""

    timeouts: TimeoutsBody = TimeoutsBody()
    coalesce_ms: Annotated[
        int | msgspec.UnsetType,
        msgspec.Meta(description="Tokens of a stream that come within this time go out in one write; 0 to 1000."),
    ] = msgspec.UNSET
    sticky: Annotated[
        str | msgspec.UnsetType,
        msgspec.Meta(description="What keeps requests on one release and replica: 'none', 'key' or 'user'."),
    ] = msgspec.UNSET
    fallback_after_s: Annotated[
        float | msgspec.UnsetType,
        msgspec.Meta(description="Seconds that a request waits for a release with weight before a fallback has it."),
    ] = msgspec.UNSET


class ServingView(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are treated; a time-out that is null is the gateway's own setting."""

    timeouts: dict[str, float | None]
    coalesce_ms: int
    sticky: Sticky
    fallback_after_s: float


def serving_view(serving: Serving) -> ServingView:
    """Return what is shown of ``serving``, defaults too."""
    timeouts = {name: getattr(serving.timeouts, name) for name in _NAMES}
    return ServingView(
        timeouts=timeouts,
        coalesce_ms=serving.coalesce_ms,
        sticky=serving.sticky,
        fallback_after_s=serving.fallback_after_s,
    )


def changed_serving(body: ServingBody, before: Serving, config: GatewayConfig) -> tuple[Serving, list[Fault]]:
    """Return ``before`` with what ``body`` asks for, and what is wrong with that."""
    asked = {name: value for name in _NAMES if (value := getattr(body.timeouts, name)) is not msgspec.UNSET}
    timeouts = msgspec.structs.replace(before.timeouts, **asked)
    coalesce_ms = before.coalesce_ms if body.coalesce_ms is msgspec.UNSET else body.coalesce_ms
    faults = [*_timeout_faults(timeouts, config)]
    if not 0 <= coalesce_ms <= COALESCE_MS_MAX:
        faults.append(Fault("serving.coalesce_ms", f"must be 0 to {COALESCE_MS_MAX}"))
    sticky = before.sticky
    if body.sticky is not msgspec.UNSET:
        if body.sticky in {str(one) for one in Sticky}:
            sticky = Sticky(body.sticky)
        else:
            faults.append(Fault("serving.sticky", f"must be one of {', '.join(Sticky)}"))
    after_s = before.fallback_after_s if body.fallback_after_s is msgspec.UNSET else body.fallback_after_s
    if not 0 <= after_s <= TIMEOUT_S_MAX:
        faults.append(Fault("serving.fallback_after_s", f"must be 0 to {TIMEOUT_S_MAX} seconds"))
    return Serving(timeouts, coalesce_ms, sticky, after_s), faults


def _timeout_faults(timeouts: Timeouts, config: GatewayConfig) -> Iterator[Fault]:
    total_s = config.total_timeout_s if timeouts.total_s is None else timeouts.total_s
    for name in _NAMES:
        value = getattr(timeouts, name)
        if value is None:
            continue
        if not (math.isfinite(value) and 0 < value <= TIMEOUT_S_MAX):
            yield Fault(f"serving.timeouts.{name}", f"must be above 0 and at most {TIMEOUT_S_MAX} seconds")
        elif value > total_s > 0:
            # It could never be reached, which whoever sets it does not expect.
            yield Fault(f"serving.timeouts.{name}", f"is above 'total_s' ({total_s:g} s); raise that too")
