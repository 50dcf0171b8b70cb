"""The registry's nouns: models, their immutable versions, and artifacts."""

import re
from enum import StrEnum

import msgspec

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}(/[a-z0-9][a-z0-9._-]{0,95})?", re.IGNORECASE)
"""What models and endpoints may be called; nothing that could mean a path, a URL or a shell word."""


class VersionStatus(StrEnum):
    """The source's ``model_registry.status``."""

    REGISTERED = "registered"
    DEPLOYING = "deploying"
    ACTIVE = "active"


class Artifact(msgspec.Struct, frozen=True):
    """Files of a model by content. ``digest`` is ``sha256:<hex>``, or empty for an engine that needs none."""

    uri: str
    digest: str = ""
    size_bytes: int = 0


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
