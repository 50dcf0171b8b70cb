"""A new version of a model: everything that can be wrong with one, and the one that is stored.

Shared by deployments, which make an endpoint for it, and by releases, which
add it to one.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from modelyard.control.api.artifact_sources import ArtifactSource, read_source, reference_faults
from modelyard.control.api.deploy_spec import engine_faults, option_faults, version_faults
from modelyard.control.api.faults import Fault
from modelyard.control.api.registered import MODEL, find_base, find_registered, newest, no_adapters
from modelyard.control.api.uploaded import read_uploaded
from modelyard.control.context import Context
from modelyard.control.supplies import NO_ADAPTER, adapter_settings, lone_adapter
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.tenants import Identity, Scope
from modelyard.domain.uploads import SCHEME
from modelyard.engines import Engine, GuestKind, Options, OptionsError, Settings
from modelyard.errors import conflict
from modelyard.ids import new_id
from modelyard.policy.cluster import CPU


class Order(Protocol):
    """What somebody wants to be served."""

    @property
    def framework(self) -> str:
        """The engine's name."""
        ...

    @property
    def model_artifact(self) -> str:
        """Where the weights are, "" for none."""
        ...

    @property
    def version(self) -> str | None:
        """The version's name; None takes the next free one."""
        ...

    @property
    def base(self) -> str:
        """NAME@VERSION that an adapter is for, "" for none."""
        ...

    @property
    def options(self) -> Options:
        """The engine's own settings."""
        ...


class Findings(NamedTuple):
    """What an order comes to; ``engine`` and ``settings`` are there when there are no faults.

    ``registered`` is the version that the order names, which is deployed as it is.
    """

    faults: list[Fault]
    engine: Engine | None
    settings: Settings | None
    source: ArtifactSource = ArtifactSource()
    registered: ModelVersion | None = None
    base: ModelVersion | None = None


async def examine(context: Context, identity: Identity, order: Order, *, is_deployed: bool = True) -> Findings:
    """Return all that is wrong with ``order``, and what its engine makes of it."""
    if order.model_artifact.startswith(MODEL):
        return await _examine_registered(context, identity, order)
    is_admin = identity.may(Scope.ADMIN)
    framework = await _framework(context, identity, order)
    engine = context.engines.get(framework)
    faults = [
        *version_faults(order.version),
        *(engine_faults(framework, engine, context.engines) if framework or not order.base else ()),
        *_admin_faults(engine, "framework", is_admin=is_admin),
        *option_faults(order.options, is_admin=is_admin),
    ]
    source, settings = ArtifactSource(), None
    if engine is not None:
        source, found = await _source_of(context, identity, engine, order)
        faults += found
        if order.base:
            faults += adapter_faults(order, source)
            settings = adapter_settings(source.size_bytes)
        elif source.facts.is_adapter:
            faults.append(Fault("model_artifact", lone_adapter(source.facts)))
        try:
            settings = settings or engine.settings(
                dict(order.options), artifact_bytes=source.size_bytes, facts=source.facts
            )
        except OptionsError as error:
            faults += [Fault(f"options.{name}", reason) for name, reason in error.faults.items()]
        except ValueError as error:
            faults.append(Fault("options", str(error)))
    elif not order.model_artifact.startswith(SCHEME):
        faults += reference_faults(order.model_artifact, context.artifacts.sources, is_admin=is_admin)
    base, found = await find_base(context, identity, engine, order.base, is_deployed=is_deployed)
    return Findings([*faults, *found], engine, settings, source, None, base)


async def _framework(context: Context, identity: Identity, order: Order) -> str:
    """Return the engine that an order names: an adapter runs where its base does."""
    if order.framework or not order.base:
        return order.framework
    base, _ = await find_base(context, identity, None, order.base, is_deployed=False)
    return base.framework if base is not None else ""


async def _source_of(
    context: Context, identity: Identity, engine: Engine, order: Order
) -> tuple[ArtifactSource, list[Fault]]:
    is_adapter = bool(order.base)
    if order.model_artifact.startswith(SCHEME):
        return await read_uploaded(context, identity, engine, order.model_artifact, is_adapter=is_adapter)
    is_admin, sources = identity.may(Scope.ADMIN), context.artifacts.sources
    return await read_source(engine, order.model_artifact, sources, is_admin=is_admin, is_adapter=is_adapter)


