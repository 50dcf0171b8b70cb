"""Hosts: the endpoints on whose replicas guests sit, found for an adapter, or named.

A host is an endpoint with replicas of its own whose engine takes guests in. An
adapter goes onto one that serves its base: the tenant's own first, then what is
shared, the emptiest first. What another tenant does not share does not exist.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from modelyard.control.api.faults import Fault
from modelyard.control.api.registered import reference_of
from modelyard.control.api.versions import Findings
from modelyard.control.context import Context
from modelyard.control.guests import guests_max, seats_in
from modelyard.domain.catalog import Artifact, ModelVersion, serves_as
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.tenants import Identity
from modelyard.engines import Engine, GuestKind, Options

_TOLD_MAX = 3


class Hosting(NamedTuple):
    """Where a guest goes, None: nowhere, or it has replicas of its own; ``faults`` say what is wrong."""

    host: Endpoint | None
    faults: list[Fault]


async def find_host(context: Context, identity: Identity, findings: Findings, reference: str) -> Hosting:
    """Return the host for what ``findings`` are of; ``reference`` names one, "" leaves the choice to us."""
    engine, base = findings.engine, findings.base
    if engine is None or (base is None and not reference):
        return Hosting(None, [])
    versions = {one.id: one for one in await context.store.versions()}
    endpoints = [one for one in await context.store.endpoints() if not one.is_deleted and not one.pool]
    seen = [one for one in endpoints if one.tenant_id == identity.tenant_id or one.is_shared]
    if reference:
        return _named(seen, identity, reference, engine, base, versions)
    assert base is not None, "without one there is no choice"
    if engine.guests is not GuestKind.ADAPTER:
        return Hosting(None, [])  # that is a fault of the base already
    riders = Counter(one.host_id for one in endpoints if one.host_id)
    able = [one for one in seen if not why_not(one, engine, base, versions)]

    def preference(one: Endpoint) -> tuple[bool, float]:
        return one.tenant_id == identity.tenant_id, -riders[one.id] / max(1, seats_of(one, engine, versions))

    if able:
        return Hosting(max(able, key=preference), [])
    return Hosting(None, [Fault("base", _nobody(seen, engine, base, versions))])


def _named(
    seen: Iterable[Endpoint],
    identity: Identity,
    reference: str,
    engine: Engine,
    base: ModelVersion | None,
    versions: Mapping[str, ModelVersion],
) -> Hosting:
    found = [one for one in seen if reference in (one.id, one.name)]
    if not found:
        return Hosting(None, [Fault("host", f"there is no endpoint '{reference[:100]}' of yours, nor a shared one")])
    host = max(found, key=lambda one: (one.id == reference, one.tenant_id == identity.tenant_id))
    if reason := why_not(host, engine, base, versions):
        return Hosting(None, [Fault("host", reason)])
    return Hosting(host, [])


def _served_by(host: Endpoint, versions: Mapping[str, ModelVersion]) -> list[ModelVersion]:
    """Return the versions of a host that answer."""
    return [versions[one.version_id] for one in host.releases if one.weight and one.version_id in versions]


def why_not(host: Endpoint, engine: Engine, base: ModelVersion | None, versions: Mapping[str, ModelVersion]) -> str:
    """Return why ``host`` cannot take in an adapter of ``base`` (or, without one, a model of ``engine``); "" where it
    can."""
    served = _served_by(host, versions)
    name = f"'{host.name}'"
    if host.host_id:
        return f"{name} is a guest itself; name the endpoint that it sits on"
    if base is None and engine.guests is not GuestKind.MODEL:
        what = "adapters, which are deployed with base" if engine.guests is GuestKind.ADAPTER else "no guests"
        return f"the engine '{engine.name}' takes in {what}"
    if any(one.framework != engine.name for one in served):
        return f"{name} runs on '{served[0].framework}', and this on '{engine.name}'"
    if base is not None and not any(serves_as(one, base) for one in served):
        return f"{name} does not serve the base '{reference_of(base)}'"
    if not any(guests_max(engine, one) for one in served):
        option = f": set its option {engine.guests_option}" if engine.guests_option else ""
        return f"{name} has no seats for guests{option}"
    return ""


def seats_of(host: Endpoint, engine: Engine, versions: Mapping[str, ModelVersion]) -> int:
    """Return how many guests all replicas of ``host`` hold at most."""
    served = _served_by(host, versions)
    return host.scaling.max_replicas * max((guests_max(engine, one) for one in served), default=0)


def _nobody(seen: Iterable[Endpoint], engine: Engine, base: ModelVersion, versions: Mapping[str, ModelVersion]) -> str:
    """Return why no host serves ``base``, and what to type."""
    close = [reason for one in seen if (reason := why_not(one, engine, base, versions)) and "no seats" in reason]
    option = engine.guests_option or "…"
    artifact = f"{base.artifact.uri} " if base.artifact.uri else ""
    host = f"modelyard deploy {artifact}--engine {engine.name} --name {base.name}-host --option {option}=8"
    if close:
        return f"{'; '.join(close[:_TOLD_MAX])}, or deploy one beside it: {host}"
    return f"no endpoint that you may use serves '{reference_of(base)}' with seats for adapters; deploy one: {host}"


async def guests_of(context: Context, host_id: str) -> list[Endpoint]:
    """Return the guests that sit on an endpoint."""
    return [one for one in await context.store.endpoints() if one.host_id == host_id and not one.is_deleted]


def draft_of(endpoint: Endpoint, engine: Engine, findings: Findings, options: Options) -> ModelVersion:
    """Return what ``findings`` are of as the version of an endpoint that it may become."""
    source = findings.source
    return ModelVersion(
        id="",
        tenant_id=endpoint.tenant_id,
        name=endpoint.name,
        version="",
        framework=engine.name,
        artifact=Artifact(source.uri, source.digest, source.size_bytes, source.files),
        options=options,
        created_at=0,
    )


async def stranding(context: Context, endpoint: Endpoint, engine: Engine, new: ModelVersion) -> list[Fault]:
    """Return why the guests on ``endpoint`` would have no place once ``new`` answers there; [] where they would."""
    guests = await guests_of(context, endpoint.id)
    if not guests:
        return []
    if not seats_in(engine, new.options):
        option = f"; set its option {engine.guests_option}" if engine.guests_option else ""
        reason = f"{len(guests)} guests sit on '{endpoint.name}', and this has no seats for them{option}"
        return [Fault("options" if engine.guests_option else "framework", reason)]
    if engine.guests is not GuestKind.ADAPTER:
        return []
    versions = {one.id: one for one in await context.store.versions()}
    of_guests = (versions.get(release.version_id) for guest in guests for release in guest.releases)
    bases = {one.base_id for one in of_guests if one is not None}
    if all(serves_as(new, versions[base]) for base in bases if base in versions):
        return []
    reason = f"{len(guests)} guests of '{endpoint.name}' are adapters of its present base, which this is not; "
    return [Fault("model_artifact", reason + "deploy it as an endpoint of its own")]


def named(guests: Iterable[Endpoint], identity: Identity) -> str:
    """Return who sits somewhere, in words for one who may not know the endpoints of others."""
    mine = [one.name for one in guests if identity.visible_tenant in (None, one.tenant_id)]
    others = sum(identity.visible_tenant not in (None, one.tenant_id) for one in guests)
    told = ", ".join(f"'{name}'" for name in mine[:_TOLD_MAX])
    told += f" and {len(mine) - _TOLD_MAX} more" if len(mine) > _TOLD_MAX else ""
    if others:
        foreign = f"{others} of other tenants"
        return f"{told} and {foreign}" if told else foreign
    return told
