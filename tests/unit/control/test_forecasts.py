"""Profiles learn from gateways' counts, survive a restart, and never stand in the way of anything."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelyard.clock import ManualClock
from modelyard.control.forecasts import SAVE_S, Forecasts
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.demand import EndpointDemand, Report
from modelyard.domain.endpoints import Autoscale, Endpoint, Release, Scaling
from modelyard.domain.tenants import Tenant
from modelyard.policy.forecast import SLOT_S, WEEK, Profile, encode, expected, observe, slot_of
from modelyard.policy.idleness import Gaps
from modelyard.policy.prewarming import Situation
from modelyard.stores import StoreUnavailableError
from modelyard.stores.sql import SqlControlStore, open_database


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlControlStore]:
    opened = SqlControlStore(open_database(f"sqlite:///{tmp_path / 'control.sqlite'}", timeout_s=5))
    await opened.add_tenant(Tenant("t", "t", 1))
    version = ModelVersion("ver-1", "t", "m", "v1", "simulated", Artifact(""), {}, 1)
    await opened.add_deployment(version, Endpoint("ep-1", "t", "m", (Release("ver-1"),), Scaling(), created_at=1))
    yield opened
    await opened.close()


class Gateways:
    """One gateway that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.is_there = True

    def reports(self) -> dict[str, Report]:
        return {"g": Report([EndpointDemand("ep-1", 0, 0, 0.0, self.count)], [])} if self.is_there else {}


async def pass_time(forecasts: Forecasts, clock: ManualClock, seconds: float, step_s: float = 2.0) -> None:
    for _ in range(int(seconds / step_s)):
        clock.advance(step_s)
        await forecasts.look()


async def test_requests_are_learned_by_the_slot_and_stored(store: SqlControlStore) -> None:
    clock, gateways = ManualClock(start_s=float(1000 * SLOT_S)), Gateways()
    forecasts = Forecasts(store=store, reports=gateways.reports, clock=clock)
    await pass_time(forecasts, clock, 60)
    gateways.count = 40
    await pass_time(forecasts, clock, 2 * SLOT_S)
    profile = forecasts.profile("ep-1")
    assert profile is not None
    assert expected(profile, 1000 + WEEK).probability > expected(profile, 1001 + WEEK).probability
    assert expected(profile, 1000 + WEEK).rate == pytest.approx(40 / SLOT_S)
    await pass_time(forecasts, clock, SAVE_S)
    later = Forecasts(store=store, reports=gateways.reports, clock=clock)
    await later.look()
    found = later.profile("ep-1")
    assert found is not None
    assert (found.last_slot, found.rates) == (forecasts.profile("ep-1").last_slot, profile.rates)  # type: ignore[union-attr]


async def test_time_without_a_gateway_teaches_nothing(store: SqlControlStore) -> None:
    clock, gateways = ManualClock(start_s=float(1000 * SLOT_S)), Gateways()
    forecasts = Forecasts(store=store, reports=gateways.reports, clock=clock)
    await pass_time(forecasts, clock, 60)
    gateways.count = 1
    await pass_time(forecasts, clock, SLOT_S)
    gateways.is_there = False
    await pass_time(forecasts, clock, 3 * SLOT_S)
    profile = forecasts.profile("ep-1")
    assert profile is not None
    assert profile.last_slot == 1000


async def test_it_is_stored_when_the_controller_stops(store: SqlControlStore) -> None:
    clock, gateways = ManualClock(start_s=float(1000 * SLOT_S)), Gateways()
    forecasts = Forecasts(store=store, reports=gateways.reports, clock=clock)
    running = asyncio.create_task(forecasts.run())
    await asyncio.sleep(0)
    await forecasts.look()
    gateways.count = 3
    await pass_time(forecasts, clock, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert set(await store.forecasts()) == {"ep-1"}


async def test_a_damaged_profile_is_learned_anew_and_one_of_a_gone_endpoint_is_dropped(store: SqlControlStore) -> None:
    await store.put_forecasts({"ep-1": b"nonsense", "ep-gone": b"x"}, at=1.0)
    assert set(await store.forecasts()) == {"ep-1"}
    forecasts = Forecasts(store=store, reports=Gateways().reports, clock=ManualClock())
    await forecasts.look()
    assert forecasts.profile("ep-1") is None


async def test_a_store_that_is_away_loses_nothing(store: SqlControlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gateways = ManualClock(start_s=float(1000 * SLOT_S)), Gateways()
    forecasts = Forecasts(store=store, reports=gateways.reports, clock=clock)
    await forecasts.look()
    gateways.count = 3
    await pass_time(forecasts, clock, 60)

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError("locked")

    with monkeypatch.context() as patched:
        patched.setattr(SqlControlStore, "put_forecasts", away)
        with pytest.raises(StoreUnavailableError):
            await forecasts.save()
    await forecasts.save()
    assert set(await store.forecasts()) == {"ep-1"}


async def test_expectations_and_idle_times_are_kept_for_those_that_exist(store: SqlControlStore) -> None:
    clock, gateways = ManualClock(start_s=float(1000 * SLOT_S)), Gateways()
    profile = Profile()
    for slot in range(slot_of(clock.unix_s()) - WEEK, slot_of(clock.unix_s())):
        profile = observe(profile, slot, 5)
    await store.put_forecasts({"ep-1": encode(profile)}, at=1.0)
    forecasts = Forecasts(store=store, reports=gateways.reports, clock=clock)
    seen = Situation(now_s=clock.unix_s(), ready=0, demand=0, needed=0, load_s=10.0)
    assert forecasts.expect("ep-1", Autoscale(), seen) == (0, "no requests to learn from"), "not loaded yet"
    await forecasts.look()
    assert forecasts.expect("ep-1", Autoscale(), seen)[0] == 1
    forecasts.keep_gaps("ep-1", Gaps((0, 3)))
    await forecasts.save()
    again = Forecasts(store=store, reports=gateways.reports, clock=clock)
    await again.look()
    kept = again.profile("ep-1")
    assert kept is not None
    assert kept.gaps == Gaps((0, 3))
    again.keep([])
    assert again.profile("ep-1") is None