async def _examine_registered(context: Context, identity: Identity, order: Order) -> Findings:
    """Return what is wrong with deploying a version as it is: that it is not there, or was asked to be another."""
    version, faults = await find_registered(context, identity, order.model_artifact)
    given = {
        "framework": order.framework and (version is None or order.framework != version.framework),
        "version": order.version is not None,
        "options": bool(order.options),
        "base": bool(order.base),
    }
    for name, is_given in given.items():
        if is_given:
            faults.append(Fault(name, "a registered version is deployed as it is; leave this out"))
    if version is None:
        return Findings(faults, None, None)
    engine = context.engines.get(version.framework)
    faults += engine_faults(version.framework, engine, context.engines)
    faults += _admin_faults(engine, "model_artifact", is_admin=identity.may(Scope.ADMIN))
    if engine is None:
        return Findings(faults, None, None, registered=version)
    if version.base_id:
        if engine.guests is not GuestKind.ADAPTER:
            faults.append(Fault("model_artifact", f"it is an adapter; {no_adapters(engine)}"))
        bases = {one.id: one for one in await context.store.versions()}
        settings = adapter_settings(version.artifact.size_bytes)
        return Findings(faults, engine, settings, registered=version, base=bases.get(version.base_id))
    try:
        settings = engine.settings(
            dict(version.options), artifact_bytes=version.artifact.size_bytes, facts=version.facts
        )
    except ValueError as error:
        return Findings([*faults, Fault("model_artifact", str(error))], engine, None, registered=version)
    return Findings(faults, engine, settings, registered=version)


def _admin_faults(engine: Engine | None, param: str, *, is_admin: bool) -> list[Fault]:
    """Return that an engine is the operator's alone, where it is."""
    if engine is None or not engine.is_remote or is_admin:
        return []
    reason = f"the engine '{engine.name}' uses what is the operator's and needs a key with the scope 'admin'"
    return [Fault(param, reason)]


def adapter_faults(order: Order, source: ArtifactSource) -> Iterator[Fault]:
    """Yield what is wrong with an adapter."""
    if source.facts.format and not source.facts.is_adapter:
        yield Fault("model_artifact", NO_ADAPTER)
    for name in order.options:
        yield Fault(f"options.{name[:64]}", "an adapter runs with the options of its host; leave this out")


async def make_version(
    context: Context, order: Order, findings: Findings, *, tenant_id: str, name: str, gpus: tuple[str, int]
) -> ModelVersion:
    """Return the version of an order without faults, to be stored if it is new; ``gpus`` are type and number.

    Raises:
        ApiError: 409 for a version that exists.
    """
    if findings.registered is not None:
        return findings.registered
    assert findings.engine is not None, "an unknown engine is a fault"
    assert findings.settings is not None, "bad options are a fault"
    gpu_type, gpu_count = (CPU, 1) if findings.engine.is_remote else gpus
    versions = await context.store.versions(tenant_id=tenant_id)
    parent = newest(versions, name, tenant_id=tenant_id)
    return ModelVersion(
        id=new_id("ver-"),
        tenant_id=tenant_id,
        name=name,
        version=_version_name(order.version, name, {one.version for one in versions if one.name == name}),
        framework=findings.engine.name,
        artifact=Artifact(
            findings.source.uri, findings.source.digest, findings.source.size_bytes, findings.source.files
        ),
        options=dict(order.options),
        created_at=int(context.clock.unix_s()),
        gpu_type=gpu_type,
        gpu_count=gpu_count,
        memory_bytes=findings.settings.memory_bytes,
        base_id=findings.base.id if findings.base else "",
        parent_id=parent.id if parent else "",
        facts=findings.source.facts,
    )


def _version_name(wanted: str | None, name: str, taken: set[str]) -> str:
    if wanted is None:
        return next(free for number in range(1, len(taken) + 2) if (free := f"v{number}") not in taken)
    if wanted in taken:
        raise conflict(
            f"Version '{wanted}' of '{name}' exists, and versions never change. "
            "Choose another, or leave 'version' out for the next free one.",
            param="version",
        )
    return wanted
