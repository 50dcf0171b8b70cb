"""A ledger that a known world wrote is replayed as it was, and a change has the effect that it must have."""

import random
from functools import cache

import msgspec
import pytest

from modelyard.domain.books import ReplicaLife
from modelyard.domain.endpoints import Scaling
from modelyard.domain.facts import ModelFacts
from modelyard.domain.prices import PriceEntry
from modelyard.domain.usage import Price
from modelyard.policy.engine_model import Speed
from modelyard.policy.pricelist import sheet, tariffs
from modelyard.policy.pricing import billed
from modelyard.sim.recorded import Asked, stretches
from modelyard.sim.recorded_speed import Size, judge, learn
from modelyard.sim.replay import AS_IS, RECORDED, Ledger, recorded_only, replay, run, total
from modelyard.sim.replay_money import PriceList, held
from modelyard.sim.replay_setup import Change, Release, SettingError, Setup, changed, world_of
from modelyard.sim.requests import Arrival
from modelyard.sim.results import Results
from modelyard.sim.scenario_body import GatewayBody
from modelyard.sim.world import World

T0, SPAN_S = 1_796_000_000.0, 600.0
SPEED = Speed(0.02, 5e-4, 1.5e-4, 2e-7)
SIZE = Size(4, 2048, 40_000)
SETUP = Setup(
    name="chat",
    releases=(Release(version_id="ver-1", label="chat@v1", speed=SPEED, size=SIZE),),
    scaling=Scaling(min_replicas=1, max_replicas=1),
    kind="l4",
    nanousd=800_000_000,
    load_s=20.0,
    has_prefixes=False,
)
PRICES = PriceList(entries=(), factor_micro=500_000, labels={"ver-1": "v1"})


@cache
def ledger() -> Ledger:
    """Return what a world with known engines came to."""
    chance, at_s, arrivals = random.Random(5), 0.0, []
    while at_s < SPAN_S - 60:
        at_s += chance.expovariate(1.6)
        prompt, output = chance.randint(50, 900), chance.randint(10, 120)
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output, tenant_id="t1"))
    world = World(world_of(SETUP), random.Random(1))
    rows = tuple(
        Asked(
            at_s=T0 + one.arrival.at_s,
            endpoint_id="ep-1",
            model="chat",
            version_id="ver-1",
            replica_id=one.replica_id,
            tenant_id="t1",
            key_id="k1",
            prompt_tokens=one.arrival.prompt_tokens,
            completion_tokens=one.arrival.output_tokens,
            cost_nanousd=1000,
            ttft_s=one.ttft_s,
            latency_s=one.done_s - one.arrival.at_s,
        )
        for one in world.run(arrivals)
    )
    life = ReplicaLife(
        "rep-1", "ep-1", "o", "chat", "ver-1", "l4", 1.0, 800_000_000, T0 - 50, T0 - 30, None, T0 + SPAN_S
    )
    return Ledger(asked=rows, replayed=tuple(stretches(T0, T0 + SPAN_S)), prices=PRICES, lives=(life,))


@cache
def results() -> Results:
    changes = [
        Change(name="three", settings={"scaling.min_replicas": "3", "scaling.max_replicas": "3"}),
        Change(name="double", traffic=2.0),
        Change(name="h100", hardware="h100", prices={"h100": 2_000_000_000}),
    ]
    return replay(SETUP, ledger(), changes, title="t")


def figure(name: str, key: str) -> float:
    (found,) = [one.mean(key) for one in results().tried if one.name == name]
    assert found is not None
    return found


def test_the_replay_has_the_requests_and_tokens_of_the_ledger_and_its_times() -> None:
    assert [one.name for one in results().tried] == [AS_IS, RECORDED, "three", "double", "h100"]
    for key in ("requests", "prompt_tokens", "written_tokens", "revenue_usd", "replica_hours", "gpu_usd"):
        assert figure(AS_IS, key) == pytest.approx(figure(RECORDED, key)), key
    for key in ("ttft_p50_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s"):
        assert figure(AS_IS, key) == pytest.approx(figure(RECORDED, key), rel=1e-6), key
    picture = msgspec.structs.replace(ledger().asked[0], prompt_tokens=0, completion_tokens=10**6, cost_nanousd=7)
    more = msgspec.structs.replace(ledger(), asked=(picture, *ledger().asked))
    recorded = recorded_only(more, []).tried[0]
    assert recorded.mean("usd_per_million") == pytest.approx(figure(AS_IS, "usd_per_million")), "of the tokens shown"
    assert recorded.mean("revenue_usd") == pytest.approx(figure(AS_IS, "revenue_usd") + 7e-9)
    assert results().notes == ("As it is, the replay is within 20% of what was recorded.",)


