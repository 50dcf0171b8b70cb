"""Files of this machine: ``file:///path`` and absolute paths, one file or the folder of a model."""

import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from modelyard.control.artifacts.errors import ArtifactError, ChangedError
from modelyard.control.artifacts.names import FILES_MAX, is_taken, is_weights
from modelyard.control.artifacts.sources import Listing, SourceFile
from modelyard.control.artifacts.threads import abandonable

CHUNK_BYTES = 1024 * 1024


class LocalSource:
    """One path of this machine."""

    parallel = 1

    def __init__(self, path: Path) -> None:
        self._path = path

    async def list(self) -> Listing:
        """Return the file, or the files of the folder that make up a model."""
        try:
            return await abandonable(self._list)
        except OSError as error:
            raise _error(self._path, error) from error

    def _list(self) -> Listing:
        real = self._path.resolve(strict=True)
        if not real.is_dir():
            descriptor = _open_regular(real)
            os.close(descriptor)
            return Listing(real.as_uri(), (_file_of(real, "model"),))
        files = tuple(_file_of(real / path, path) for path in sorted(_paths_in(real)))
        if not any(is_weights(file.path) for file in files):
            raise ArtifactError(f"the folder {real} holds no .safetensors, .gguf or .onnx file")
        return Listing(real.as_uri(), files, is_folder=True)

    @asynccontextmanager
    async def read(self, file: SourceFile, start: int, end: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a range of a file."""
        path = Path(file.location)
        try:
            descriptor = await abandonable(_open_regular, path)
        except OSError as error:
            raise _error(path, error) from error
        try:
            if _mark_of(os.fstat(descriptor)) != file.mark:
                raise ChangedError(str(path))
            yield _chunks(descriptor, path, start, end)
            if _mark_of(os.fstat(descriptor)) != file.mark:
                raise ChangedError(str(path))
        finally:
            os.close(descriptor)


def local_path(uri: str) -> Path | None:
    """Return the path that ``uri`` names on this machine, None when it is of another kind.

    Raises:
        ArtifactError: it looks like one, but is none.
    """
    if uri.startswith("/"):
        path = uri
    else:
        parts = urlsplit(uri)
        if parts.scheme != "file":
            return None
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ArtifactError("a local file is file:///path, without a host, '?' and '#' (write %3F and %23)")
        path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise ArtifactError("give file:///path or an absolute path of this machine")
    return Path(path)


async def _chunks(descriptor: int, path: Path, start: int, end: int | None) -> AsyncIterator[bytes]:
    at = start
    while end is None or at < end:
        length = CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - at)
        try:
            chunk = await abandonable(os.pread, descriptor, length, at)
        except OSError as error:
            raise _error(path, error) from error
        if not chunk:
            return
        at += len(chunk)
        yield chunk


def _paths_in(root: Path) -> Iterator[str]:
    """Yield the paths of what is taken of a folder; links are followed inside it only."""
    count = 0
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            entry = Path(folder) / name
            path = entry.relative_to(root).as_posix()
            if not is_taken(path):
                continue
            if not entry.resolve(strict=True).is_relative_to(root):
                raise ArtifactError(f"{path} is a link that leads out of the folder; put the file itself there")
            count += 1
            if count > FILES_MAX:
                raise ArtifactError(f"the folder holds more than {FILES_MAX} files")
            yield path


def _file_of(file: Path, path: str) -> SourceFile:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ArtifactError(f"{file} is not a regular file")
    return SourceFile(path, str(file.resolve(strict=True)), found.st_size, mark=_mark_of(found))


def _mark_of(found: os.stat_result) -> str:
    return f"{found.st_dev}-{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"


def _open_regular(path: Path) -> int:
    """Open without waiting on a pipe or touching a device; a link here was resolved before."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArtifactError(f"{path} is not a regular file")
    return descriptor


def _error(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"{path} cannot be read: {error.strerror or 'input/output error'}")
