"""The registry's nouns: models, their immutable versions, and artifacts."""

import re
from enum import StrEnum

import msgspec

from modelyard.domain.facts import ModelFacts

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}(/[a-z0-9][a-z0-9._-]{0,95})?", re.IGNORECASE)
"""What models and endpoints may be called; nothing that could mean a path, a URL or a shell word."""


class VersionStatus(StrEnum):
    """The source's ``model_registry.status``."""

    REGISTERED = "registered"
    DEPLOYING = "deploying"
    ACTIVE = "active"


class ArtifactFile(msgspec.Struct, frozen=True):
    """One file of an artifact of several; ``path`` is relative and plain (``config.json``, ``tokenizer/vocab.txt``)."""

    path: str
    digest: str
    size_bytes: int


class Artifact(msgspec.Struct, frozen=True):
    """Files of a model by content. ``digest`` is ``sha256:<hex>``, or empty for an engine that needs none.

    A single file has the digest of its content and no ``files``; several have that of their manifest (the JSON of
    ``files``, in order of their paths).
    """

    uri: str
    digest: str = ""
    size_bytes: int = 0
    files: tuple[ArtifactFile, ...] = ()


class ModelVersion(msgspec.Struct, frozen=True):
    """One immutable row of the source's ``model_registry``: artifact + engine + options.

    ``framework`` names the engine; ``options`` are that engine's own settings,
    already checked by it.
    """

    id: str
    tenant_id: str
    name: str
    version: str
    framework: str
    artifact: Artifact
    options: dict[str, str | int | float | bool]
    created_at: int
    status: VersionStatus = VersionStatus.REGISTERED
    gpu_type: str = "cpu"
    gpu_count: int = 1
    memory_bytes: int = 0
    facts: ModelFacts = ModelFacts()
    """What its artifact's header says; empty before it was read."""
    base_id: str = ""
    """The version that this one, an adapter, is loaded onto."""
    parent_id: str = ""
    """The version that this one came after under the same name: its lineage."""


def serves_as(running: ModelVersion, base: ModelVersion) -> bool:
    """Say whether an adapter of ``base`` can be loaded onto a replica of ``running``: the weights are the same.

    A version with other options is one, too. Where there are no weights, it is one of the same model.
    """
    if running.id == base.id:
        return True
    if running.framework != base.framework or running.base_id:
        return False
    mine, theirs = running.artifact, base.artifact
    if mine.digest and theirs.digest:
        return mine.digest == theirs.digest
    if mine.uri or theirs.uri:
        return mine.uri == theirs.uri
    return (running.tenant_id, running.name) == (base.tenant_id, base.name)