def test_more_replicas_wait_less_and_cost_more() -> None:
    assert figure("three", "ttft_p99_s") < 0.7 * figure(AS_IS, "ttft_p99_s")
    assert figure("three", "replica_hours") == pytest.approx(3 * SPAN_S / 3600)
    assert figure("three", "gpu_usd") == pytest.approx(3 * figure(AS_IS, "gpu_usd"))
    assert figure("three", "requests") == figure(AS_IS, "requests")


def test_twice_the_traffic_is_twice_the_requests_and_longer_waits() -> None:
    assert figure("double", "requests") == 2 * figure(AS_IS, "requests")
    assert figure("double", "ttft_p99_s") > figure(AS_IS, "ttft_p99_s")
    done = figure("double", "requests") - figure("double", "refused")
    assert figure("double", "revenue_usd") == pytest.approx(done * 1000 / 1e9), "what is refused brings nothing"


def test_another_kind_is_as_much_faster_as_the_roofline_says_at_its_own_price() -> None:
    assert figure("h100", "latency_p50_s") < 0.2 * figure(AS_IS, "latency_p50_s")
    assert figure("h100", "gpu_usd") == pytest.approx(2.0 * SPAN_S / 3600)
    (release,) = changed(SETUP, Change(name="x", hardware="h100")).releases
    assert release.speed.step_s == pytest.approx(SPEED.step_s * 300 / 3350)
    assert release.speed.prefill_token_s == pytest.approx(SPEED.prefill_token_s * 121 / 989)


def test_equal_seeds_are_equal_worlds() -> None:
    one, other = (run(SETUP, ledger(), Change(name="x", traffic=1.5), 7) for _ in range(2))
    assert one == other
    assert one != run(SETUP, ledger(), Change(name="x", traffic=1.5), 8)


def test_larger_blocks_find_nearly_as_much_in_the_cache() -> None:
    rows = tuple(
        msgspec.structs.replace(one, prompt_tokens=3000, cached_tokens=2500 if place else 0)
        for place, one in enumerate(ledger().asked[:60])
    )
    few = msgspec.structs.replace(ledger(), asked=rows)
    small, large = (
        run(msgspec.structs.replace(SETUP, has_prefixes=True, block_tokens=tokens), few, Change(name="x"), 1).figures
        for tokens in (16, 128)
    )
    assert small["hit_rate"] > 0.7
    assert large["hit_rate"] == pytest.approx(small["hit_rate"], abs=128 / 3000)


def test_what_is_idle_until_the_end_of_the_window_costs_too() -> None:
    lone = msgspec.structs.replace(ledger(), asked=ledger().asked[:1])
    assert run(SETUP, lone, Change(name="x"), 1).figures["replica_hours"] == pytest.approx(SPAN_S / 3600)


def test_prices_alone_are_computed_from_the_rows() -> None:
    entry = PriceEntry("p", "chat", Price(input=1_000_000_000, output=2_000_000_000), effective_from=0)
    change = Change(name="dearer", prices={"l4": 400_000_000}, token_prices=(entry,))
    before, after = (one.runs[0].figures for one in recorded_only(ledger(), [change]).tried)
    tokens = sum(one.prompt_tokens + 2 * one.completion_tokens for one in ledger().asked)
    assert after["revenue_usd"] == pytest.approx(tokens / 1e6)
    assert after["gpu_usd"] == pytest.approx(before["gpu_usd"] / 2)
    assert after["ttft_p99_s"] == before["ttft_p99_s"]
    assert after["margin_usd"] == pytest.approx(after["revenue_usd"] - after["gpu_usd"])


