"""The registry: every version of every model, as it was deployed."""

from typing import Annotated

import msgspec

from modelyard.control.api.access import missing
from modelyard.control.context import Context
from modelyard.domain.catalog import ArtifactFile, ModelVersion, VersionStatus
from modelyard.domain.facts import ModelFacts
from modelyard.domain.tenants import Scope
from modelyard.engines import Options
from modelyard.web.paging import LIMIT_DEFAULT, After, Limit, Page, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route


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
    owner_id: str
    created_at: int
    facts: ModelFacts
    """What the artifact's header says; empty before it was read."""
    files: tuple[ArtifactFile, ...]
    """The files of an artifact of several."""
    base_id: str
    """The version that this one, an adapter, is loaded onto."""
    parent_id: str
    """The version that this one came after."""


class RegistryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which versions."""

    limit: Limit = LIMIT_DEFAULT
    after: After = ""
    name: Annotated[str, msgspec.Meta(description="Only versions of this model.")] = ""


class Registry:
    """The routes of the registry."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, manage = "/v1/registry/models", "/v1/registry/models/{model:path}", Scope.MANAGE
        return [
            Route("GET", every, manage, "List model versions", self.page, Empty, RegistryQuery, Page[VersionView]),
            Route("GET", one, manage, "Get a version by id, or a model's newest", self.get, Empty, Empty, VersionView),
        ]

    async def page(self, call: Call[Empty, RegistryQuery]) -> Page[VersionView]:
        """Return the versions of the caller's tenant, or all for an admin."""
        query = call.query
        versions = await self._context.store.versions(tenant_id=call.identity.visible_tenant)
        wanted = [version for version in versions if query.name in ("", version.name)]
        rows, has_more = page_of(wanted, limit=query.limit, after=query.after, id_of=lambda version: version.id)
        return Page([_view(version) for version in rows], has_more)

    async def get(self, call: Call[Empty, Empty]) -> VersionView:
        """Return one version."""
        reference = call.path("model")
        versions = await self._context.store.versions(tenant_id=call.identity.visible_tenant)
        seen = [one for one in versions if reference in (one.id, one.name)]

        def preference(one: ModelVersion) -> tuple[bool, bool, int, int, str]:
            own = one.tenant_id == call.identity.tenant_id
            return one.id == reference, own, one.created_at, len(one.version), one.version

        if seen:
            return _view(max(seen, key=preference))
        raise missing("model", reference)


def _view(version: ModelVersion) -> VersionView:
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
        owner_id=version.tenant_id,
        created_at=version.created_at,
        facts=version.facts,
        files=version.artifact.files,
        base_id=version.base_id,
        parent_id=version.parent_id,
    )
