"""How an endpoint is sized can be asked for, changed, and is shown; what is wrong with it is said at once."""

import math
from typing import Any

import pytest
from msgspec import structs
from tests.support.management import Management

from modelyard.control.api.autoscale import AutoscaleBody
from modelyard.domain.endpoints import SOURCE, Autoscale, IdleTime, Scaling, Tier
from modelyard.domain.tenants import Identity
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.policy import scaling
from modelyard.policy.forecast import WEEK, Profile, Score, observe, slot_of
from modelyard.stores import JournalPosition

SPEC: dict[str, Any] = {
    "model_name": "smol",
    "framework": "simulated",
    "hardware": {"max_replicas": 3},
    "scaling": {"scale_to_zero": True},
}


async def deploy(api: Management, identity: Identity, **more: object) -> str:
    answer = await api.call(identity, "POST", "/v1/models/deploy", {**SPEC, **more})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["endpoint_id"])


async def stored(api: Management, endpoint_id: str) -> Autoscale:
    return next(one.autoscale for one in await api.context.store.endpoints() if one.id == endpoint_id)


async def test_defaults_are_the_sources_but_for_what_the_search_found(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    shown = (await api.call(manager, "GET", "/v1/endpoints/smol")).json()["autoscale"]
    assert (shown["up_queue"], shown["up_queue_s"]) == (100, 30)
    assert (shown["up_utilization"], shown["up_utilization_s"]) == (85, 120)
    assert (shown["up_latency_factor"], shown["up_latency_s"]) == (2, 60)
    assert (shown["down_queue_s"], shown["down_utilization"], shown["down_utilization_s"]) == (300, 60, 180)
    assert (shown["load_share_down"], shown["idle"]) == (70, "priced")
    assert (shown["check_s"], shown["prewarm_s"], shown["tier"]) == (30, 300, None)
    assert await stored(api, endpoint_id) == Autoscale()


async def test_the_sources_own_numbers_are_settings(api: Management, manager: Identity) -> None:
    """As ``docs/how-to/autoscaling.md`` says them."""
    asked: dict[str, Any] = {"idle": "fixed", "down_utilization": 30, "down_utilization_s": 600, "load_share_down": 60}
    asked["prewarm_cold_cost_s"] = 900
    assert await stored(api, await deploy(api, manager, autoscale=asked)) == SOURCE


async def test_an_idle_time_that_is_named_is_kept_to(api: Management, manager: Identity) -> None:
    sleepy = {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 60}
    endpoint_id = await deploy(api, manager, scaling=sleepy)
    assert (await stored(api, endpoint_id)).idle is IdleTime.FIXED
    learns = await deploy(api, manager, model_name="learns", scaling=sleepy, autoscale={"idle": "learned"})
    assert (await stored(api, learns)).idle is IdleTime.LEARNED
    change = {"scaling": {"scale_to_zero_after_idle_seconds": 90}}
    answer = await api.call(manager, "PATCH", "/v1/endpoints/learns", change | {"autoscale": {"idle": "priced"}})
    assert (answer.json()["autoscale"]["idle"], answer.json()["scale_to_zero_after_idle_seconds"]) == ("priced", 90)
    answer = await api.call(manager, "PATCH", "/v1/endpoints/learns", {"autoscale": {"up_queue": 7}})
    assert answer.json()["autoscale"]["idle"] == "priced", "what is left out stays"
    answer = await api.call(manager, "PATCH", "/v1/endpoints/learns", change)
    assert answer.json()["autoscale"]["idle"] == "fixed"


async def test_settings_are_deployed_and_changed_one_by_one(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager, autoscale={"up_queue": 5, "tier": "warm", "idle": "learned"})
    assert await stored(api, endpoint_id) == Autoscale(up_queue=5, tier=Tier.WARM, idle=IdleTime.LEARNED)
    body = {"autoscale": {"tier": None, "target_latency_s": 9.5, "burst_pool": "cloud"}, "scaling": {"target_value": 5}}
    answer = await api.call(manager, "PATCH", "/v1/endpoints/smol", body)
    assert answer.status_code == 200, answer.text
    changed = Autoscale(up_queue=5, idle=IdleTime.LEARNED, target_latency_s=9.5, burst_pool="cloud")
    assert await stored(api, endpoint_id) == changed
    assert answer.json()["scaling_target"] == 5
    answer = await api.call(manager, "PATCH", "/v1/endpoints/smol", {"autoscale": {"target_latency_s": None}})
    assert await stored(api, endpoint_id) == structs.replace(changed, target_latency_s=None)


async def test_every_setting_can_be_set_and_is_shown(api: Management, manager: Identity) -> None:
    names = set(Autoscale.__struct_fields__)
    assert names == set(AutoscaleBody.__struct_fields__)
    await deploy(api, manager, autoscale={"batch_scales": False})
    shown = (await api.call(manager, "GET", "/v1/endpoints/smol")).json()["autoscale"]
    assert shown.keys() == names
    assert shown["batch_scales"] is False


async def test_every_fault_is_told_at_once(api: Management, manager: Identity) -> None:
    bad = {"tier": "tepid", "up_queue": -1, "check_s": 0, "load_share_up": 500, "burst_pool": "../x", "idle": "never"}
    for method, path, body in (
        ("POST", "/v1/models/deploy", {**SPEC, "model_name": "other", "autoscale": bad}),
        ("PATCH", f"/v1/endpoints/{await deploy(api, manager)}", {"autoscale": bad, "scaling": {"metric": "mood"}}),
    ):
        answer = await api.call(manager, method, path, body)
        assert answer.status_code == 400, answer.text
        for name in bad:
            assert f"autoscale.{name}: " in answer.text
    assert "scaling.metric: " in answer.text


@pytest.mark.parametrize(
    ("autoscale", "scaling_", "name"),
    [
        ({"down_utilization": 90}, {"scale_to_zero": True}, "autoscale.down_utilization"),
        ({"tier": "cold"}, {}, "autoscale.tier"),
        ({"down_utilisation": 20}, {}, "down_utilisation"),
    ],
)
async def test_contradictions_and_misspellings_are_refused(
    api: Management, manager: Identity, autoscale: dict[str, Any], scaling_: dict[str, Any], name: str
) -> None:
    answer = await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "scaling": scaling_, "autoscale": autoscale})
    assert answer.status_code == 400
    assert name in answer.text