def test_a_new_price_reaches_those_that_it_is_for_and_no_other() -> None:
    contract = PriceEntry("c", "chat", Price(input=5), effective_from=0, tenant_id="t9")
    prices = msgspec.structs.replace(PRICES, entries=(contract,))
    new = PriceEntry("n", "chat", Price(input=1_000_000), effective_from=0)
    one = msgspec.structs.replace(ledger().asked[0], prompt_tokens=100, completion_tokens=0, cached_tokens=0)
    assert prices.cost(one, [new]) == 100
    assert prices.cost(msgspec.structs.replace(one, is_batch=True), [new]) == 50
    assert prices.cost(msgspec.structs.replace(one, tenant_id="t9"), [new]) == one.cost_nanousd
    assert prices.cost(msgspec.structs.replace(one, model="other"), [new]) == one.cost_nanousd
    assert prices.cost(msgspec.structs.replace(one, is_charged=False, cost_nanousd=0), [new]) == 0
    for_all = PriceEntry("a", "*", Price(input=2_000_000), effective_from=0)
    assert prices.cost(msgspec.structs.replace(one, tenant_id="t9"), [for_all]) == 200


def test_the_ladder_of_prices_is_the_one_that_bills_live() -> None:
    chance = random.Random(11)

    def price() -> Price:
        parts = [chance.randrange(3_000_000_000) for _ in range(5)]
        return Price(*parts, batch_micro=chance.choice((None, 0, 250_000, 1_000_000)))

    ids = {"ver-1": "v1", "ver-2": "v2"}
    for _ in range(200):
        stored = [
            PriceEntry(
                f"p{number}", chance.choice(("*", "chat", "other")), price(), int(T0) + chance.randrange(-900, 300),
                chance.choice((None, int(T0) + 300)), chance.choice(("", "t1", "t9")), chance.choice(("", "v1", "v2")),
                number,
            )
            for number in range(5)
        ]  # fmt: skip
        fixed = [PriceEntry("c", "*", price(), 0), PriceEntry("d", "chat", price(), 0)]
        stored.append(PriceEntry("e", "chat", price(), 1))  # with none that is stored the route has its price
        versions = {label: (id,) for id, label in ids.items()}
        listed = tariffs(stored, fixed, name="chat", versions=versions, owner="")
        ours = PriceList(entries=(), factor_micro=400_000, labels=ids)
        for _ in range(20):
            one = msgspec.structs.replace(
                ledger().asked[0],
                at_s=T0 + chance.choice((-1, 0, 300, chance.uniform(-900, 900))),
                tenant_id=chance.choice(("t1", "t2")),
                version_id=chance.choice(("ver-1", "ver-2")),
                is_batch=chance.random() < 0.5,
                prompt_tokens=chance.choice((0, chance.randrange(10**6))),
                cached_tokens=chance.randrange(10**6),
                completion_tokens=chance.choice((0, chance.randrange(10**5))),
                units=chance.choice((0.0, 0.000_001, 7.5, 3e9)),
            )
            live = sheet(listed, tenant_id=one.tenant_id, version_ids=ids, now_unix_s=one.at_s)
            its = (live.for_batch(400_000) if one.is_batch else live).of(one.version_id)
            _, due = billed(its, one.prompt_tokens, one.cached_tokens, one.completion_tokens, one.units)
            assert ours.cost(one, [*fixed, *stored]) == due


def test_a_replica_that_is_there_counts_to_the_end_and_one_that_vanished_until_it_was_seen() -> None:
    (life,) = ledger().lives or ()
    replayed = stretches(T0, T0 + 3600)
    assert held([msgspec.structs.replace(life, seen_at=T0 + 3550)], replayed, {}).replica_hours == pytest.approx(1.0)
    gone = held([msgspec.structs.replace(life, seen_at=T0 + 1800)], replayed, {})
    assert (gone.replica_hours, gone.started) == (pytest.approx(0.5), 0)
    ended = msgspec.structs.replace(life, started_at=T0 + 900, ended_at=T0 + 1800)
    assert (held([ended], replayed, {}).nanousd, held([ended], replayed, {}).started) == (200_000_000, 1)
    assert held([ended], stretches(T0, T0 + 3600, 0.5), {}).replica_hours == pytest.approx(0.25)


