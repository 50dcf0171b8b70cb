"""The choice of a replica: stories, what must hold for any fleet, sessions, releases, and learning the engine."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.engine_model import Speed
from modelyard.policy.job import NEVER_S, Job, Look, Looks
from modelyard.policy.prefixes import PrefixHolders, PrefixIndex
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.routing import (
    CROWD,
    EXPECTED_TOKENS,
    STICKY_S,
    UNKNOWN_ENGINE,
    Candidate,
    EngineModel,
    added_seconds,
    behind_share,
    choose,
    expected,
    is_shadowed,
    learn,
    need_tokens,
    pick_release,
    preferred,
    release_point,
    stable_hash,
)

NOW_S = 100.0
MODEL = EngineModel(prefill_tokens_per_s=1000.0, block_tokens=100.0)
LONG = tuple(range(1, 41))


@dataclass(slots=True, eq=False)
class Replica:
    """A ``Candidate`` as plain values."""

    name: str
    slots: int = 8
    running: int = 0
    running_elsewhere: int = 0
    is_draining: bool = False
    ejected_until_s: float = 0.0
    last_dispatch: int = 0
    pending_tokens: int = 0
    reading_since_s: float = NEVER_S
    version_id: str = "v1"
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(1000))
    identity: int = 0

    def __post_init__(self) -> None:
        self.identity = stable_hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name} {self.running}+{self.running_elsewhere}/{self.slots}, {self.pending_tokens} pending>"


def pick(replicas: list[Replica], job: Job, **more: object) -> Replica | None:
    return choose(replicas, job, now_s=NOW_S, model=MODEL, chance=random.Random(1).random, **more)  # type: ignore[arg-type]


def takes(replica: Replica, avoid: list[Replica]) -> bool:
    return (
        replica.running < replica.slots
        and not replica.is_draining
        and replica.ejected_until_s <= NOW_S
        and replica not in avoid
    )


def test_the_dispatchers_replica_is_a_candidate() -> None:
    def read(candidate: Candidate) -> float:
        return added_seconds(candidate, Job("t"), MODEL, now_s=NOW_S)

    from modelyard.domain.routing_table import ReplicaRoute

    assert read(ReplicaLoad(ReplicaRoute("r", "127.0.0.1", 1, "s", 4), "v1", 4)) > 0.0


def test_equal_replicas_take_turns() -> None:
    replicas = [Replica("a", last_dispatch=3), Replica("b", last_dispatch=1), Replica("c", last_dispatch=2)]
    assert pick(replicas, Job("t", prompt_tokens=50)) is replicas[1]


def test_the_replica_that_has_the_prompt_is_worth_a_short_wait_but_not_a_long_one() -> None:
    cached, idle = Replica("cached", running=1, pending_tokens=500), Replica("idle")
    cached.prefixes.add(LONG)
    job = Job("t", prompt_tokens=4100, prefix=LONG)
    assert pick([cached, idle], job) is cached
    cached.pending_tokens = 40_000
    assert pick([cached, idle], job) is idle


def test_what_has_been_read_meanwhile_is_not_waited_for() -> None:
    nearly_done = Replica("nearly done", running=1, pending_tokens=3000, reading_since_s=NOW_S - 2.5)
    just_begun = Replica("just begun", running=1, pending_tokens=2000, reading_since_s=NOW_S)
    job = Job("t", prompt_tokens=100)
    assert pick([nearly_done, just_begun], job) is nearly_done
    nearly_done.reading_since_s = NEVER_S
    assert pick([nearly_done, just_begun], job) is just_begun


def test_an_engine_that_hangs_does_not_look_idle() -> None:
    hangs = Replica("hangs", running=1, pending_tokens=3000, reading_since_s=NOW_S - 1000)
    assert pick([hangs, Replica("idle", running=1, last_dispatch=9)], Job("t", prompt_tokens=100)) is not hangs


def test_a_full_fleet_keeps_prefixes_together() -> None:
    cached, shorter = Replica("cached", running=1), Replica("shorter line", running=1)
    cached.prefixes.add(LONG[:10])
    job = Job("t", prompt_tokens=4000, prefix=LONG[:10])
    cached.pending_tokens, shorter.pending_tokens = 2400, 0
    assert pick([cached, shorter], job) is shorter
    cached.pending_tokens, shorter.pending_tokens = 6400, 4000
    assert pick([cached, shorter], job) is cached


def test_load_from_other_gateways_counts() -> None:
    replicas = [Replica("busy elsewhere", running_elsewhere=5), Replica("ours", running=2)]
    assert pick(replicas, Job("t", prompt_tokens=1000)) is replicas[1]


def test_a_request_goes_where_it_fits() -> None:
    replicas = [Replica("small"), Replica("large", running=5)]
    assert pick(replicas, Job("t"), fits=lambda replica: replica.name == "large") is replicas[1]
    assert pick(replicas, Job("t"), fits=lambda replica: False) is None
    assert pick(replicas[:1], Job("t"), fits=lambda replica: False) is None


fleets = st.lists(
    st.builds(
        Replica,
        name=st.uuids().map(str),
        slots=st.integers(1, 4),
        running=st.integers(0, 4),
        running_elsewhere=st.integers(0, 4),
        is_draining=st.booleans(),
        ejected_until_s=st.sampled_from([0.0, NOW_S, NOW_S + 1.0]),
        last_dispatch=st.integers(0, 9),
        pending_tokens=st.integers(0, 9000),
        reading_since_s=st.sampled_from([NEVER_S, NOW_S - 50.0, NOW_S - 1.0]),
    ),
    max_size=24,
)
jobs = st.builds(
    Job,
    tenant_id=st.just("t"),
    prompt_tokens=st.integers(1, 9000),
    prefix=st.sampled_from([(), LONG[:3], LONG]),
    session=st.sampled_from([0, 5, stable_hash("a user")]),
)


@given(fleets, jobs, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_only_a_replica_with_room_is_chosen_and_one_is_whenever_there_is_one(
    fleet: list[Replica], job: Job, chance: random.Random
) -> None:
    holders: PrefixHolders[Replica] = PrefixHolders(1000)
    for replica in fleet:
        if chance.random() < 0.5:
            replica.prefixes.add(LONG[: chance.randrange(41)])
            holders.add(LONG, replica)
    avoid = [replica for replica in fleet if chance.random() < 0.2]
    unfit = [replica for replica in fleet if chance.random() < 0.2]
    chosen = choose(
        fleet,
        job,
        now_s=NOW_S,
        model=MODEL,
        avoid=avoid,
        fits=lambda replica: replica not in unfit,
        chance=chance.random,
        holders=holders,
    )
    free = [replica for replica in fleet if takes(replica, avoid) and replica not in unfit]
    assert chosen in free if free else chosen is None


@given(fleets, jobs)
@settings(deadline=None, max_examples=60)
def test_what_was_seen_of_each_replica_is_what_it_was_judged_by(fleet: list[Replica], job: Job) -> None:
    fleet, job.session = fleet[:CROWD], 0
    for number, replica in enumerate(fleet):
        replica.prefixes.add(LONG[: 7 * number])
    looks: Looks = []
    assert pick(fleet, job, looks=looks) is pick(fleet, job)
    if len(fleet) < 2:
        assert looks == []
        return
    behind = behind_share(fleet, MODEL, now_s=NOW_S) if job.prefix else 0.0
    for replica, raw in zip(fleet, looks, strict=True):
        look = Look(*raw)
        assert (look.identity, look.slots) == (replica.identity, replica.slots)
        if takes(replica, []):
            expected = added_seconds(replica, job, MODEL, now_s=NOW_S, behind=behind)
            assert look.total_s == pytest.approx(expected)
            assert look.matched == replica.prefixes.matched(job.prefix)
            assert look.wait_s + look.prefill_s <= look.total_s * (1 + 1e-9)
        else:
            assert look.total_s == float("inf")


@given(fleets, jobs)
@settings(deadline=None, max_examples=60)
def test_the_loop_chooses_what_added_seconds_says(fleet: list[Replica], job: Job) -> None:
    fleet, job.session = fleet[:CROWD], 0
    for number, replica in enumerate(fleet):
        replica.prefixes.add(LONG[: 7 * number])
    behind = behind_share(fleet, MODEL, now_s=NOW_S) if job.prefix else 0.0
    free = [replica for replica in fleet if takes(replica, [])]
    chosen = pick(fleet, job)
    if chosen is not None:
        costs = [added_seconds(replica, job, MODEL, now_s=NOW_S, behind=behind) for replica in free]
        assert added_seconds(chosen, job, MODEL, now_s=NOW_S, behind=behind) == pytest.approx(min(costs), rel=1e-9)


@given(fleets, jobs, st.integers(1, 5000), st.data())
@settings(deadline=None, max_examples=60)
def test_more_load_never_makes_a_replica_preferred(
    fleet: list[Replica], job: Job, more: int, data: st.DataObject
) -> None:
    # An equal level of work on all raises what keeping prefixes together is worth; here one has none, so that the
    # level stays where it is.
    fleet = [Replica("idle", running=2), *fleet[: CROWD - 1]]
    job.session = 0
    before = pick(fleet, job)
    loser = data.draw(st.sampled_from(fleet[1:] or fleet))
    if loser is before or len(fleet) == 1:
        return
    loser.running += 1
    loser.pending_tokens += more
    assert pick(fleet, job) is before


def test_among_many_the_holder_of_the_prompt_is_found() -> None:
    replicas = [Replica(f"r{number}") for number in range(200)]
    holders: PrefixHolders[Replica] = PrefixHolders(1000)
    replicas[170].prefixes.add(LONG)
    holders.add(LONG, replicas[170])
    job = Job("t", prompt_tokens=4100, prefix=LONG)
    assert pick(replicas, job, holders=holders) is replicas[170]
    # Another release's replica holds it too, but this request is for this release.
    other = Replica("other", version_id="v2")
    other.prefixes.add((*LONG, 99))
    holders.add((*LONG, 99), other)
    assert pick(replicas, Job("t", prompt_tokens=4100, prefix=(*LONG, 99)), holders=holders) is replicas[170]


def test_the_last_free_one_of_many_is_found() -> None:
    replicas = [Replica(f"r{number}", running=8) for number in range(300)]
    assert pick(replicas, Job("t")) is None
    replicas[123].running = 7
    assert pick(replicas, Job("t")) is replicas[123]


def test_many_replicas_share_the_load_by_chance() -> None:
    chance = random.Random(3)
    replicas = [Replica(f"r{number}", slots=64) for number in range(100)]
    for number in range(2000):
        chosen = choose(replicas, Job("t"), now_s=NOW_S, chance=chance.random)
        assert chosen is not None
        chosen.running += 1
        chosen.last_dispatch = number
    assert max(replica.running for replica in replicas) <= 26
    assert min(replica.running for replica in replicas) >= 12


@given(st.integers(2, 24), st.lists(st.integers(1, 2**60), min_size=1, max_size=30), st.data())
@settings(deadline=None, max_examples=60)
def test_only_the_sessions_of_a_removed_replica_move(count: int, sessions: list[int], data: st.DataObject) -> None:
    replicas = [Replica(f"r{number}") for number in range(count)]
    leaves = data.draw(st.sampled_from(replicas))
    left = [replica for replica in replicas if replica is not leaves]
    for session in sessions:
        before, after = preferred(replicas, session), preferred(left, session)
        assert after is before or before is leaves
        leaves.is_draining = True
        assert preferred(replicas, session) is after
        leaves.is_draining = False


def test_among_many_a_session_keeps_its_home_until_the_fleet_changes() -> None:
    replicas = [Replica(f"r{number}") for number in range(40)]
    holders: PrefixHolders[Replica] = PrefixHolders(1000)
    homes = {session: preferred(replicas, session) for session in range(1, 60)}
    for _ in range(2):
        assert {session: pick(replicas, Job("t", session=session), holders=holders) for session in homes} == homes
    gone = homes[1]
    replicas.remove(gone)  # type: ignore[arg-type]
    holders.keep(replicas)
    after = {session: pick(replicas, Job("t", session=session), holders=holders) for session in homes}
    assert gone not in after.values()
    assert all(after[session] is home for session, home in homes.items() if home is not gone)


def test_among_many_a_session_of_another_release_or_of_a_draining_replica_finds_a_new_home() -> None:
    one = [Replica(f"a{number}") for number in range(20)]
    other = [Replica(f"b{number}", version_id="v2") for number in range(20)]
    holders: PrefixHolders[Replica] = PrefixHolders(1000)
    job = Job("t", session=5)
    home = pick(one, job, holders=holders)
    assert home is preferred(one, 5)
    assert pick(other, job, holders=holders) is preferred(other, 5)
    home.is_draining = True  # type: ignore[union-attr]
    assert pick(one, job, holders=holders) is preferred(one, 5) is not home


def test_sessions_spread_evenly() -> None:
    replicas = [Replica(f"r{number}") for number in range(5)]
    for sessions in ([stable_hash(f"user {number}") for number in range(4000)], range(1, 4001)):
        counts = Counter(preferred(replicas, session) for session in sessions)
        assert min(counts.values()) > 700
        assert max(counts.values()) < 900


def test_a_session_stays_where_it_belongs_until_that_costs_more_than_a_second() -> None:
    replicas = [Replica("a"), Replica("b"), Replica("c")]
    home = preferred(replicas, 77)
    assert home is not None
    others = [replica for replica in replicas if replica is not home]
    job = Job("t", prompt_tokens=10, session=77)
    home.running, home.pending_tokens = 1, int(0.8 * STICKY_S * MODEL.prefill_tokens_per_s)
    assert pick(replicas, job) is home
    assert pick(replicas, job, avoid=[home]) in others
    assert pick(replicas, job, fits=lambda replica: replica is not home) in others
    home.pending_tokens = int(1.2 * STICKY_S * MODEL.prefill_tokens_per_s)
    assert pick(replicas, job) in others
    home.pending_tokens, home.running = 0, home.slots
    assert pick(replicas, job) in others


def test_a_session_stays_on_its_release_and_others_are_split_by_weight() -> None:
    def chance() -> float:
        raise AssertionError("a session needs no chance")

    users = [stable_hash(f"user {number}") for number in range(4000)]
    before = [pick_release([90, 10], release_point(user, chance)) for user in users]
    after = [pick_release([80, 20], release_point(user, chance)) for user in users]
    assert 340 <= sum(before) <= 460
    assert 720 <= sum(after) <= 880
    assert all(new >= old for old, new in zip(before, after, strict=True)), "a session moved back"
    assert release_point(0, lambda: 0.25) == 0.25


def test_a_shadow_gets_its_percent() -> None:
    chance = random.Random(5).random
    assert 230 <= sum(is_shadowed(25, chance) for _ in range(1000)) <= 270
    assert not any(is_shadowed(0, lambda: 0.0) for _ in range(10))
    assert is_shadowed(100, lambda: 0.999)


def test_a_replica_with_everything_still_reads_a_token() -> None:
    assert need_tokens(Job("t", prompt_tokens=300), 3, MODEL) == 1
    assert need_tokens(Job("t", prompt_tokens=350), 2, MODEL) == 150
    assert need_tokens(Job("t", prompt_tokens=350), 0, MODEL) == 350


def _learned(rate: float, *, answers: int, start: EngineModel = UNKNOWN_ENGINE, seed: int = 1) -> EngineModel:
    chance = random.Random(seed)
    model = start
    for _ in range(answers):
        tokens = chance.randrange(300, 12_000)
        late = chance.expovariate(1.0) if chance.random() < 0.1 else 0.0
        ttft_s = tokens / rate * chance.uniform(0.9, 1.1) + late
        model = learn(model, prompt_tokens=tokens, cached_tokens=0, ttft_s=ttft_s, running=0, slots=8)
    return model


@pytest.mark.parametrize("rate", [80.0, 2_000.0, 9_000.0, 60_000.0])
def test_the_speed_of_the_engine_is_learned_although_some_answers_are_late(rate: float) -> None:
    assert _learned(rate, answers=60).prefill_tokens_per_s == pytest.approx(rate, rel=0.35)


def test_what_the_controller_learned_of_an_engine_holds_until_it_answers_here() -> None:
    speed = Speed(0.02, 0.0, 1e-4, 0.0)
    model = expected(UNKNOWN_ENGINE, speed)
    assert model.prefill_tokens_per_s == pytest.approx(EXPECTED_TOKENS / (0.02 + 1e-4 * EXPECTED_TOKENS))
    answered = learn(model, prompt_tokens=4000, cached_tokens=0, ttft_s=2.0, running=0, slots=8)
    assert answered.prefill_tokens_per_s == pytest.approx(2000.0)
    assert expected(answered, speed) is answered


def test_a_change_of_speed_is_followed() -> None:
    model = _learned(9_000.0, answers=60)
    model = _learned(3_000.0, answers=80, start=model, seed=2)
    assert model.prefill_tokens_per_s == pytest.approx(3_000.0, rel=0.35)


def test_one_odd_answer_moves_little() -> None:
    model = _learned(9_000.0, answers=60)
    odd = learn(model, prompt_tokens=5000, cached_tokens=0, ttft_s=300.0, running=0, slots=8)
    assert odd.prefill_tokens_per_s > 0.95 * model.prefill_tokens_per_s
    odd = learn(model, prompt_tokens=5000, cached_tokens=0, ttft_s=1e-6, running=0, slots=8)
    assert odd.prefill_tokens_per_s < 1.1 * model.prefill_tokens_per_s


def test_short_and_cached_prompts_teach_nothing() -> None:
    for more in ({"prompt_tokens": 200, "cached_tokens": 0}, {"prompt_tokens": 9000, "cached_tokens": 8900}):
        assert learn(UNKNOWN_ENGINE, ttft_s=2.0, running=0, slots=8, **more) is UNKNOWN_ENGINE
    assert learn(UNKNOWN_ENGINE, prompt_tokens=900, cached_tokens=0, ttft_s=0.0, running=0, slots=8) is UNKNOWN_ENGINE


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6), st.integers(0, 500)), max_size=50))
@settings(deadline=None, max_examples=60)
def test_a_learned_rate_is_always_a_usable_number(answers: list[tuple[int, float, int]]) -> None:
    model = UNKNOWN_ENGINE
    for tokens, ttft_s, running in answers:
        model = learn(model, prompt_tokens=tokens, cached_tokens=0, ttft_s=ttft_s, running=running, slots=64)
    assert 1.0 < model.prefill_tokens_per_s < 2e6
