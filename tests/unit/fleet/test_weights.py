"""A node's copies of weights: whole or not there, never above the limit, never taken from under an engine."""

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import accept, digest_of, ignore, open_store
from tests.support.waiting import eventually_async

from modelyard.clock import ManualClock
from modelyard.domain.catalog import Artifact
from modelyard.fleet.weights import CHUNK_BYTES, WeightCache, WeightsError


def weights(folder: Path, name: str, size: int) -> tuple[Artifact, Path]:
    """Make a file of ``size`` bytes and return it as an artifact."""
    file = folder / name
    file.write_bytes((name.encode() * size)[:size])
    return Artifact(f"file://{file}", digest_of(file.read_bytes()), size), file


def cache_of(folder: Path, limit_bytes: int = 1000) -> WeightCache:
    return WeightCache(folder / "cache", limit_bytes, ManualClock())


async def test_copy_is_made_once_and_found_again_by_the_next_controller(tmp_path: Path) -> None:
    artifact, source = weights(tmp_path, "a", 100)
    cache = cache_of(tmp_path)
    place = await cache.get(artifact, source)
    assert place.read_bytes() == source.read_bytes()
    shutil.move(source, source.with_suffix(".away"))
    assert await cache.get(artifact, source) == place
    (tmp_path / "cache" / "draft-x").write_bytes(b"half")
    again = cache_of(tmp_path)
    assert (again.digests(), again.used_bytes()) == ({artifact.digest}, 100)
    assert not (tmp_path / "cache" / "draft-x").exists()


async def test_folder_is_copied_whole(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"\x08" + bytes(100))
    (model / "sub" / "config.json").write_text("{}")
    store = open_store(tmp_path / "artifacts")
    artifact = await store.fetch(Artifact(str(model)), accept, ignore)
    source = store.path(artifact)
    assert source is not None
    cache = cache_of(tmp_path)
    place = await cache.get(artifact, source)
    assert (place / "sub" / "config.json").read_text() == "{}"
    assert cache.used_bytes() == artifact.size_bytes == cache_of(tmp_path).used_bytes()
    assert cache.evict(artifact.digest)
    assert not place.exists()


async def test_unused_longest_goes_first_and_pinned_ones_stay(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 250)
    made = {name: weights(tmp_path, name, 100) for name in "abcd"}
    for name in "ab":
        await cache.get(*made[name])
    await cache.get(*made["a"])
    await cache.get(*made["c"])
    assert cache.digests() == {made["a"][0].digest, made["c"][0].digest}, "b was unused longest"
    with cache.pinned(made["a"][0].digest):
        await cache.get(*made["d"])
        assert cache.digests() == {made["a"][0].digest, made["d"][0].digest}
        assert not cache.evict(made["a"][0].digest)
    assert cache.evict(made["a"][0].digest)


async def test_what_does_not_fit_beside_what_is_in_use_is_refused_and_takes_nothing(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, 250)
    a, b, large = (weights(tmp_path, name, size) for name, size in (("a", 100), ("b", 100), ("l", 200)))
    await cache.get(*a)
    await cache.get(*b)
    with (
        cache.pinned(a[0].digest),
        pytest.raises(WeightsError, match=r"need 200 bytes .* of 250, of which 100 are in use"),
    ):
        await cache.get(*large)
    assert cache.digests() == {a[0].digest, b[0].digest}
    await cache.get(*large)
    assert cache.digests() == {large[0].digest}


async def test_wrong_bytes_are_never_visible(tmp_path: Path) -> None:
    artifact, source = weights(tmp_path, "a", 100)
    source.write_bytes(b"b" * 100)
    cache = cache_of(tmp_path)
    with pytest.raises(WeightsError, match="artifact_corrupt"):
        await cache.get(artifact, source)
    assert (cache.digests(), cache.used_bytes(), list((tmp_path / "cache").iterdir())) == (frozenset(), 0, [])
    source.write_bytes(b"a" * 100)
    with pytest.raises(WeightsError, match="artifact_corrupt"):
        await cache.get(Artifact("x", artifact.digest, 99), source)
    with pytest.raises(WeightsError, match="cannot be copied"):
        await cache.get(artifact, tmp_path / "missing")
    with pytest.raises(WeightsError, match="no SHA-256"):
        await cache.get(Artifact("x", "sha256:../../x", 1), source)


