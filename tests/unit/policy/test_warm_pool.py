"""Pools are as large as activations ask for and the budget allows; cold endpoints take what fits them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Autoscale, Tier
from modelyard.policy.warm_pool import (
    Base,
    Pool,
    Resident,
    base_of,
    blocked,
    burst,
    concurrent,
    sizes,
    steal,
)

LLAMA = Base("vllm", "sha256:llama", (("dtype", "bf16"),))
QWEN = Base("vllm", "sha256:qwen", ())
COMMON = {"base": LLAMA, "activations_s": 0.01, "refill_s": 90.0}


def pool(pool_id: str = "llama", **changes: object) -> Pool:
    return Pool(id=pool_id, **{**COMMON, **changes})  # type: ignore[arg-type]


def version(**changes: object) -> ModelVersion:
    usual = {
        "id": "ver-1",
        "tenant_id": "t",
        "name": "llama",
        "version": "v1",
        "framework": "vllm",
        "artifact": Artifact("x", "sha256:llama"),
        "options": {"dtype": "bf16"},
        "created_at": 1,
    }
    return ModelVersion(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "refill_s", "wanted"),
    [(0.0, 60, 0), (1 / 3600, 60, 1), (0.01, 90, 4), (1.0, 30, 43), (10.0, 100, 1074)],
)
def test_size_is_the_99_percent_quantile_of_activations_in_a_refill(rate: float, refill_s: float, wanted: int) -> None:
    assert concurrent(rate, refill_s) == wanted


def test_erlang_b_is_the_textbook_one() -> None:
    assert blocked(0, 2.0) == 1.0
    assert blocked(2, 1.0) == pytest.approx(0.2)
    assert blocked(10, 5.0) == pytest.approx(0.0184, abs=1e-4)


def test_a_budget_goes_where_it_avoids_most_waiting() -> None:
    plans = sizes([pool("rare", activations_s=0.0001), pool("popular", activations_s=0.02)], 3)
    assert {plan.pool_id: plan.size for plan in plans} == {"rare": 0, "popular": 3}
    assert "within the budget of 3" in plans[1].reason


def test_what_an_operator_set_comes_first() -> None:
    plans = sizes([pool("set", size=2, activations_s=0.0), pool("popular", activations_s=0.02)], 3)
    assert {plan.pool_id: plan.size for plan in plans} == {"set": 2, "popular": 1}


@given(
    st.lists(
        st.tuples(st.floats(0, 0.1), st.floats(1, 300), st.integers(1, 8), st.none() | st.integers(0, 9)), max_size=6
    ),
    st.integers(0, 40),
)
@settings(max_examples=80, deadline=None)
def test_pools_never_exceed_their_budget_and_more_budget_never_shrinks_one(
    wanted: list[tuple[float, float, int, int | None]], budget: int
) -> None:
    pools = [
        pool(str(at), activations_s=rate, refill_s=refill_s, accelerators=accelerators, size=size)
        for at, (rate, refill_s, accelerators, size) in enumerate(wanted)
    ]
    plans = sizes(pools, budget)
    assert sum(plan.size * one.accelerators for plan, one in zip(plans, pools, strict=True)) <= budget
    assert all(plan.reason for plan in plans)
    whole = sizes(pools, 10**6)
    assert all(few.size <= all_.size for few, all_ in zip(plans, whole, strict=True))


def residents(count: int, base: Base = LLAMA, loading: int = 0) -> list[Resident]:
    ready = [Resident(f"rep-{at}", "llama", base, float(at)) for at in range(count)]
    return ready + [Resident(f"rep-l{at}", "llama", base, None) for at in range(loading)]


def test_a_cold_endpoint_takes_the_replica_of_its_base_that_waited_longest() -> None:
    taken = steal(base_of(version()), residents(3), {"llama": pool()}, rules=Autoscale())
    assert (taken.replica_id, taken.pool_id, taken.needs_adapter) == ("rep-0", "llama", False)
    assert taken.reason == "taken from pool 'llama', 2 left"


def test_an_adapter_takes_one_of_its_base() -> None:
    adapter = version(id="ver-lora", artifact=Artifact("y", "sha256:lora"), options={"rank": 8})
    taken = steal(base_of(adapter, version()), residents(1), {"llama": pool()}, rules=Autoscale(), is_adapter=True)
    assert (taken.replica_id, taken.needs_adapter) == ("rep-0", True)


@pytest.mark.parametrize(
    "other",
    [
        version(framework="sglang"),
        version(artifact=Artifact("x", "sha256:other")),
        version(options={"dtype": "fp8"}),
    ],
)
def test_nobody_takes_what_is_not_the_same(other: ModelVersion) -> None:
    taken = steal(base_of(other), residents(3), {"llama": pool()}, rules=Autoscale())
    assert (taken.replica_id, taken.reason) == (None, "no pool has its base")


def test_what_is_reserved_for_a_higher_tier_stays() -> None:
    pools = {"llama": pool(reserved={Tier.HOT: 2})}
    assert steal(LLAMA, residents(2), pools, rules=Autoscale()).replica_id is None
    assert "reserved" in steal(LLAMA, residents(2), pools, rules=Autoscale(tier=Tier.COLD)).reason
    assert steal(LLAMA, residents(2), pools, rules=Autoscale(tier=Tier.HOT)).replica_id == "rep-0"
    assert steal(LLAMA, residents(3), pools, rules=Autoscale()).replica_id == "rep-0"


def test_loading_replicas_are_not_taken() -> None:
    taken = steal(LLAMA, residents(0, loading=2), {"llama": pool()}, rules=Autoscale())
    assert (taken.replica_id, taken.reason) == (None, "all 2 of its base are loading")


def test_it_bursts_only_when_all_is_full_and_callers_wait_and_comes_back_when_calm() -> None:
    rules = Autoscale(burst_pool="cloud")
    calm = {"is_bursting": False, "calm_since_s": None}
    assert burst(Autoscale(), now_s=0, wait_s=99, is_full=True, **calm).pool == ""
    assert burst(rules, now_s=0, wait_s=99, is_full=False, **calm).pool == ""
    assert burst(rules, now_s=0, wait_s=4, is_full=True, **calm).pool == ""
    assert burst(rules, now_s=0, wait_s=6, is_full=True, **calm).pool == "cloud"
    since: float | None = None
    pools = []
    for now_s in range(0, 700, 100):
        answer = burst(rules, now_s=now_s, wait_s=6.0 if now_s < 100 else 0.0, is_full=now_s < 200, is_bursting=True,
                       calm_since_s=since)  # fmt: skip
        since = answer.calm_since_s
        pools.append(answer.pool)
    assert pools == ["cloud"] * 6 + [""]


def test_bases_differ_by_what_an_engine_would_notice() -> None:
    bases = {base_of(version()), base_of(version(id="ver-2", name="copy")), base_of(version(options={}))}
    assert len(bases) == 2
    assert all(one != QWEN for one in itertools.chain(bases))
