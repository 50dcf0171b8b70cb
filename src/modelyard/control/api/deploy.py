"""``POST /v1/models/deploy``: from a request to a version and an endpoint.

Only what is stored happens here; the reconciler does the rest.
"""

import math
import statistics

import msgspec

from modelyard.control.api.autoscale import changed_autoscale
from modelyard.control.api.deploy_spec import (
    EXAMPLE,
    DeployAnswer,
    DeployRequest,
    endpoint_faults,
    guest_faults,
)
from modelyard.control.api.endpoint_views import URL_HEADER
from modelyard.control.api.faults import Fault, check_all
from modelyard.control.api.hardware import choose_hardware, known_facts
from modelyard.control.api.hosting import find_host
from modelyard.control.api.serving import changed_serving
from modelyard.control.api.versions import examine, make_version
from modelyard.control.context import Context
from modelyard.control.holding import real_kinds
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Autoscale, Endpoint, Release, Scaling, Serving
from modelyard.domain.fleet import ReplicaState
from modelyard.domain.tenants import Scope
from modelyard.engines import Settings
from modelyard.errors import conflict, permission_denied
from modelyard.ids import new_id
from modelyard.policy.adapter_bases import doubt_of_base
from modelyard.policy.releases import main_release
from modelyard.stores import AlreadyExistsError, Event, StoreUnavailableError
from modelyard.web.routes import AnyRoute, Call, Empty, Route


class Deployments:
    """The route of deployments."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        path, summary = "/v1/models/deploy", "Deploy a model"
        types = (DeployRequest, Empty, DeployAnswer)
        return [Route("POST", path, Scope.MANAGE, summary, self.deploy, *types, 202, EXAMPLE, gathers=True)]

    async def deploy(self, call: Call[DeployRequest, Empty]) -> DeployAnswer:
        """Store a version and an endpoint, and wake the reconciler."""
        context, identity, wanted = self._context, call.identity, call.body
        if wanted.shared and not identity.may(Scope.ADMIN):
            raise permission_denied(Scope.ADMIN)
        nodes = await context.fleet.nodes()
        findings = await examine(context, identity, wanted)
        hosting = await find_host(context, identity, findings, wanted.host)
        facts, prices = await known_facts(context, findings), context.config.fleet.accelerator_prices
        chosen = choose_hardware(wanted.hardware, findings, facts, nodes, prices)
        serving, unserved = changed_serving(wanted.serving, Serving(), context.config.gateway)
        autoscale, unscaled = autoscale_of(wanted)
        faults = [
            *endpoint_faults(wanted, chosen, findings.engine, real_kinds(nodes)),
            *_hardware_faults(wanted, findings.registered),
        ]
        faults += [*findings.faults, *hosting.faults, *unserved, *unscaled]
        if hosting.host is not None:
            faults += guest_faults(wanted, findings.engine)
        check_all("This deployment cannot be made.", call.flaws, faults)
        version = await make_version(
            context,
            wanted,
            findings,
            tenant_id=identity.tenant_id,
            name=wanted.model_name,
            gpus=(chosen.gpu_type, chosen.gpu_count),
        )
        endpoint = Endpoint(
            id=new_id("ep-"),
            tenant_id=identity.tenant_id,
            name=wanted.model_name,
            releases=(Release(version.id),),
            scaling=scaling_of(wanted),
            created_at=int(context.clock.unix_s()),
            is_shared=wanted.shared,
            serving=serving,
            autoscale=autoscale,
            host_id=hosting.host.id if hosting.host is not None else "",
        )
        await self._store(version, endpoint, is_new=findings.registered is None)
        assert findings.settings is not None, "bad options are a fault"
        load_s = await estimate_s(context, version, findings.settings)
        if hosting.host is not None:
            load_s += await host_ready_s(context, hosting.host)
        ready_s = math.ceil(load_s)
        url = call.request.headers.get(URL_HEADER, "").rstrip("/")
        hardware = chosen if chosen.reason else None
        doubt = doubt_of_base(facts, findings.base) if findings.base is not None else ""
        warnings = (doubt,) if doubt else ()
        return DeployAnswer(endpoint.id, endpoint.status, ready_s, f"{url}/v1/models/{endpoint.id}", hardware, warnings)

    async def _store(self, version: ModelVersion, endpoint: Endpoint, *, is_new: bool) -> None:
        context = self._context
        for other in await context.store.endpoints(tenant_id=endpoint.tenant_id):
            if other.name == endpoint.name and not other.is_deleted:
                raise conflict(
                    f"You have an endpoint named '{endpoint.name}' already ({other.id}). Delete it first "
                    f"(DELETE /v1/endpoints/{other.id}), add a release to it (POST /v1/endpoints/{other.id}/releases), "
                    "or choose another model_name.",
                    param="model_name",
                )
        try:
            if is_new:
                await context.store.add_deployment(version, endpoint)
            else:
                await context.store.add_endpoint(endpoint)
        except KeyError:
            raise conflict("The version was deleted meanwhile.", param="model_artifact") from None
        except AlreadyExistsError as error:
            raise conflict(f"{error}. Choose another model_name or version.", param="model_name") from None
        context.wake()
        try:
            reason = f"version {version.version} on {version.framework}"
            if endpoint.host_id:
                reason += f", as a guest of {endpoint.host_id}"
            await context.store.add_event(Event(endpoint.created_at, endpoint.id, "deployed", reason))
            await context.refresh()
        except StoreUnavailableError:
            # The deployment is stored; the woken pass publishes it as soon as the store answers again.
            return


async def host_ready_s(context: Context, host: Endpoint) -> float:
    """Return the seconds until a replica of ``host`` serves; 0 where one does."""
    if any(one.state is ReplicaState.READY for one in await context.store.replicas(endpoint_id=host.id)):
        return 0.0
    version_id = main_release(host).version_id
    version = next((one for one in await context.store.versions() if one.id == version_id), None)
    engine = context.engines.get(version.framework) if version is not None else None
    if version is None or engine is None:
        return 0.0
    settings = engine.settings(version.options, artifact_bytes=version.artifact.size_bytes, facts=version.facts)
    return await estimate_s(context, version, settings)


async def estimate_s(context: Context, version: ModelVersion, settings: Settings) -> float:
    """Return the seconds from start to ready: the median of what was measured, else the engine's estimate."""
    measured: list[float] = []
    for other in await context.store.versions(tenant_id=version.tenant_id):
        if _loads_alike(other, version):
            measured += await context.store.observed_load_s(other.id)
    return statistics.median(measured) if measured else settings.load_s


