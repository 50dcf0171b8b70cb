"""Uploaded content as the artifact of an order: ``upload:sha256:<hex>``, for whoever uploaded it."""

import asyncio
import re

from modelyard.control.api.artifact_sources import ArtifactSource
from modelyard.control.api.faults import Fault
from modelyard.control.context import Context
from modelyard.domain.tenants import Identity
from modelyard.domain.uploads import upload_digest
from modelyard.engines import Engine
from modelyard.formats.folder import facts_of

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LOOK_TIMEOUT_S = 10.0


async def read_uploaded(
    context: Context, identity: Identity, engine: Engine, reference: str, *, is_adapter: bool = False
) -> tuple[ArtifactSource, list[Fault]]:
    """Return the content that ``reference`` names, and what is wrong with it.

    To know a digest is not to have the bytes: only a tenant that sent all of them may deploy them.
    """
    try:
        return await _read(context, identity, None if is_adapter else engine, reference), []
    except TimeoutError:
        reason = "the file could not be read in time"
    except (OSError, ValueError) as error:
        reason = str(error)
    return ArtifactSource(), [Fault("model_artifact", reason)]


async def _read(context: Context, identity: Identity, engine: Engine | None, reference: str) -> ArtifactSource:
    digest = upload_digest(reference)
    if engine is not None and not engine.needs_artifact:
        raise ValueError(f"the engine '{engine.name}' loads no artifact; leave it out")
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError("write upload:sha256: and 64 lower-case hex digits")
    desk = context.uploads
    upload = await desk.store.uploaded(digest, tenant_id=identity.visible_tenant)
    if upload is None:
        raise ValueError("you have no complete upload of this digest; 'modelyard models upload' makes one")
    files = await asyncio.to_thread(desk.files_of, upload)
    if files is None:
        raise ValueError("the uploaded bytes are gone; upload them again")
    async with asyncio.timeout(_LOOK_TIMEOUT_S):
        if engine is not None and not upload.files:
            # What a folder is to its engine is seen when it is laid out, before its first replica starts.
            await asyncio.to_thread(engine.check_artifact, files["model"])
        facts = await asyncio.to_thread(facts_of, files)
    return ArtifactSource(reference, upload.size_bytes, digest, facts, upload.files)
