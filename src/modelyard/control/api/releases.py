"""Releases: further versions under an endpoint's name, with a share of its traffic, copies of it, or what is left."""

from typing import Annotated

import msgspec

from modelyard.control.api.access import missing
from modelyard.control.api.deploy_spec import ARTIFACT, BASE, seat_faults
from modelyard.control.api.endpoint_changes import release_named
from modelyard.control.api.endpoint_views import EndpointView
from modelyard.control.api.endpoints import find_living, whole_view
from modelyard.control.api.faults import Fault, check_all
from modelyard.control.api.hosting import draft_of, stranding, why_not
from modelyard.control.api.versions import Findings, examine, make_version
from modelyard.control.context import Context
from modelyard.domain.endpoints import Endpoint, Release
from modelyard.domain.tenants import Scope
from modelyard.engines import Options
from modelyard.errors import conflict
from modelyard.policy.releases import WHOLE, SharesError, main_release, with_release, without_release
from modelyard.policy.rollouts import NotPossibleError, check_free, rolling, settled, stable_of
from modelyard.stores import AlreadyExistsError, Event, StoreUnavailableError
from modelyard.web.routes import AnyRoute, Call, Empty, Route

EXAMPLE = {
    "framework": "llamacpp",
    "model_artifact": "file:///models/smollm2-360m-instruct-q8_0.gguf",
    "shadow": 10,
}


class ReleaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version to add to an endpoint; one without a share, copies or a turn as fallback runs no replica."""

    framework: Annotated[
        str,
        msgspec.Meta(
            description="The engine, like 'llamacpp'; a registered version has its own, an adapter that of its base."
        ),
    ] = ""
    model_artifact: Annotated[str, msgspec.Meta(description=ARTIFACT)] = ""
    version: Annotated[str | None, msgspec.Meta(description="Left out: the next of v1, v2, …")] = None
    options: Annotated[Options, msgspec.Meta(description="The engine's own settings.")] = {}
    base: Annotated[str, msgspec.Meta(description=BASE)] = ""
    weight: Annotated[
        int,
        msgspec.Meta(
            description="Percent of the requests that it answers; the other releases share the rest. "
            "With 100 it takes over replica by replica."
        ),
    ] = 0
    shadow: Annotated[
        int, msgspec.Meta(description="Percent of the requests that are copied to it; nobody gets its answers.")
    ] = 0
    fallback: Annotated[
        int,
        msgspec.Meta(
            description="Its turn (1 first) to answer what the releases with weight have no room for, or none of "
            "them is there for; 0: never."
        ),
    ] = 0


_ADDING = (ReleaseRequest, Empty, EndpointView)


class Releases:
    """The routes of releases; they come before endpoints', whose names may hold slashes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, manage = "/v1/endpoints/{endpoint:path}/releases", Scope.MANAGE
        one, add, remove = f"{every}/{{version}}", "Add a release to an endpoint", "Take a release from an endpoint"
        return [
            Route("POST", every, manage, add, self.add, *_ADDING, 202, EXAMPLE, gathers=True),
            Route("DELETE", one, manage, remove, self.remove, Empty, Empty, EndpointView, 202),
        ]

    async def add(self, call: Call[ReleaseRequest, Empty]) -> EndpointView:
        """Store a version and give it its share; its replicas start beside those of the others."""
        context, wanted = self._context, call.body
        findings = await examine(context, call.identity, wanted)
        async with context.changing:
            endpoint = await find_living(context, call)
            await refuse_beside_rollout(context, endpoint)
            faults = [*findings.faults, *await self._guest_faults(endpoint, wanted, findings)]
            try:
                with_release(endpoint.releases, Release("", wanted.weight, wanted.shadow, wanted.fallback))
            except SharesError as error:
                faults.append(Fault(error.param, str(error)))
            if wanted.weight == WHOLE:
                await self._check_rolling(endpoint)
            check_all("This release cannot be added.", call.flaws, faults)
            endpoint, version_name = await self._add(endpoint, wanted, findings)
            share = f"shadows {wanted.shadow} %" if wanted.shadow else f"weight {wanted.weight}"
            if wanted.fallback:
                share = f"fallback {wanted.fallback}"
            if wanted.weight == WHOLE:
                share = "takes over replica by replica"
            await self._announce(endpoint, "release_added", f"version {version_name}, {share}")
        return await whole_view(context, call.request, endpoint)

    async def remove(self, call: Call[Empty, Empty]) -> EndpointView:
        """Take a release away; its requests are finished, and the other releases share what it had."""
        context, reference = self._context, call.path("version")
        async with context.changing:
            endpoint = await find_living(context, call)
            await refuse_beside_rollout(context, endpoint)
            names = {one.id: one.version for one in await context.store.versions(tenant_id=endpoint.tenant_id)}
            release = release_named(endpoint, reference, names)
            if release is None:
                raise missing("release", reference)
            try:
                releases = without_release(endpoint.releases, release.version_id)
            except SharesError as error:
                raise conflict(f"This release cannot be taken away: {error}.") from None
            endpoint = settled(msgspec.structs.replace(endpoint, releases=releases))
            name = names.get(release.version_id, release.version_id)
            await context.store.put_endpoint(endpoint)
            await self._announce(endpoint, "release_removed", f"version {name}, with key {call.identity.key_id}")
        return await whole_view(context, call.request, endpoint)

    async def _guest_faults(self, endpoint: Endpoint, wanted: ReleaseRequest, findings: Findings) -> list[Fault]:
        """Return why a version cannot be a release of an endpoint, as guests and hosts are different things."""
        context, engine, base = self._context, findings.engine, findings.base
        if engine is None:
            return []
        if not endpoint.host_id:
            if base is not None:
                return [Fault("base", f"'{endpoint.name}' has replicas of its own; deploy the adapter as an endpoint")]
            answers = not (wanted.shadow or wanted.fallback)
            new = findings.registered or draft_of(endpoint, engine, findings, wanted.options)
            return await stranding(context, endpoint, engine, new) if answers else []
        versions = {one.id: one for one in await context.store.versions()}
        main = versions.get(main_release(endpoint).version_id)
        if base is None and main is not None and main.base_id:
            return [Fault("base", f"'{endpoint.name}' is a guest: its versions are adapters; name the base")]
        host = next((one for one in await context.store.endpoints() if one.id == endpoint.host_id), None)
        if host is None or host.is_deleted:
            return [Fault("base", f"the host of '{endpoint.name}' is gone; deploy it on another one")]
        reason = why_not(host, engine, base, versions)
        faults = [Fault("base" if base else "model_artifact", reason)] if reason else []
        return [*faults, *seat_faults(wanted.options, engine)]

    async def _check_rolling(self, endpoint: Endpoint) -> None:
        names = {one.id: one.version for one in await self._context.store.versions(tenant_id=endpoint.tenant_id)}
        try:
            stable_of(endpoint, names)
        except NotPossibleError as error:
            raise conflict(f"The version cannot take over: {error}.", param="weight") from None

    async def _announce(self, endpoint: Endpoint, kind: str, reason: str) -> None:
        context = self._context
        context.wake()
        try:
            await context.store.add_event(Event(context.clock.unix_s(), endpoint.id, kind, reason))
            await context.refresh()
        except StoreUnavailableError:
            # It is stored, and to ask again would be refused: the woken pass tells the gateways.
            return

    async def _add(self, endpoint: Endpoint, wanted: ReleaseRequest, findings: Findings) -> tuple[Endpoint, str]:
        context = self._context
        versions = {one.id: one for one in await context.store.versions(tenant_id=endpoint.tenant_id)}
        first = versions.get(main_release(endpoint).version_id) if endpoint.releases else None
        version = await make_version(
            context,
            wanted,
            findings,
            tenant_id=endpoint.tenant_id,
            name=endpoint.name,
            gpus=(first.gpu_type, first.gpu_count) if first else ("cpu", 1),
        )
        if findings.registered is not None and version.id not in versions:
            raise conflict("The version was deleted meanwhile.", param="model_artifact")
        if any(release.version_id == version.id for release in endpoint.releases):
            raise conflict(f"The endpoint has version '{version.version}' already.", param="model_artifact")
        if wanted.weight == WHOLE:
            endpoint = rolling(endpoint, version.id, context.clock.unix_s())
        else:
            releases = with_release(
                endpoint.releases, Release(version.id, wanted.weight, wanted.shadow, wanted.fallback)
            )
            endpoint = msgspec.structs.replace(endpoint, releases=releases)
            endpoint = settled(endpoint) if wanted.weight else endpoint
        try:
            if findings.registered is not None:
                await context.store.put_endpoint(endpoint)
            else:
                await context.store.add_release(version, endpoint)
        except AlreadyExistsError as error:
            raise conflict(f"{error}. Choose another version.", param="version") from None
        return endpoint, version.version


async def refuse_beside_rollout(context: Context, endpoint: Endpoint) -> None:
    """Refuse to change releases while a rollout moves them.

    Raises:
        ApiError: 409.
    """
    names = {one.id: one.version for one in await context.store.versions(tenant_id=endpoint.tenant_id)}
    try:
        check_free(endpoint, names)
    except NotPossibleError as error:
        raise conflict(f"The releases of '{endpoint.name}' cannot be changed now: {error}.") from None