def _hardware_faults(wanted: DeployRequest, registered: ModelVersion | None) -> list[Fault]:
    """Return which accelerators were asked for that a registered version does not have."""
    if registered is None:
        return []
    asked = {"gpu_type": wanted.hardware.gpu_type, "gpu_count": wanted.hardware.gpu_count}
    has = {"gpu_type": registered.gpu_type, "gpu_count": registered.gpu_count}
    plain = {"gpu_type": "cpu", "gpu_count": 1}  # what clients of before send who mean nothing by it
    wrong = [name for name in asked if asked[name] not in (None, has[name], plain[name])]
    return [Fault(f"hardware.{name}", f"the registered version has {has[name]}; leave this out") for name in wrong]


def _loads_alike(other: ModelVersion, version: ModelVersion) -> bool:
    """Say whether load times of one tell those of the other: the weights do, and without weights the options."""
    if (other.framework, other.artifact.uri) != (version.framework, version.artifact.uri):
        return False
    return bool(version.artifact.uri) or other.options == version.options


def scaling_of(wanted: DeployRequest) -> Scaling:
    """Return the bounds and pace that are asked for."""
    hardware, scaling = wanted.hardware, wanted.scaling
    idle_s = scaling.scale_to_zero_after_idle_seconds
    return Scaling(
        min_replicas=hardware.min_replicas,
        max_replicas=hardware.max_replicas or max(1, hardware.min_replicas),
        scale_to_zero=scaling.scale_to_zero,
        idle_s=Scaling().idle_s if idle_s is msgspec.UNSET else idle_s,
        metric=scaling.metric,
        target_value=scaling.target_value,
    )


def autoscale_of(wanted: DeployRequest) -> tuple[Autoscale, list[Fault]]:
    """Return how the size is to be decided, and what is wrong with that."""
    named_s = wanted.scaling.scale_to_zero_after_idle_seconds
    return changed_autoscale(wanted.autoscale, Autoscale(), scaling_of(wanted), idle_s=named_s)
