"""What a controller learned of engines' speeds is there when the next one starts."""

import asyncio
import contextlib
import math
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from modelyard.clock import ManualClock
from modelyard.control.fits import TOGETHER, Fits
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.tenants import Tenant
from modelyard.policy.engine_model import SAMPLES_MIN, EngineModel, Sample, decode, encode, learn
from modelyard.stores import StoreUnavailableError
from modelyard.stores.sql import SqlControlStore, open_database

VERSION = ModelVersion("ver-1", "ten-1", "m", "v1", "simulated", Artifact(""), {}, 1)


def learned(samples: int = SAMPLES_MIN) -> EngineModel:
    model = EngineModel()
    for number in range(samples):
        batch = 1.0 + number % 5
        model = learn(model, Sample(0.02 + 0.001 * batch, batch, 10.0 * (number % 3), 100.0 * batch))
    return model


@pytest.fixture
async def store(tmp_path: Path) -> SqlControlStore:
    store = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5))
    await store.add_tenant(Tenant("ten-1", "acme", 1))
    await store.add_version(VERSION)
    return store


async def test_the_next_controller_goes_on_with_what_was_known(store: SqlControlStore) -> None:
    first = Fits(store=store, clock=ManualClock())
    await first.look()
    first.speeds.models |= {"ver-1": learned(), "ver-gone": learned()}
    await first.look()
    second = Fits(store=store, clock=ManualClock())
    await second.look()
    assert second.speeds.models == {"ver-1": learned()}
    assert dict(second.speeds.known())["ver-1"].step_s == pytest.approx(0.02, rel=0.1)
    await store.close()


async def test_what_is_not_sure_yet_is_not_stored_and_what_did_not_change_is_not_again(store: SqlControlStore) -> None:
    fits = Fits(store=store, clock=ManualClock())
    await fits.look()
    fits.speeds.models["ver-1"] = learned(SAMPLES_MIN - 1)
    await fits.look()
    assert await store.engine_fits() == {}
    fits.speeds.models["ver-1"] = learned()
    await fits.look()
    await store.put_engine_fits({"ver-1": b"by another"}, at=1.0)
    await fits.look()
    assert await store.engine_fits() == {"ver-1": b"by another"}
    await store.close()


async def test_a_busy_engine_whose_speed_stays_is_written_now_and_then_and_one_that_slows_down_at_once(
    store: SqlControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    put = SqlControlStore.put_engine_fits

    async def counted(self: SqlControlStore, fits: Mapping[str, bytes], *, at: float) -> None:
        nonlocal written
        written += len(fits)
        await put(self, fits, at=at)

    monkeypatch.setattr(SqlControlStore, "put_engine_fits", counted)
    fits = Fits(store=store, clock=ManualClock())
    for samples in range(SAMPLES_MIN, 40 * SAMPLES_MIN, SAMPLES_MIN):
        fits.speeds.models["ver-1"] = learned(samples)
        await fits.look()
    assert written <= 8
    slow, before = fits.speeds.models["ver-1"], written
    for number in range(20):
        slow = learn(slow, Sample(0.035, 1.0 + number % 5, 10.0, 300.0))
    fits.speeds.models["ver-1"] = slow
    await fits.look()
    assert written == before + 1
    await store.close()


async def test_many_are_stored_some_at_a_time(store: SqlControlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    async def counted(self: SqlControlStore, fits: Mapping[str, bytes], *, at: float) -> None:
        sizes.append(len(fits))

    monkeypatch.setattr(SqlControlStore, "put_engine_fits", counted)
    fits = Fits(store=store, clock=ManualClock())
    fits.speeds.models |= dict.fromkeys((f"ver-{number}" for number in range(2 * TOGETHER + 1)), learned())
    await fits.look()
    assert sizes == [TOGETHER, TOGETHER, 1]
    await store.close()


async def test_a_first_glance_before_the_store_answers_is_less_than_what_was_known(store: SqlControlStore) -> None:
    await store.put_engine_fits({"ver-1": encode(learned())}, at=1.0)
    for glance, kept in ((learned(1), learned()), (learned(SAMPLES_MIN + 1), learned(SAMPLES_MIN + 1))):
        fits = Fits(store=store, clock=ManualClock())
        fits.speeds.models["ver-1"] = glance
        await fits.look()
        assert fits.speeds.models["ver-1"] == kept
    await store.close()


@pytest.mark.parametrize("failure", [StoreUnavailableError("database or disk is full"), KeyError("a bug")])
async def test_a_store_that_fails_when_the_controller_stops_ends_nothing_else(
    store: SqlControlStore, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    async def full(self: SqlControlStore, fits: Mapping[str, bytes], *, at: float) -> None:
        raise failure

    monkeypatch.setattr(SqlControlStore, "put_engine_fits", full)
    fits = Fits(store=store, clock=ManualClock())
    fits.speeds.models["ver-1"] = learned()
    task = asyncio.create_task(fits.run())
    await asyncio.sleep(0.1)
    assert not task.done(), "it is tried again"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()


async def test_what_cannot_be_read_is_learned_anew(store: SqlControlStore) -> None:
    await store.put_engine_fits({"ver-1": b"nonsense"}, at=1.0)
    fits = Fits(store=store, clock=ManualClock())
    await fits.look()
    assert fits.speeds.models == {}
    await store.close()


async def test_nothing_is_stored_before_it_is_known_what_there_was(
    store: SqlControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(self: SqlControlStore) -> dict[str, bytes]:
        raise StoreUnavailableError("away")

    fits = Fits(store=store, clock=ManualClock())
    fits.speeds.models["ver-1"] = learned()
    with monkeypatch.context() as patched:
        patched.setattr(SqlControlStore, "engine_fits", away)
        with pytest.raises(StoreUnavailableError):
            await fits.look()
        await fits.save()
    assert await store.engine_fits() == {}
    await store.close()


def test_a_fit_of_another_release_is_refused() -> None:
    assert decode(encode(learned())) == learned()
    with pytest.raises(ValueError, match="sizes"):
        decode(encode(EngineModel(weights=(1.0,))))
    with pytest.raises(ValueError, match="numbers that are none"):
        decode(encode(EngineModel(weights=(0.01, math.nan, 0.0, 0.0), samples=99, error=0.1)))


def test_a_fit_that_was_damaged_anywhere_is_refused_and_nothing_worse() -> None:
    text, chance = encode(learned()), random.Random(3)
    for _ in range(3000):
        damaged = bytearray(text)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(ValueError):
            model = decode(bytes(damaged[: chance.choice((None, chance.randrange(len(text))))]))
            assert math.isfinite(model.iteration_s(4.0, 100.0, 1000.0))
