"""``POST /v1/models/deploy``: from a request to a version and an endpoint.

Only what is stored happens here; the reconciler does the rest. A bad request
is told everything that is wrong with it at once, since every round trip of
somebody who is deploying costs minutes.
"""

import math
import statistics

from modelyard.control.api.artifact_sources import ArtifactSource, read_source
from modelyard.control.api.deploy_spec import EXAMPLE, DeployAnswer, DeployRequest, Fault, faults_of
from modelyard.control.context import Context
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.tenants import Identity, Scope
from modelyard.engines import Engine, Settings
from modelyard.errors import ApiError, conflict, permission_denied
from modelyard.ids import new_id
from modelyard.stores import AlreadyExistsError, Event, StoreUnavailableError
from modelyard.web.routes import AnyRoute, Call, Empty, Route

URL_HEADER = "x-modelyard-url"
"""Where the caller reached the gateway (``http://127.0.0.1:8484``); set by the gateway only."""


class Deployments:
    """The route of deployments."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        path, summary = "/v1/models/deploy", "Deploy a model"
        return [
            Route("POST", path, Scope.MANAGE, summary, self.deploy, DeployRequest, Empty, DeployAnswer, 202, EXAMPLE)
        ]

    async def deploy(self, call: Call[DeployRequest, Empty]) -> DeployAnswer:
        """Store a version and an endpoint, and wake the reconciler."""
        context, identity, wanted = self._context, call.identity, call.body
        engine, source, settings = await self._checked(identity, wanted)
        now = int(context.clock.unix_s())
        version = ModelVersion(
            id=new_id("ver-"),
            tenant_id=identity.tenant_id,
            name=wanted.model_name,
            version=await self._version_name(identity, wanted),
            framework=engine.name,
            artifact=Artifact(source.uri, size_bytes=source.size_bytes),
            options=dict(wanted.options),
            created_at=now,
            gpu_type=wanted.hardware.gpu_type,
            gpu_count=wanted.hardware.gpu_count,
            memory_bytes=settings.memory_bytes,
        )
        endpoint = Endpoint(
            id=new_id("ep-"),
            tenant_id=identity.tenant_id,
            name=wanted.model_name,
            releases=(Release(version.id),),
            scaling=_scaling(wanted),
            created_at=now,
            is_shared=wanted.shared,
        )
        await self._store(version, endpoint)
        estimate_s = await self._estimate_s(version, settings)
        url = call.request.headers.get(URL_HEADER, "").rstrip("/")
        return DeployAnswer(endpoint.id, endpoint.status, estimate_s, f"{url}/v1/models/{endpoint.id}")

    async def _checked(self, identity: Identity, wanted: DeployRequest) -> tuple[Engine, ArtifactSource, Settings]:
        if wanted.shared and not identity.may(Scope.ADMIN):
            raise permission_denied(Scope.ADMIN)
        engine = self._context.engines.get(wanted.framework)
        faults = faults_of(wanted, engine, self._context.engines, is_admin=identity.may(Scope.ADMIN))
        source, settings = ArtifactSource(), None
        if engine is not None:
            source, found = await read_source(engine, wanted.model_artifact, is_admin=identity.may(Scope.ADMIN))
            faults += found
            try:
                settings = engine.settings(dict(wanted.options), artifact_bytes=source.size_bytes)
            except ValueError as error:
                faults.append(Fault("options", str(error)))
        if faults:
            raise _refusal(faults)
        assert engine is not None, "an unknown engine is a fault"
        assert settings is not None, "bad options are a fault"
        return engine, source, settings

    async def _store(self, version: ModelVersion, endpoint: Endpoint) -> None:
        context = self._context
        for other in await context.store.endpoints(tenant_id=endpoint.tenant_id):
            if other.name == endpoint.name and not other.is_deleted:
                raise conflict(
                    f"You have an endpoint named '{endpoint.name}' already ({other.id}). Delete it first "
                    f"(DELETE /v1/endpoints/{other.id}), or choose another model_name.",
                    param="model_name",
                )
        try:
            await context.store.add_deployment(version, endpoint)
        except AlreadyExistsError as error:
            raise conflict(f"{error}. Choose another model_name or version.", param="model_name") from None
        context.wake()
        try:
            reason = f"version {version.version} on {version.framework}"
            await context.store.add_event(Event(endpoint.created_at, endpoint.id, "deployed", reason))
            await context.refresh()
        except StoreUnavailableError:
            # The deployment is stored; the woken pass publishes it as soon as the store answers again.
            return

    async def _version_name(self, identity: Identity, wanted: DeployRequest) -> str:
        versions = await self._context.store.versions(tenant_id=identity.tenant_id)
        taken = {one.version for one in versions if one.name == wanted.model_name}
        if wanted.version is None:
            return next(name for number in range(1, len(taken) + 2) if (name := f"v{number}") not in taken)
        if wanted.version in taken:
            raise conflict(
                f"Version '{wanted.version}' of '{wanted.model_name}' exists, and versions never change. "
                "Choose another, or leave 'version' out for the next free one.",
                param="version",
            )
        return wanted.version

    async def _estimate_s(self, version: ModelVersion, settings: Settings) -> int:
        measured: list[float] = []
        for other in await self._context.store.versions(tenant_id=version.tenant_id):
            if _loads_alike(other, version):
                measured += await self._context.store.observed_load_s(other.id)
        return math.ceil(statistics.median(measured) if measured else settings.load_s)


def _loads_alike(other: ModelVersion, version: ModelVersion) -> bool:
    """Say whether load times of one tell those of the other: the weights do, and without weights the options."""
    if (other.framework, other.artifact.uri) != (version.framework, version.artifact.uri):
        return False
    return bool(version.artifact.uri) or other.options == version.options


def _scaling(wanted: DeployRequest) -> Scaling:
    hardware, scaling = wanted.hardware, wanted.scaling
    return Scaling(
        min_replicas=hardware.min_replicas,
        max_replicas=hardware.max_replicas or max(1, hardware.min_replicas),
        scale_to_zero=scaling.scale_to_zero,
        idle_s=scaling.scale_to_zero_after_idle_seconds,
        metric=scaling.metric,
        target_value=scaling.target_value,
    )


def _refusal(faults: list[Fault]) -> ApiError:
    listed = "; ".join(f"{fault.param}: {fault.reason.rstrip('.')}" for fault in faults)
    message = f"This deployment cannot be made. {listed}."
    return ApiError(400, code="invalid_value", message=message, param=faults[0].param)
