"""A new version of a model: everything that can be wrong with one, and the one that is stored.

Shared by deployments, which make an endpoint for it, and by releases, which
add it to one.
"""

from typing import NamedTuple, Protocol

from modelyard.control.api.artifact_sources import ArtifactSource, read_source
from modelyard.control.api.deploy_spec import engine_faults, option_faults, version_faults
from modelyard.control.api.faults import Fault
from modelyard.control.context import Context
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.tenants import Identity, Scope
from modelyard.engines import Engine, Options, Settings
from modelyard.errors import conflict
from modelyard.ids import new_id


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
    def options(self) -> Options:
        """The engine's own settings."""
        ...


class Findings(NamedTuple):
    """What an order comes to; ``engine`` and ``settings`` are there when there are no faults."""

    faults: list[Fault]
    engine: Engine | None
    settings: Settings | None
    source: ArtifactSource


async def examine(context: Context, identity: Identity, order: Order) -> Findings:
    """Return all that is wrong with ``order``, and what its engine makes of it."""
    is_admin = identity.may(Scope.ADMIN)
    engine = context.engines.get(order.framework)
    faults = [
        *version_faults(order.version),
        *engine_faults(order.framework, engine, context.engines),
        *option_faults(order.options, is_admin=is_admin),
    ]
    source, settings = ArtifactSource(), None
    if engine is not None:
        source, found = await read_source(engine, order.model_artifact, context.artifacts.sources, is_admin=is_admin)
        faults += found
        try:
            settings = engine.settings(dict(order.options), artifact_bytes=source.size_bytes)
        except ValueError as error:
            faults.append(Fault("options", str(error)))
    return Findings(faults, engine, settings, source)


async def make_version(
    context: Context, order: Order, findings: Findings, *, tenant_id: str, name: str, gpus: tuple[str, int]
) -> ModelVersion:
    """Return the version to store of an order without faults; ``gpus`` are type and number.

    Raises:
        ApiError: 409 for a version that exists.
    """
    assert findings.engine is not None, "an unknown engine is a fault"
    assert findings.settings is not None, "bad options are a fault"
    gpu_type, gpu_count = gpus
    return ModelVersion(
        id=new_id("ver-"),
        tenant_id=tenant_id,
        name=name,
        version=await _version_name(context, order.version, tenant_id, name),
        framework=findings.engine.name,
        artifact=Artifact(findings.source.uri, size_bytes=findings.source.size_bytes),
        options=dict(order.options),
        created_at=int(context.clock.unix_s()),
        gpu_type=gpu_type,
        gpu_count=gpu_count,
        memory_bytes=findings.settings.memory_bytes,
    )


async def _version_name(context: Context, wanted: str | None, tenant_id: str, name: str) -> str:
    versions = await context.store.versions(tenant_id=tenant_id)
    taken = {one.version for one in versions if one.name == name}
    if wanted is None:
        return next(free for number in range(1, len(taken) + 2) if (free := f"v{number}") not in taken)
    if wanted in taken:
        raise conflict(
            f"Version '{wanted}' of '{name}' exists, and versions never change. "
            "Choose another, or leave 'version' out for the next free one.",
            param="version",
        )
    return wanted