def test_a_replay_that_is_far_off_says_so() -> None:
    slow = Release(version_id="ver-1", speed=Speed(0.05, 5e-4, 3e-4, 2e-7), size=SIZE)
    found = replay(msgspec.structs.replace(SETUP, releases=(slow,)), ledger(), [])
    assert found.notes[-1].startswith("Warning: as it is, the replay is more than 20% off what was recorded: first")


def test_a_replay_whose_replicas_cost_what_none_did_says_so() -> None:
    (life,) = ledger().lives or ()
    down = msgspec.structs.replace(
        ledger(), lives=(msgspec.structs.replace(life, ended_at=T0 + SPAN_S),), replayed=tuple(stretches(T0, T0 + 7200))
    )
    assert "replica hours 2 instead of 0.167" in replay(SETUP, down, []).notes[-1]


def test_a_replay_that_refuses_what_was_answered_says_so() -> None:
    hasty = msgspec.structs.replace(SETUP, gateway=GatewayBody(queue_max=1, queue_wait_s=0.1))
    assert "requests refused that were answered" in replay(hasty, ledger(), []).notes[-1]


def test_where_all_are_refused_nobody_waited_no_time() -> None:
    tiny = Change(name="tiny", settings={"engine.kv_tokens": "16", "gateway.queue_wait_s": "0.1"})
    few = msgspec.structs.replace(ledger(), asked=ledger().asked[:30])
    figures = run(changed(SETUP, tiny), few, tiny, 1).figures
    assert figures["refused"] == figures["requests"] == 30
    assert not {"ttft_p50_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s", "late"} & figures.keys()
    failed = tuple(msgspec.structs.replace(one, is_ok=False, ttft_s=None) for one in few.asked)
    recorded = recorded_only(msgspec.structs.replace(few, asked=failed), []).tried[0]
    assert recorded.mean("latency_p99_s") is None


def test_endpoints_together_are_their_sums_and_the_share_that_waits_of_all() -> None:
    whole = total([results(), results()], title="two")
    for one, each in zip(whole.tried, results().tried, strict=True):
        figures = each.runs[0].figures
        assert one.mean("requests") == 2 * figures["requests"]
        assert one.mean("gpu_usd") == pytest.approx(2 * figures["gpu_usd"])
        assert one.mean("late") == pytest.approx(figures["late"])
        assert one.mean("usd_per_million") == pytest.approx(figures["usd_per_million"])
        assert one.mean("ttft_p99_s") is None


def test_the_speed_of_an_engine_is_learned_from_its_rows() -> None:
    learned = learn(ledger().asked, SIZE)
    assert learned is not None
    assert learned.judged.worst < 0.1
    assert learned.speed.step_s == pytest.approx(SPEED.step_s, rel=0.15)
    true, wrong = judge(SPEED, ledger().asked, SIZE), judge(Speed(0.05), ledger().asked, SIZE)
    assert true is not None
    assert wrong is not None
    assert true.judged.worst < 0.1
    assert wrong.judged.worst > 0.3


