"""The registry: every version of every model, as it was deployed."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from modelyard.control.api.access import missing
from modelyard.control.api.deploy_spec import BASE, hardware_faults, name_faults
from modelyard.control.api.faults import Fault, check_all
from modelyard.control.api.registered import reference_of
from modelyard.control.api.versions import examine, make_version
from modelyard.control.context import Context
from modelyard.control.holding import real_kinds
from modelyard.domain.catalog import ArtifactFile, ModelVersion, VersionStatus
from modelyard.domain.facts import ModelFacts
from modelyard.domain.tenants import Identity, Scope
from modelyard.engines import Options
from modelyard.errors import conflict
from modelyard.stores import AlreadyExistsError
from modelyard.web.paging import LIMIT_DEFAULT, After, Limit, Page, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

ADAPTERS_TOLD_MAX = 5
EXAMPLE = {"model_name": "smol", "framework": "llamacpp", "model_artifact": "file:///models/smollm2-135m-q8_0.gguf"}


class GpuRequirement(msgspec.Struct, frozen=True):
    """Accelerators of one replica."""

    type: str
    count: int


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable version: the source's row of ``model_registry``."""

    id: str
    object: str = "model.version"
    model_id: str
    name: str
    version: str
    framework: str
    artifact_path: str
    artifact_digest: str
    artifact_size: int
    config: Options
    gpu_requirement: GpuRequirement
    memory_required: int
    status: VersionStatus
    base_id: str
    base: str
    """NAME@VERSION that it is loaded onto, of an adapter."""
    parent_id: str
    parent: str
    """The version that it came after under the same name."""
    owner_id: str
    created_at: int
    facts: ModelFacts
    """What the artifact's header says; empty before it was read."""
    files: tuple[ArtifactFile, ...]
    """The files of an artifact of several."""


class RegistryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which versions."""

    limit: Limit = LIMIT_DEFAULT
    after: After = ""
    name: Annotated[str, msgspec.Meta(description="Only versions of this model.")] = ""


class GpuOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replica runs on."""

    gpu_type: str = "cpu"
    gpu_count: int = 1


class RegisterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version to be stored without an endpoint."""

    model_name: Annotated[str, msgspec.Meta(description="The model that it is a version of.")]
    framework: Annotated[
        str, msgspec.Meta(description="The engine, like 'llamacpp'; an adapter has that of its base.")
    ] = ""
    model_artifact: Annotated[str, msgspec.Meta(description="As in a deployment.")] = ""
    version: Annotated[str | None, msgspec.Meta(description="Left out: the next of v1, v2, …")] = None
    options: Annotated[Options, msgspec.Meta(description="The engine's own settings.")] = {}
    base: Annotated[str, msgspec.Meta(description=BASE)] = ""
    hardware: GpuOrder = GpuOrder()


class DeletedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: str = "model.version"
    deleted: bool = True


class Registry:
    """The routes of the registry."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        add, register = "Register a version", self.register
        every, one, manage = "/v1/registry/models", "/v1/registry/models/{model:path}", Scope.MANAGE
        return [
            Route("GET", every, manage, "List model versions", self.page, Empty, RegistryQuery, Page[VersionView]),
            Route("POST", every, manage, add, register, *_REGISTERING, 201, EXAMPLE, gathers=True),
            Route("DELETE", one, manage, "Delete a version by id", self.delete, Empty, Empty, DeletedVersion),
            Route("GET", one, manage, "Get a version by id, or a model's newest", self.get, Empty, Empty, VersionView),
        ]

    async def page(self, call: Call[Empty, RegistryQuery]) -> Page[VersionView]:
        """Return the versions of the caller's tenant, or all for an admin."""
        query = call.query
        every = await self._versions()
        seen = call.identity.visible_tenant
        wanted = [one for one in every if seen in (None, one.tenant_id) and query.name in ("", one.name)]
        rows, has_more = page_of(wanted, limit=query.limit, after=query.after, id_of=lambda version: version.id)
        return Page([_view(version, every) for version in rows], has_more)

    async def get(self, call: Call[Empty, Empty]) -> VersionView:
        """Return one version."""
        reference = call.path("model")
        every = await self._versions()
        visible = call.identity.visible_tenant
        seen = [
            one
            for one in every
            if visible in (None, one.tenant_id) and reference in (one.id, one.name, reference_of(one))
        ]

        def preference(one: ModelVersion) -> tuple[bool, bool, int, int, str]:
            own = one.tenant_id == call.identity.tenant_id
            return one.id == reference, own, one.created_at, len(one.version), one.version

        if seen:
            return _view(max(seen, key=preference), every)
        raise missing("model", reference)

    async def _versions(self) -> list[ModelVersion]:
        """Return all versions; one whose endpoint went before it was ready is not ``deploying`` any more."""
        store = self._context.store
        every = await store.versions()
        if all(one.status is not VersionStatus.DEPLOYING for one in every):
            return list(every)
        endpoints = [one for one in await store.endpoints() if not one.is_deleted]
        deployed = {release.version_id for endpoint in endpoints for release in endpoint.releases}
        return [
            msgspec.structs.replace(one, status=VersionStatus.REGISTERED)
            if one.status is VersionStatus.DEPLOYING and one.id not in deployed
            else one
            for one in every
        ]

    async def register(self, call: Call[RegisterRequest, Empty]) -> VersionView:
        """Store a version that nothing runs yet."""
        context, wanted = self._context, call.body
        findings = await examine(context, call.identity, wanted, is_deployed=False)
        kinds = real_kinds(await context.fleet.nodes())
        faults = [*name_faults(wanted.model_name), *hardware_faults(wanted.hardware, findings.engine, kinds)]
        if findings.registered is not None:
            faults.append(Fault("model_artifact", "it names a version that is registered already"))
        check_all("This version cannot be registered.", call.flaws, [*faults, *findings.faults])
        version = await make_version(
            context,
            wanted,
            findings,
            tenant_id=call.identity.tenant_id,
            name=wanted.model_name,
            gpus=(wanted.hardware.gpu_type, wanted.hardware.gpu_count),
        )
        try:
            await context.store.add_version(version)
        except AlreadyExistsError as error:
            raise conflict(f"{error}. Choose another version.", param="version") from None
        return _view(version, await context.store.versions())

    async def delete(self, call: Call[Empty, Empty]) -> DeletedVersion:
        """Forget a version that nothing uses; its artifact goes when no other has it."""
        store, reference = self._context.store, call.path("model")
        versions = await store.versions(tenant_id=call.identity.visible_tenant)
        version = next((one for one in versions if one.id == reference), None)
        if version is None:
            raise missing("model version", reference)
        async with self._context.changing:
            users = [
                endpoint.name
                for endpoint in await store.endpoints()
                if any(release.version_id == version.id for release in endpoint.releases)
            ]
            if users or not await store.remove_version(version.id):
                by = f"endpoint '{users[0]}'" if users else await self._user_of(version, call.identity)
                raise conflict(f"Version '{reference_of(version)}' is used by {by}. Remove that first.")
        return DeletedVersion(id=version.id)

    async def _user_of(self, version: ModelVersion, identity: Identity) -> str:
        """Return what keeps a version that no endpoint has: adapters of it, or a replica."""
        adapters = [one for one in await self._context.store.versions() if one.base_id == version.id]
        mine = [reference_of(one) for one in adapters if identity.visible_tenant in (None, one.tenant_id)]
        if not adapters:
            return "a replica that still runs"
        told = ", ".join(mine[:ADAPTERS_TOLD_MAX]) or f"{len(adapters)} of other tenants"
        return f"adapters of it ({told})"


_REGISTERING = (RegisterRequest, Empty, VersionView)


def _view(version: ModelVersion, every: Iterable[ModelVersion]) -> VersionView:
    named = {one.id: one for one in every if one.id in (version.base_id, version.parent_id)}
    base, parent = named.get(version.base_id), named.get(version.parent_id)
    return VersionView(
        id=version.id,
        model_id=version.id,
        name=version.name,
        version=version.version,
        framework=version.framework,
        artifact_path=version.artifact.uri,
        artifact_digest=version.artifact.digest,
        artifact_size=version.artifact.size_bytes,
        config=version.options,
        gpu_requirement=GpuRequirement(version.gpu_type, version.gpu_count),
        memory_required=version.memory_bytes,
        status=version.status,
        base_id=version.base_id,
        base=reference_of(base) if base else "",
        parent_id=parent.id if parent else "",
        parent=parent.version if parent else "",
        owner_id=version.tenant_id,
        created_at=version.created_at,
        facts=version.facts,
        files=version.artifact.files,
    )
