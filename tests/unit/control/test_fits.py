"""What a controller learned of engines' speeds is there when the next one starts."""

from pathlib import Path

import pytest

from modelyard.clock import ManualClock
from modelyard.control.fits import Fits
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
