"""Where a deployment's weights come from, and a first look at them.

What is named is listed at its source, and its first bytes are read, now: a
wrong path, a private address or a pickle is an answer and not a failed
endpoint a minute later. What cannot be told from that is left to the fetch.
Only admins may name what the platform reads with rights of its own.
"""

import asyncio
from pathlib import Path

import msgspec

from modelyard.control.api.faults import Fault
from modelyard.control.artifacts import ArtifactError, Sources
from modelyard.control.artifacts.names import HEAD_BYTES, foreign, is_weights
from modelyard.control.artifacts.sources import Listing, Source
from modelyard.control.artifacts.sources.local import local_path
from modelyard.control.artifacts.sources.schemes import is_local
from modelyard.control.artifacts.threads import abandonable
from modelyard.domain.catalog import ArtifactFile
from modelyard.domain.facts import ModelFacts
from modelyard.engines import Engine
from modelyard.formats.folder import facts_of

LOOK_TIMEOUT_S = 10.0
"""A network file system may hang, a server stay silent; the caller must not."""


class ArtifactSource(msgspec.Struct, frozen=True):
    """The weights of a deployment, not yet stored; empty for an engine that needs none."""

    uri: str = ""
    size_bytes: int = 0
    digest: str = ""
    """What it has, where that is known."""
    facts: ModelFacts = ModelFacts()
    files: tuple[ArtifactFile, ...] = ()
    """Of an uploaded folder."""


async def read_source(
    engine: Engine, reference: str, sources: Sources, *, is_admin: bool, is_adapter: bool = False
) -> tuple[ArtifactSource, list[Fault]]:
    """Return what ``reference`` names, and what is wrong with it; an adapter is not what engines say of models."""
    try:
        if not (is_adapter and reference):
            _expect_reference(engine, reference)
            if not engine.needs_artifact:
                return ArtifactSource(), []
        sources.check_permission(reference, is_admin=is_admin)
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            return await _look(None if is_adapter else engine, reference, sources), []
    except TimeoutError:
        reason = f"its source did not answer within {LOOK_TIMEOUT_S:g} s"
    except OSError as error:
        reason = f"the file cannot be read: {error.strerror or 'input/output error'}"
    except (ArtifactError, ValueError) as error:
        reason = str(error)
    return ArtifactSource(), [Fault("model_artifact", reason)]


def reference_faults(reference: str, sources: Sources, *, is_admin: bool) -> list[Fault]:
    """Return what is wrong with ``reference`` whatever the engine; nothing is read."""
    try:
        if reference:
            sources.check_permission(reference, is_admin=is_admin)
            sources.source(reference)
    except ArtifactError as error:
        return [Fault("model_artifact", str(error))]
    return []


def _expect_reference(engine: Engine, reference: str) -> None:
    if engine.needs_artifact and not reference:
        raise ValueError(f"the engine '{engine.name}' needs one, like file:///models/model.gguf or hf://org/name")
    if reference and not engine.needs_artifact:
        raise ValueError(f"the engine '{engine.name}' loads no artifact; leave it out")


async def _look(engine: Engine | None, reference: str, sources: Sources) -> ArtifactSource:
    source = sources.source(reference)
    listing = await source.list()
    if listing.size_bytes > sources.bytes_max:
        raise ValueError(
            f"it has {listing.size_bytes:,} bytes, more than fetch.artifact_bytes_max allows ({sources.bytes_max:,})"
        )
    facts = await abandonable(_check, engine, listing) if is_local(reference) else ModelFacts()
    # A wheel is a zip file, and what it carries shows only when it is here.
    if listing.member is None and (kind := foreign(await _head(source, listing))):
        raise ValueError(f"it is {kind}")
    return ArtifactSource(listing.uri, listing.size_bytes, facts=facts)


async def _head(source: Source, listing: Listing) -> bytes:
    """Return the first bytes of the first file of weights."""
    file = next((file for file in listing.files if is_weights(file.path)), listing.files[0])
    if file.size_bytes == 0:
        raise ValueError("it is empty")
    end = min(HEAD_BYTES, file.size_bytes) if file.has_ranges and file.size_bytes is not None else None
    head = bytearray()
    async with source.read(file, 0, end) as chunks:
        async for chunk in chunks:
            head += chunk
            if len(head) >= HEAD_BYTES:
                break
    return bytes(head[:HEAD_BYTES])


def _check(engine: Engine | None, listing: Listing) -> ModelFacts:
    """Let the engine look at files of this machine, and return what their headers say."""
    place = local_path(listing.uri) if listing.is_folder else Path(listing.files[0].location)
    assert place is not None, "it is local"
    try:
        if engine is not None:
            engine.check_artifact(place)
    except IsADirectoryError:
        name = engine.name if engine is not None else ""
        raise ValueError(f"it is a folder, and the engine '{name}' loads one file; name the file") from None
    return facts_of({file.path: Path(file.location) for file in listing.files})
