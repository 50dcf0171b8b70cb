"""Where a deployment's weights come from, and a first look at them.

A file of the host is taken by reference and looked at now, so that a wrong
path or a wrong format is an answer and not a failed endpoint a minute later.
Only admins may name one: the controller would read it on their behalf.
"""

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from modelyard.control.api.faults import Fault
from modelyard.domain.facts import ModelFacts
from modelyard.engines import Engine
from modelyard.formats.folder import facts_of

_LOOK_TIMEOUT_S = 10.0
"""A network file system may hang; the caller must not."""
_URI_LENGTH_MAX = 4096


class ArtifactSource(msgspec.Struct, frozen=True):
    """The weights of a deployment, not yet stored; empty for an engine that needs none."""

    uri: str = ""
    size_bytes: int = 0
    digest: str = ""
    """What it has, where that is known."""
    facts: ModelFacts = ModelFacts()


async def read_source(engine: Engine, reference: str, *, is_admin: bool) -> tuple[ArtifactSource, list[Fault]]:
    """Return what ``reference`` names, and what is wrong with it."""
    try:
        file = _permitted(engine, reference, is_admin=is_admin)
        if file is None:
            return ArtifactSource(), []
        async with asyncio.timeout(_LOOK_TIMEOUT_S):
            return await asyncio.to_thread(_look, engine, file), []
    except TimeoutError:
        reason = "the file could not be read in time"
    except OSError as error:
        reason = f"the file cannot be read: {error.strerror or 'input/output error'}"
    except ValueError as error:
        reason = str(error)
    return ArtifactSource(), [Fault("model_artifact", reason)]


def _permitted(engine: Engine, reference: str, *, is_admin: bool) -> Path | None:
    """Return the file to look at, None when there is none to give; raises ``ValueError`` with the fault."""
    if not engine.needs_artifact:
        if reference:
            raise ValueError(f"the engine '{engine.name}' loads no artifact; leave it out")
        return None
    if not reference:
        raise ValueError(f"the engine '{engine.name}' needs one, like file:///models/model.gguf")
    file = _local_path(reference)
    if file is None:
        raise ValueError("give file:///path or an absolute path of this machine; other places are not supported")
    if not is_admin:
        raise ValueError("a file of the host needs a key with the scope 'admin'")
    return file


def _local_path(reference: str) -> Path | None:
    if len(reference) > _URI_LENGTH_MAX or "\0" in reference:
        return None
    if reference.startswith("/"):
        return Path(reference)
    try:
        parts = urlsplit(reference)
    except ValueError:
        return None
    path = unquote(parts.path)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        return None
    return Path(path)


def _look(engine: Engine, file: Path) -> ArtifactSource:
    file = file.resolve(strict=True)
    if not file.is_file():
        raise ValueError("it is not a regular file")
    with file.open("rb"):
        size = file.stat().st_size
    engine.check_artifact(file)
    return ArtifactSource(file.as_uri(), size, facts=facts_of({file.name: file}))
