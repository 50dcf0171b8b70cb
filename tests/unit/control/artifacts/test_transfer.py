"""However often a fetch is cut, refused or killed, what comes out in the end are the bytes of the source."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import digest_of

from modelyard.control.artifacts import ArtifactError
from modelyard.control.artifacts import transfer as transfers
from modelyard.control.artifacts.disk import Disk
from modelyard.control.artifacts.errors import ChangedError
from modelyard.control.artifacts.sources import Listing, SourceFile
from modelyard.control.artifacts.transfer import Transfer

PART = 100


class Flaky:
    """A source in memory; each read meets the next of ``troubles``: how many bytes come, and what happens then."""

    def __init__(self, content: bytes, troubles: list[tuple[int, str]], parallel: int) -> None:
        self.content = content
        self.troubles = troubles
        self.parallel = parallel
        self.given_bytes = 0

    async def list(self) -> Listing:
        return Listing("memory:", (SourceFile("model", "memory:", len(self.content), mark=digest_of(self.content)),))

    @asynccontextmanager
    async def read(self, file: SourceFile, start: int, end: int | None) -> AsyncIterator[AsyncIterator[bytes]]:
        if file.mark != digest_of(self.content):
            raise ChangedError("memory:")
        yield self._chunks(start, len(self.content) if end is None else end)

    async def _chunks(self, start: int, end: int) -> AsyncIterator[bytes]:
        stop, trouble = self.troubles.pop(0) if self.troubles else (end - start, "")
        for at in range(start, min(end, start + stop), 37):
            chunk = self.content[at : min(at + 37, end, start + stop)]
            self.given_bytes += len(chunk)
            yield chunk
            await asyncio.sleep(0)
        if trouble == "cut":
            raise ArtifactError("it was cut", is_transient=True)
        if trouble == "refuse":
            raise ArtifactError("it refuses")
        if trouble == "kill":
            raise SystemError("as if killed here")
        if trouble == "short":
            return


troubles = st.lists(
    st.tuples(st.integers(0, 150), st.sampled_from(["cut", "refuse", "kill", "short", "changed"])), max_size=12
)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(0, 1500), troubles=troubles, parallel=st.integers(1, 4), seed=st.integers(0, 9))
def test_bytes_are_those_of_one_content_however_often_it_is_cut(
    size: int, troubles: list[tuple[int, str]], parallel: int, seed: int
) -> None:
    async def run(folder: Path) -> None:
        source = Flaky(random.Random(seed).randbytes(size), list(troubles), parallel)
        for _ in range(len(troubles) + 2):
            listing = await source.list()
            listed = source.content
            seen: list[int] = []
            transfer = Transfer(
                source,
                listing.files[0],
                folder / "draft",
                disk=Disk(),
                part_bytes=PART,
                bytes_max=10**6,
                got=seen.append,
            )
            if source.troubles and source.troubles[0][1] == "changed":
                source.troubles.pop(0)
                source.content = source.content[::-1] + b"!"
            try:
                digest, got = await transfer.run()
            except (ArtifactError, SystemError):
                continue
            # Where nothing is left to be asked for (it is empty, or all here already) what was listed is what is had.
            content = (folder / "draft").read_bytes()
            assert content in (listed, source.content)
            assert (digest, got) == (digest_of(content), len(content))
            assert seen == sorted(seen), "progress never goes back within a try"
            return
        raise AssertionError("it never succeeded, though there were more tries than troubles")

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "PAUSE_S", 0.0)
        asyncio.run(run(Path(folder)))


async def test_what_was_noted_is_not_asked_for_again(tmp_path: Path) -> None:
    content = bytes(range(250)) * 8
    source = Flaky(content, [(PART, "")] * 12 + [(10, "refuse")], parallel=1)
    (file,) = (await source.list()).files

    def transfer() -> Transfer:
        return Transfer(
            source, file, tmp_path / "draft", disk=Disk(), part_bytes=PART, bytes_max=10**6, got=lambda _: None
        )

    with pytest.raises(ArtifactError, match="it refuses"):
        await transfer().run()
    source.given_bytes = 0
    assert (await transfer().run())[0] == digest_of(content)
    assert source.given_bytes == len(content) - 12 * PART


async def test_note_of_another_draft_vouches_for_nothing(tmp_path: Path) -> None:
    content = bytes(range(250)) * 8
    source = Flaky(content, [(PART, "")] * 5 + [(10, "refuse")], parallel=1)
    (file,) = (await source.list()).files
    draft = tmp_path / "draft"
    with pytest.raises(ArtifactError):
        await Transfer(source, file, draft, disk=Disk(), part_bytes=PART, bytes_max=10**6, got=lambda _: None).run()
    (tmp_path / "hold").write_bytes(b"")  # so that the next file gets another inode
    draft.rename(tmp_path / "old")
    digest, _ = await Transfer(
        source, file, draft, disk=Disk(), part_bytes=PART, bytes_max=10**6, got=lambda _: None
    ).run()
    assert digest == digest_of(content)