def test_whole_answers_are_enough_to_learn_from_and_few_requests_are_not() -> None:
    blind = [msgspec.structs.replace(one, ttft_s=None) for one in ledger().asked]
    learned = learn(blind, SIZE)
    assert learned is not None
    seen = judge(learned.speed, ledger().asked, SIZE)
    assert seen is not None
    assert seen.judged.worst < 0.25
    assert learn(ledger().asked[:10], SIZE) is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"scaling.many": "1"}, "there is no 'scaling.many'; scaling has min_replicas"),
        ({"scaling.max_replicas": "two"}, "scaling.max_replicas=two: Expected `int`"),
        ({"scaling.max_replicas": "-1"}, "it must be a number from 0 on"),
        ({"scaling.min_replicas": "9"}, "is above scaling.max_replicas=1"),
        ({"colour": "red"}, "'colour' cannot be set"),
        ({"load_s": "soon"}, "load_s=soon: it must be a number"),
        ({"autoscale.up_utilization": "500"}, "autoscale.up_utilization must be 1 to 100"),
        ({"autoscale.down_utilization": "90"}, "autoscale.down_utilization must be below up_utilization"),
        ({"autoscale.idle": "often"}, "autoscale.idle=often: Invalid enum value"),
        ({"autoscale.prewarm": "false"}, "autoscale.prewarm changes nothing in a replay"),
        ({"engine.slots": "0"}, "engine.slots=0: Expected `int` >= 1"),
        ({"gateway.workers": "0"}, "gateway.workers=0: Expected `int` >= 1"),
        ({"scaling.idle_s": "nan"}, "scaling.idle_s=nan: it must be a number from 0 on"),
        ({"scaling.idle_s": "inf"}, "scaling.idle_s=inf: it must be a number from 0 on"),
        ({"scaling.max_replicas": "5000000"}, "scaling.max_replicas must be 1 to 1000"),
        ({"hardware.min_replicas": "0"}, "scaling.min_replicas 0 needs scaling.scale_to_zero: true"),
        ({"scaling.target_value": "0"}, "scaling.target_value must be above 0"),
        ({"scaling.metric": "mood"}, "scaling.metric must be one of queue_depth, gpu_utilization"),
        ({"scaling.scale_to_zero": "true", "scaling.idle_s": "0.5"}, "scaling.idle_s must be 1 to 2592000"),
    ],
)
def test_what_cannot_be_set_is_refused_with_what_can(settings: dict[str, str], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        changed(SETUP, Change(name="x", settings=settings))


def test_settings_reach_what_they_are_of() -> None:
    paths = {
        "scaling.scale_to_zero": "true",
        "autoscale.idle": "learned",
        "autoscale.tier": "none",
        "gateway.queue_wait_s": "5",
        "engine.max_num_seqs": "16",
        "engine.load_s": "3.5",
        "hardware.max_replicas": "7",
    }
    found = changed(SETUP, Change(name="x", settings=paths))
    spec = world_of(found)
    assert (spec.scaling, spec.autoscale) == (found.scaling, found.autoscale)
    assert found.scaling.max_replicas == 7
    assert (found.scaling.scale_to_zero, found.autoscale.idle, found.autoscale.tier) == (True, "learned", None)
    assert (spec.queue_wait_s, spec.load_s, spec.releases[0].engine.max_num_seqs) == (5.0, 3.5, 16)


def test_a_share_of_an_accelerator_is_of_the_same_bytes_on_another() -> None:
    setup = msgspec.structs.replace(SETUP, accelerators=0.75)
    assert changed(setup, Change(name="x", hardware="l40s")).accelerators == pytest.approx(0.375)
    half = msgspec.structs.replace(setup, accelerators=0.5)
    assert changed(half, Change(name="x", hardware="t4")).accelerators == pytest.approx(0.75)
    with pytest.raises(SettingError, match="chat does not fit 1 x t4: it has 18 of 16 GiB"):
        changed(setup, Change(name="x", hardware="t4"))
    with pytest.raises(SettingError, match="what fits a 'cpu'"):
        changed(setup, Change(name="x", hardware="cpu"))
    assert changed(msgspec.structs.replace(setup, kind="cpu"), Change(name="x", hardware="l4")).accelerators == 1.0


def test_hardware_that_a_model_does_not_fit_or_that_nobody_knows_is_refused() -> None:
    facts = ModelFacts(
        format="safetensors", parameters=70 * 10**9, weights_bytes=140 * 10**9, layers=80, heads=64, kv_heads=8,
        head_size=128, embedding_size=8192, vocabulary=128_000, kv_bytes_per_token=327_680, quantisation="BF16",
    )  # fmt: skip
    big = Release(version_id="ver-1", label="chat@v1", speed=SPEED, size=SIZE, facts=facts)
    setup = msgspec.structs.replace(SETUP, releases=(big,), kind="h200", accelerators=2.0)
    assert changed(setup, Change(name="x", hardware="b200")).releases[0].size.kv_tokens > 40_000
    with pytest.raises(SettingError, match="chat@v1 does not fit 2 x l4"):
        changed(setup, Change(name="x", hardware="l4"))
    with pytest.raises(SettingError, match="nothing is known of 'tpu'"):
        changed(setup, Change(name="x", hardware="tpu"))
    with pytest.raises(SettingError, match="say it with --runs-on"):
        changed(msgspec.structs.replace(SETUP, kind=""), Change(name="x", hardware="l4"))
