"""Sending a file to the platform by parts: finds what is there already, and sends the rest, several parts at once.

What is sent is known by its digest, so that the same command goes on after
Ctrl-C, a crash or a lost line, and sends nothing of what the platform has.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from io import RawIOBase
from pathlib import Path
from threading import Event
from typing import IO, cast

from modelyard.cli.bars import ByteBar
from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import PAGE, Platform, segment
from modelyard.cli.output import Item, ProgressLine, remark

UPLOADS = "/v1/uploads/artifacts"
FOLDERS = "/v1/uploads/folders"
NAME_MAX = 96
LEFT_TOLD_MAX = 5
TRIES_MAX = 5
PAUSE_S = 0.5
BLOCK_BYTES = 1024 * 1024
COMPLETE_PAUSE_S = 1.0


def upload(platform: Platform, file: Path, *, name: str, parallel: int) -> Item:
    """Send ``file`` unless the platform has it; return the complete upload.

    Raises:
        Failure: the file cannot be read, or the platform refuses it or is gone; the same call goes on later.
    """
    size = _size_of(file)
    digest = digest_of(file, size)
    found = _find(platform, digest, size)
    if found is None:
        found = platform.post(UPLOADS, {"name": name, "size_bytes": size, "digest": digest})
    if found["status"] == "open":
        _send_parts(platform, file, found, parallel=parallel)
    while found["status"] != "complete":
        line = ProgressLine()
        line.show(f"{name}: the platform checks it")
        found = platform.post(f"{UPLOADS}/{segment(found['id'])}/complete", {})
        line.clear()
        if found["status"] != "complete":
            time.sleep(COMPLETE_PAUSE_S)
    return found


def upload_folder(platform: Platform, folder: Path, *, name: str, parallel: int) -> Item:
    """Send the files of a model's folder, each as an upload of its own; return the artifact that they make.

    Raises:
        Failure: as ``upload``, or the folder holds no model.
    """
    files = files_in(folder)
    digests = {}
    for path, file in files.items():
        digests[path] = str(upload(platform, file, name=f"{name}.{file.name}"[:NAME_MAX], parallel=parallel)["digest"])
    order = {"name": name, "files": [{"path": path, "digest": digest} for path, digest in digests.items()]}
    made: Item = platform.post(FOLDERS, order)
    return made


def files_in(folder: Path) -> dict[str, Path]:
    """Return what a model's folder is made of, by path: weights that hold no code, and the texts beside them.

    Raises:
        Failure: there are no weights among its files.
    """
    from modelyard.control.artifacts.names import is_taken, is_weights

    every = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    taken = {path: file for path, file in every.items() if is_taken(path) and file.stat().st_size}
    if not any(is_weights(path) for path in taken):
        raise Failure(f"The folder {folder} holds no .safetensors, .gguf or .onnx file.", Exit.USAGE)
    if left := sorted(every.keys() - taken):
        remark(f"Not sent, for it is no part of a model: {', '.join(left[:LEFT_TOLD_MAX])}.")
    return taken


def manifest_of(folder: Path) -> str:
    """Return the digest of a folder as the platform counts it."""
    from modelyard.control.artifacts.contents import manifest_digest
    from modelyard.domain.catalog import ArtifactFile

    parts = []
    for path, file in files_in(folder).items():
        size = file.stat().st_size
        parts.append(ArtifactFile(path, digest_of(file, size), size))
    return manifest_digest(tuple(parts))


def digest_of(file: Path, size: int) -> str:
    """Return the digest of a file, with a bar.

    Raises:
        Failure: it cannot be read.
    """
    bar = ByteBar(f"hashing {file.name}", size)
    hasher = hashlib.sha256()
    try:
        with file.open("rb", buffering=0) as reader:
            while block := reader.read(BLOCK_BYTES):
                hasher.update(block)
                bar.add(len(block))
    except OSError as error:
        raise Failure(f"Cannot read {file}: {error.strerror}.") from error
    finally:
        bar.close()
    return f"sha256:{hasher.hexdigest()}"


def _size_of(file: Path) -> int:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise Failure(f"Cannot read {file}: {error.strerror}. Check the path.", Exit.NOT_FOUND) from error
    if not file.is_file() or not size:
        raise Failure(f"{file} is {'empty' if file.is_file() else 'no file'}; a model is one file with content.")
    return size


def _find(platform: Platform, digest: str, size: int) -> Item | None:
    """Return the upload of this content that is the furthest."""
    found = [one for one in platform.all(UPLOADS, digest=digest, limit=PAGE) if one["size_bytes"] == size]
    return max(found, key=lambda one: (one["status"] != "open", one["received_bytes"]), default=None)


def _send_parts(platform: Platform, file: Path, upload: Item, *, parallel: int) -> None:
    missing = sorted(set(range(1, upload["part_count"] + 1)) - set(upload["parts"]))
    bar = ByteBar(f"uploading {file.name}", upload["size_bytes"], done=upload["received_bytes"])
    stop = Event()
    pool = ThreadPoolExecutor(max(1, parallel))
    try:
        tasks = [pool.submit(_send_part, platform, file, upload, number, bar, stop) for number in missing]
        done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        # Also after Ctrl-C: what is being sent ends within a block, and the rest is not begun.
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        bar.close()


def _send_part(platform: Platform, file: Path, upload: Item, number: int, bar: ByteBar, stop: Event) -> None:
    """Send a part, again where the line or the platform was lost for a while."""
    first = (number - 1) * int(upload["part_bytes"])
    size = min(int(upload["part_bytes"]), int(upload["size_bytes"]) - first)
    path = f"{UPLOADS}/{segment(upload['id'])}/parts/{number}"
    pause_s = PAUSE_S
    for left in reversed(range(TRIES_MAX)):
        with file.open("rb", buffering=0) as reader:
            content = _Slice(reader, first, size, bar.add, stop)
            try:
                platform.put(path, cast("IO[bytes]", content), size, {})
            except Failure as error:
                bar.add(-content.sent)
                if not left or error.exit_code is not Exit.UNAVAILABLE or stop.wait(pause_s):
                    raise
                pause_s *= 2
            else:
                return


class _Slice(RawIOBase):
    """A part of a file as something to be read once, which counts what was."""

    def __init__(self, reader: IO[bytes] | RawIOBase, first: int, size: int, sent: Callable[[int], None], stop: Event):
        super().__init__()
        reader.seek(first)
        self._reader = reader
        self._left = size
        self._tell = sent
        self._stop = stop
        self.sent = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        if self._stop.is_set():
            raise Failure("The upload was stopped; the same command goes on with it.", Exit.INTERRUPTED)
        block = self._reader.read(min(self._left, BLOCK_BYTES if size < 0 else size)) or b""
        if self._left and not block:
            raise Failure("The file became shorter while it was sent. Start again.")
        self._left -= len(block)
        self.sent += len(block)
        self._tell(len(block))
        return block
