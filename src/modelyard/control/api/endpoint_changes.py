"""A change of an endpoint: what may be asked for, and the endpoint that comes of it; pure."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from modelyard.config import GatewayConfig
from modelyard.control.api.autoscale import AutoscaleBody, changed_autoscale
from modelyard.control.api.deploy_spec import idle_faults, replica_faults, target_faults
from modelyard.control.api.faults import Fault
from modelyard.control.api.serving import ServingBody, changed_serving
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.policy.releases import SharesError, with_shares

SHARES_MAX = 100

CHANGE_EXAMPLE = {
    "serving": {"timeouts": {"first_token_s": 60}, "coalesce_ms": 20, "sticky": "user"},
    "hardware": {"min_replicas": 1, "max_replicas": 4},
    "autoscale": {"up_utilization": 75, "down_utilization_s": 300, "tier": "hot"},
    "releases": [{"version": "v2", "weight": 10}],
}


class ReplicasChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas there may be."""

    min_replicas: int | msgspec.UnsetType = msgspec.UNSET
    max_replicas: int | msgspec.UnsetType = msgspec.UNSET


class ScalingChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the size follows, and when all replicas stop."""

    metric: str | msgspec.UnsetType = msgspec.UNSET
    target_value: float | msgspec.UnsetType = msgspec.UNSET
    scale_to_zero: bool | msgspec.UnsetType = msgspec.UNSET
    scale_to_zero_after_idle_seconds: float | msgspec.UnsetType = msgspec.UNSET


class ShareBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a release gets; releases that are not named share the rest."""

    version: Annotated[str, msgspec.Meta(description="Name or id of a version that the endpoint has.")]
    weight: Annotated[int | msgspec.UnsetType, msgspec.Meta(description="Percent of the requests that it answers.")] = (
        msgspec.UNSET
    )
    shadow: Annotated[
        int | msgspec.UnsetType,
        msgspec.Meta(description="Percent of the requests that are copied to it; nobody gets its answers."),
    ] = msgspec.UNSET
    fallback: Annotated[
        int | msgspec.UnsetType,
        msgspec.Meta(description="Its turn to answer what the releases with weight have no room for; 0: never."),
    ] = msgspec.UNSET


class ChangeEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change; what is left out stays."""

    serving: ServingBody = ServingBody()
    hardware: ReplicasChange = ReplicasChange()
    scaling: ScalingChange = ScalingChange()
    autoscale: AutoscaleBody = AutoscaleBody()
    releases: list[ShareBody] = []


def changed(
    endpoint: Endpoint, body: ChangeEndpoint, names: Mapping[str, str], config: GatewayConfig
) -> tuple[Endpoint, list[Fault]]:
    """Return ``endpoint`` with what ``body`` asks for, and all that is wrong with that.

    ``names`` are the names of versions by id.
    """
    serving, faults = changed_serving(body.serving, endpoint.serving, config)
    scaling = _changed_scaling(endpoint.scaling, body)
    faults += replica_faults("hardware.", scaling.min_replicas, scaling.max_replicas, zero=scaling.scale_to_zero)
    faults += target_faults(scaling.metric, scaling.target_value)
    faults += idle_faults("scaling.scale_to_zero_after_idle_seconds", scaling.idle_s)
    named_s = body.scaling.scale_to_zero_after_idle_seconds
    autoscale, unscaled = changed_autoscale(body.autoscale, endpoint.autoscale, scaling, idle_s=named_s)
    if endpoint.host_id:
        rule = "a guest has no replicas of its own; change its host's"
        given = {"hardware": scaling != endpoint.scaling, "autoscale": autoscale != endpoint.autoscale}
        faults += [Fault(name, rule) for name, is_given in given.items() if is_given]
    releases, unshared = _changed_releases(endpoint, body.releases, names)
    after = msgspec.structs.replace(endpoint, serving=serving, scaling=scaling, autoscale=autoscale, releases=releases)
    return after, [*faults, *unscaled, *unshared]


def _changed_scaling(scaling: Scaling, body: ChangeEndpoint) -> Scaling:
    asked = {
        "min_replicas": body.hardware.min_replicas,
        "max_replicas": body.hardware.max_replicas,
        "scale_to_zero": body.scaling.scale_to_zero,
        "idle_s": body.scaling.scale_to_zero_after_idle_seconds,
        "metric": body.scaling.metric,
        "target_value": body.scaling.target_value,
    }
    return msgspec.structs.replace(
        scaling, **{name: value for name, value in asked.items() if value is not msgspec.UNSET}
    )


def _changed_releases(
    endpoint: Endpoint, shares: list[ShareBody], names: Mapping[str, str]
) -> tuple[tuple[Release, ...], list[Fault]]:
    if not shares:
        return endpoint.releases, []
    faults: list[Fault] = []
    wanted: dict[str, Release] = {}
    for at, share in enumerate(shares[:SHARES_MAX]):
        release = release_named(endpoint, share.version, names)
        if release is None:
            have = ", ".join(f"'{names.get(one.version_id, one.version_id)}'" for one in endpoint.releases)
            faults.append(Fault(f"releases.{at}.version", f"the endpoint has no '{share.version[:64]}'; it has {have}"))
        elif release.version_id in wanted:
            faults.append(Fault(f"releases.{at}.version", f"'{share.version[:64]}' is named twice"))
        else:
            wanted[release.version_id] = _with_share(release, share)
    if faults:
        return endpoint.releases, faults
    try:
        return with_shares(endpoint.releases, wanted), []
    except SharesError as error:
        return endpoint.releases, [Fault(f"releases.{error.param}", str(error))]


def _with_share(release: Release, share: ShareBody) -> Release:
    """Return the release with its new share; to ask for one kind of it alone gives up the other."""
    asked = {
        name: value
        for name, value in (("weight", share.weight), ("shadow", share.shadow), ("fallback", share.fallback))
        if value is not msgspec.UNSET
    }
    before = Release(release.version_id, weight=0) if any(asked.values()) else release
    return msgspec.structs.replace(before, **asked)


def release_named(endpoint: Endpoint, reference: str, names: Mapping[str, str]) -> Release | None:
    """Return the release of the version with this id or name."""
    for release in endpoint.releases:
        if reference in (release.version_id, names.get(release.version_id)):
            return release
    return None