async def test_all_who_ask_share_one_copy_and_see_it_grow(tmp_path: Path) -> None:
    artifact, source = weights(tmp_path, "a", CHUNK_BYTES * 2 + 5)
    cache = cache_of(tmp_path, CHUNK_BYTES * 3)
    begun, go_on = threading.Event(), threading.Event()
    seen: dict[str, list[int]] = {"first": [], "second": []}

    def first(done: int, whole: int) -> None:
        seen["first"].append(done)
        begun.set()
        go_on.wait(30)

    loop = asyncio.get_running_loop()
    asking = [loop.create_task(cache.get(artifact, source, first))]
    await eventually_async(begun.is_set, 30, "the copy has begun")
    asking.append(loop.create_task(cache.get(artifact, source, lambda done, _: seen["second"].append(done))))
    await asyncio.sleep(0)
    go_on.set()
    places = await asyncio.gather(*asking)
    assert places[0] == places[1]
    assert seen["first"] == [CHUNK_BYTES, CHUNK_BYTES * 2, CHUNK_BYTES * 2 + 5], "copied once"
    assert seen["second"][-1] == CHUNK_BYTES * 2 + 5


async def test_cancelled_copy_leaves_nothing_and_the_next_who_waits_copies(tmp_path: Path) -> None:
    artifact, source = weights(tmp_path, "a", CHUNK_BYTES * 2)
    cache = cache_of(tmp_path, CHUNK_BYTES * 3)
    begun, go_on = threading.Event(), threading.Event()

    def hold(done: int, whole: int) -> None:
        begun.set()
        go_on.wait(30)

    loop = asyncio.get_running_loop()
    leaving = loop.create_task(cache.get(artifact, source, hold))
    await eventually_async(begun.is_set, 30, "the copy has begun")
    staying = loop.create_task(cache.get(artifact, source))
    leaving.cancel()
    loop.call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (await staying).read_bytes() == source.read_bytes()
    assert cache.used_bytes() == artifact.size_bytes


async def test_copy_that_somebody_took_away_is_made_again(tmp_path: Path) -> None:
    artifact, source = weights(tmp_path, "a", 100)
    cache = cache_of(tmp_path)
    (await cache.get(artifact, source)).unlink()
    assert cache.path(artifact.digest) is None
    assert (await cache.get(artifact, source)).exists()


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 60),
    steps=st.lists(st.tuples(st.sampled_from(["get", "pin", "unpin", "evict"]), st.integers(0, 5)), max_size=25),
)
def test_never_above_the_limit_and_never_without_what_is_pinned(limit: int, steps: list[tuple[str, int]]) -> None:
    async def run(folder: Path) -> None:
        made = [weights(folder, "abcdef"[number], 5 + 7 * number) for number in range(6)]
        cache, pins = cache_of(folder, limit), [0] * 6
        for step, number in steps:
            artifact, source = made[number]
            before = cache.digests()
            if step == "get":
                try:
                    await cache.get(artifact, source)
                except WeightsError:
                    assert cache.digests() == before, "a refusal takes nothing"
                    pinned = {
                        other.digest: other.size_bytes for (other, _), count in zip(made, pins, strict=True) if count
                    }
                    in_use = sum(size for digest, size in pinned.items() if digest in before)
                    assert in_use + artifact.size_bytes > limit, "it would have fitted"
            elif step == "pin":
                cache.pin(artifact.digest)
                pins[number] += 1
            elif step == "unpin" and pins[number]:
                cache.unpin(artifact.digest)
                pins[number] -= 1
            elif step == "evict":
                assert cache.evict(artifact.digest) == (artifact.digest in before and not pins[number])
            assert cache.used_bytes() <= limit
            kept = {other.digest for (other, _), count in zip(made, pins, strict=True) if count} & before
            assert kept <= cache.digests()
            on_disk = {f"sha256:{entry.name}" for entry in (folder / "cache").iterdir()}
            assert on_disk == cache.digests()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
