"""Artifacts on this machine: fetched once, hashed while they stream in, kept by content.

A file is copied to a temporary name, hashed on the way, looked at by its
engine, synced and only then renamed to ``sha256/<hex>``: what has a digest for
a name is complete and checked, whatever was killed when. ``file://`` and
absolute paths are what can be fetched.
"""

import asyncio
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from modelyard.domain.catalog import Artifact
from modelyard.domain.endpoints import Stage

CHUNK_BYTES = 1024 * 1024
SUPPORTED = "file:///path/to/model and absolute paths of this machine"

Progressed = Callable[[Stage, int, int], None]
"""Called from a thread with the stage, the bytes done and the bytes of the whole."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class ArtifactError(Exception):
    """Why an artifact cannot be used, in our words."""


class ArtifactStore:
    """The files under ``root`` by content."""

    __slots__ = ("_root",)

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, artifact: Artifact) -> Path | None:
        """Return the file of ``artifact`` when it is here, complete."""
        match = _DIGEST.fullmatch(artifact.digest)
        if match is None:
            return None
        file = self._root / "sha256" / match[1]
        try:
            is_whole = file.stat().st_size == artifact.size_bytes
        except OSError:
            return None
        return file if is_whole else None

    def clear_leftovers(self) -> None:
        """Remove what copies left behind that a killed controller had begun; call before the first fetch. Blocks."""
        for leftover in self._folder("incoming").iterdir():
            leftover.unlink(missing_ok=True)

    async def fetch(
        self, artifact: Artifact, name: str, check: Callable[[Path], None], progressed: Progressed
    ) -> Artifact:
        """Bring ``artifact`` here and return it with digest and size; ``name`` is this fetch's, for a temporary file.

        Cancelling waits for the copying thread, which stops within a chunk.

        Raises:
            ArtifactError: it cannot be read, is not what the engine loads, or has another digest than expected.
        """
        source = local_path(artifact.uri)
        stop = threading.Event()
        copying = asyncio.get_running_loop().run_in_executor(
            None, self._fetch, source, artifact, name, check, progressed, stop
        )
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([copying])
            copying.exception()
            raise

    def _fetch(
        self,
        source: Path,
        artifact: Artifact,
        name: str,
        check: Callable[[Path], None],
        progressed: Progressed,
        stop: threading.Event,
    ) -> Artifact:
        draft = self._folder("incoming") / name
        try:
            # Looking before copying spares gigabytes for what is no model; what is looked at after counts.
            with _open_regular(source) as reader:
                _check(check, source)
                digest, size = _copy(reader, draft, progressed, stop)
            progressed(Stage.VERIFYING, size, size)
            if artifact.digest and artifact.digest != digest:
                raise ArtifactError(f"the artifact has the digest {digest}, expected was {artifact.digest}")
            _check(check, draft)
            draft.chmod(0o400)
            final = self._folder("sha256") / digest.removeprefix("sha256:")
            draft.rename(final)
            _sync_folder(final.parent)
        except OSError as error:
            raise ArtifactError(f"the artifact {artifact.uri} cannot be copied: {error.strerror or error}") from error
        finally:
            draft.unlink(missing_ok=True)
        return Artifact(artifact.uri, digest, size)

    async def adopt(self, draft: Path, name: str, *, digest: str = "") -> Artifact:
        """Take over the whole file ``draft`` of the same file system, as ``upload:<name>``; ``draft`` is gone then.

        ``digest`` is its own where the caller hashed it. Content that is here already stays as it is.

        Raises:
            ArtifactError: it cannot be read or renamed.
        """
        return await asyncio.to_thread(self._adopt, draft, name, digest)

    def _adopt(self, draft: Path, name: str, digest: str) -> Artifact:
        try:
            if not digest:
                with draft.open("rb") as reader:
                    digest = f"sha256:{hashlib.file_digest(reader, 'sha256').hexdigest()}"
            size = draft.stat().st_size
            artifact = Artifact(f"upload:{name}", digest, size)
            if self.path(artifact) is None:
                final = self._folder("sha256") / digest.removeprefix("sha256:")
                draft.chmod(0o400)
                draft.rename(final)
                _sync_folder(final.parent)
        except OSError as error:
            raise ArtifactError(f"the upload cannot be stored: {error.strerror or error}") from error
        finally:
            draft.unlink(missing_ok=True)
        return artifact

    def _folder(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


def local_path(uri: str) -> Path:
    """Return the path that ``uri`` names.

    Raises:
        ArtifactError: it names something that cannot be fetched.
    """
    if not uri:
        raise ArtifactError("the version has no artifact, and its engine needs one")
    if uri.startswith("/"):
        return Path(uri)
    if uri.startswith("upload:"):
        raise ArtifactError("the uploaded artifact is not here any more; upload it again")
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return Path(unquote(parts.path))
    what = f"artifacts of the kind '{parts.scheme}://'" if parts.scheme else f"the artifact '{uri}'"
    raise ArtifactError(f"{what} cannot be fetched; supported are {SUPPORTED}")


def _open_regular(source: Path) -> BinaryIO:
    """Open without waiting on a pipe or touching a device."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArtifactError(f"{source} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _check(check: Callable[[Path], None], file: Path) -> None:
    try:
        check(file)
    except ValueError as error:
        raise ArtifactError(str(error)) from error


def _copy(reader: BinaryIO, draft: Path, progressed: Progressed, stop: threading.Event) -> tuple[str, int]:
    whole = os.fstat(reader.fileno()).st_size
    hasher = hashlib.sha256()
    done = 0
    with draft.open("wb") as writer:
        while chunk := reader.read(CHUNK_BYTES):
            if stop.is_set():
                raise ArtifactError("the fetch was stopped")
            hasher.update(chunk)
            writer.write(chunk)
            done += len(chunk)
            progressed(Stage.DOWNLOADING, done, max(whole, done))
        writer.flush()
        os.fsync(writer.fileno())
    return f"sha256:{hasher.hexdigest()}", done


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