async def test_the_size_is_shown_with_its_reason_and_numbers(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    assert (await api.call(manager, "GET", "/v1/endpoints/smol")).json()["size"] is None
    seen = scaling.Seen(now_s=5.0, replicas=1, ready=1, slots=4, gateways=1, queued=7, in_flight=4)
    decision = scaling.decide(Scaling(1, 3), None, seen)
    api.context.size = {endpoint_id: (seen, decision)}.get
    shown = (await api.call(manager, "GET", "/v1/endpoints/smol")).json()["size"]
    assert (shown["replicas"], shown["reason"]) == (3, "7 queued and 4 running requests need 3 x 4 slots")
    assert (shown["seen"]["queued"], shown["seen"]["utilization"]) == (7, 1.0)


async def test_a_forecast_shows_what_is_expected_and_how_good_it_was(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    empty = (await api.call(manager, "GET", "/v1/endpoints/smol/forecast?hours=2")).json()
    assert (len(empty["slots"]), empty["weeks_learned"], empty["hit_rate"]) == (12, 0, None)
    now = slot_of(api.clock.unix_s())
    profile = Profile()
    for slot in range(now - 2 * WEEK, now):
        profile = observe(profile, slot, 60 if slot % 144 == (now + 6) % 144 else 0)
    profile = structs.replace(profile, score=Score(hits=3, misses=1, wasted=1, day=1, day_s=720.0, waiting_s=7200.0))
    api.context.forecast = {endpoint_id: profile}.get
    shown = (await api.call(manager, "GET", f"/v1/endpoints/{endpoint_id}/forecast")).json()
    assert [slot["at"] for slot in shown["slots"] if slot["is_prewarmed"]] == [(now + 6) * 600]
    assert (shown["hit_rate"], shown["precision"], shown["spent_gpu_hours"]) == (0.75, 0.75, 2.0)
    assert shown["spent_today_gpu_hours"] == 0.0, "that was another day"
    assert (await api.call(manager, "GET", "/v1/endpoints/smol/forecast?hours=999")).status_code == 400


async def test_a_backtest_replays_the_ledger(api: Management, manager: Identity) -> None:
    endpoint_id = await deploy(api, manager)
    nothing = (await api.call(manager, "GET", "/v1/endpoints/smol/forecast/backtest")).json()
    assert nothing["result"] is None
    now_s = api.clock.unix_s()
    records: list[Intent | Settle] = []
    for day in range(1, 8):
        at = math.floor(now_s) - day * 86_400 + 60
        rid = f"r{day}"
        price = Price(1, 1, 1)
        records.append(Intent(rid, at, "t", "k", endpoint_id, "smol", "ver", "/v1/chat", False, 1, 9, price))
        records.append(Settle(rid, at + 1, 1, 0, 1, UsageStatus.SUCCESS, 200, "", 1.0, 2.0, "rep", 1, False))
    await api.context.usage.apply(records, JournalPosition("g", "1", 0))
    found = (await api.call(manager, "GET", "/v1/endpoints/smol/forecast/backtest?days=30")).json()["result"]
    assert found["requests"] == 7
    assert found["fixed"]["cold_starts"] == 7
    assert found["forecast"]["cold_starts"] < 4


async def test_forecasts_are_their_owners(api: Management, manager: Identity) -> None:
    await deploy(api, manager)
    stranger, _ = await api.key(await api.tenant("stranger"), *manager.scopes)
    for tail in ("forecast", "forecast/backtest"):
        assert (await api.call(stranger, "GET", f"/v1/endpoints/smol/{tail}")).status_code == 404
    refused = await api.call(manager, "POST", "/v1/models/deploy", {**SPEC, "model_name": "org/forecast"})
    assert refused.status_code == 400
