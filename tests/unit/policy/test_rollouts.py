"""What a rollout makes of an endpoint: replicas and weights, however it goes."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.rollouts import JUDGEMENTS_KEPT, Rollout, RolloutKind, RolloutMode, RolloutState
from modelyard.policy.canary import Decision, Verdict
from modelyard.policy.rollouts import (
    NotPossibleError,
    advanced,
    begun,
    check_free,
    decided,
    moved_to,
    paused,
    promoted,
    resumed,
    rolled_back,
    rolling,
    settled,
    sizes,
    spares,
    stable_of,
    weight_of,
)

OLD, NEW, OTHER = "ver-old", "ver-new", "ver-other"
NOW = 1000.0
NAMES = {OLD: "v1", NEW: "v2", OTHER: "v3"}


def plain(*releases: Release) -> Endpoint:
    return Endpoint("ep-1", "ten-a", "smol", releases or (Release(OLD),), Scaling(), 0)


def canary(steps: tuple[int, ...] = (10, 25, 50, 100), *, keep_s: float = 600.0) -> Endpoint:
    return begun(plain(), Rollout(OLD, NEW, NOW, asked_at=NOW, steps=steps, keep_s=keep_s))


def state(endpoint: Endpoint) -> Rollout:
    assert endpoint.rollout is not None
    return endpoint.rollout


def weights(endpoint: Endpoint) -> dict[str, int]:
    return {release.version_id: release.weight for release in endpoint.releases}


def test_candidate_gets_traffic_when_it_has_the_replicas_for_it() -> None:
    endpoint = canary()
    assert weights(endpoint) == {OLD: 100, NEW: 0}
    assert sizes(8, endpoint, NOW) == {OLD: 8, NEW: 1}
    assert advanced(endpoint, {OLD: 8}, 8, NOW) == endpoint
    endpoint = advanced(endpoint, {OLD: 8, NEW: 1}, 8, NOW + 5)
    assert weights(endpoint) == {OLD: 90, NEW: 10}
    assert state(endpoint).step_began_at == NOW + 5
    endpoint = decided(endpoint, Decision(Verdict.PROMOTE, "good"), NOW + 60)
    assert (state(endpoint).target, weights(endpoint)) == (25, {OLD: 90, NEW: 10})
    assert sizes(8, endpoint, NOW) == {OLD: 8, NEW: 2}
    assert advanced(endpoint, {OLD: 8, NEW: 1}, 8, NOW + 61) == endpoint
    assert weights(advanced(endpoint, {OLD: 8, NEW: 2}, 8, NOW + 62)) == {OLD: 75, NEW: 25}


def test_promoted_version_has_everything_while_the_old_one_is_kept_for_a_while() -> None:
    endpoint = promoted(canary(), NOW)
    assert state(endpoint).mode is RolloutMode.MANUAL, "no judge overrules who promotes"
    assert sizes(4, endpoint, NOW) == {OLD: 4, NEW: 4}
    endpoint = advanced(endpoint, {OLD: 4, NEW: 4}, 4, NOW)
    assert (state(endpoint).state, weights(endpoint)) == (RolloutState.PROMOTED, {OLD: 0, NEW: 100})
    assert sizes(4, endpoint, NOW + 599) == {OLD: 4, NEW: 4}
    assert spares(endpoint) == {OLD}
    assert advanced(endpoint, {OLD: 4, NEW: 4}, 4, NOW + 599) == endpoint
    over = advanced(endpoint, {OLD: 4, NEW: 4}, 4, NOW + 600)
    assert (weights(over), state(over).is_live) == ({NEW: 100}, False)
    assert weights(rolled_back(endpoint, "asked", NOW + 1)) == {OLD: 100}
    with pytest.raises(NotPossibleError, match="not kept any more"):
        rolled_back(over, "asked", NOW + 601)


@pytest.mark.parametrize("verdict", [Verdict.ROLL_BACK, None])
def test_rollback_is_weights_alone(verdict: Verdict | None) -> None:
    endpoint = advanced(canary((50, 100)), {OLD: 2, NEW: 1}, 2, NOW)
    assert weights(endpoint) == {OLD: 50, NEW: 50}
    assert sizes(2, endpoint, NOW)[OLD] == 2, "the version to go back to has all of its replicas"
    decision = Decision(Verdict.ROLL_BACK, "bad", {"errors": 3})
    back = decided(endpoint, decision, NOW) if verdict else rolled_back(endpoint, "asked", NOW)
    assert (weights(back), state(back).state) == ({OLD: 100}, RolloutState.ROLLED_BACK)
    assert sizes(2, back, NOW) == {OLD: 2}
    if verdict:
        assert (state(back).reason, state(back).judgements[-1].data) == ("bad", {"errors": 3})
    with pytest.raises(NotPossibleError, match="no rollout to go back from"):
        rolled_back(back, "again", NOW)


def test_others_shadow_on_during_a_rollout() -> None:
    endpoint = begun(plain(Release(OLD), Release(OTHER, 0, 20)), Rollout(OLD, NEW, NOW))
    assert sizes(3, endpoint, NOW) == {OLD: 3, OTHER: 1, NEW: 1}
    assert sizes(0, endpoint, NOW) == {OLD: 0, OTHER: 0, NEW: 0}, "it sleeps as a whole"
    back = rolled_back(endpoint, "asked", NOW)
    assert back.releases == (Release(OLD, 100, 0), Release(OTHER, 0, 20))


def test_shadow_that_becomes_the_candidate_answers_and_is_copied_to_no_more() -> None:
    endpoint = begun(plain(Release(OLD), Release(NEW, 0, 20)), Rollout(OLD, NEW, NOW))
    assert advanced(endpoint, {OLD: 1, NEW: 1}, 1, NOW).releases == (Release(OLD, 90, 0), Release(NEW, 10, 0))


def test_share_can_be_moved_by_hand_down_at_once_and_up_with_replicas() -> None:
    endpoint = advanced(canary((50, 100)), {OLD: 4, NEW: 2}, 4, NOW)
    lower = moved_to(endpoint, msgspec.structs.replace(state(endpoint), steps=(5, 100)), NOW + 1)
    assert weights(lower) == {OLD: 95, NEW: 5}
    higher = moved_to(endpoint, msgspec.structs.replace(state(endpoint), steps=(75, 100)), NOW + 1)
    assert weights(higher) == {OLD: 50, NEW: 50}
    assert weights(advanced(higher, {OLD: 4, NEW: 3}, 4, NOW + 2)) == {OLD: 25, NEW: 75}


def test_paused_rollout_stays_and_begins_its_step_anew() -> None:
    endpoint = decided(advanced(canary(), {OLD: 9, NEW: 9}, 9, NOW), Decision(Verdict.PROMOTE, "good"), NOW)
    held = paused(endpoint, "lunch")
    assert advanced(held, {OLD: 9, NEW: 9}, 9, NOW) == held
    again = resumed(held, NOW + 50)
    assert (state(again).state, state(again).step_began_at) == (RolloutState.RUNNING, NOW + 50)
    assert weights(advanced(again, {OLD: 9, NEW: 9}, 9, NOW + 51)) == {OLD: 75, NEW: 25}


def test_second_rollout_waits_for_the_first_and_lets_go_of_what_is_kept() -> None:
    with pytest.raises(NotPossibleError, match="a rollout of version 'v2' is running at 0 %"):
        check_free(canary(), NAMES)
    done = advanced(promoted(canary(), NOW), {OLD: 1, NEW: 1}, 1, NOW)
    check_free(done, NAMES)
    assert weights(begun(done, Rollout(NEW, OTHER, NOW))) == {NEW: 100, OTHER: 0}
    assert weights(settled(done)) == {NEW: 100}
    assert weights(settled(done, {OLD})) == {OLD: 0, NEW: 100}, "somebody wants it for something else"
    with pytest.raises(NotPossibleError, match="'v1' 60 %, 'v2' 40 %"):
        stable_of(plain(Release(OLD, 60), Release(NEW, 40)), NAMES)


def test_waits_that_only_count_on_are_remembered_once() -> None:
    endpoint = canary()
    for number in range(50):
        endpoint = decided(endpoint, Decision(Verdict.WAIT, f"had {number} of 100 requests"), NOW + number)
    assert len(state(endpoint).judgements) == 1
    for number in range(50):
        endpoint = decided(endpoint, Decision(Verdict.WAIT, "had it" + "x" * number), NOW + number)
    assert len(state(endpoint).judgements) == JUDGEMENTS_KEPT


@given(st.integers(1, 150), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_rolling_change_never_has_less_capacity_and_one_replica_more_at_most(size: int, seed: int) -> None:
    chance = random.Random(seed)
    endpoint = rolling(plain(), NEW, NOW)
    ready = {OLD: size, NEW: 0}
    for _ in range(3 * size + 5):
        wanted = sizes(size, endpoint, NOW)
        allowed = size + max(1, -(-size // 100))
        assert sum(wanted.values()) <= allowed
        # Old ones go at once, new ones come when they like: the worst order for those who are served.
        ready[OLD] = min(ready[OLD], wanted.get(OLD, 0))
        if chance.random() < 0.9:
            ready[NEW] = min(wanted.get(NEW, 0), ready[NEW] + 1)
        assert sum(ready.values()) >= size, (ready, weights(endpoint))
        before = weight_of(endpoint, NEW)
        endpoint = advanced(endpoint, ready, size, NOW)
        assert weight_of(endpoint, NEW) >= before
        assert ready[NEW] * 100 >= weight_of(endpoint, NEW) * size, "no more traffic than replicas"
        if not state(endpoint).is_open:
            break
    endpoint = advanced(endpoint, ready, size, NOW)
    assert (weights(endpoint), state(endpoint).state) == ({NEW: 100}, RolloutState.PROMOTED)
    assert state(endpoint).kind is RolloutKind.ROLLING


@given(st.lists(st.sampled_from(["ready", "promote", "wait", "back", "pause", "resume", "push", "later"]), max_size=30))
@settings(max_examples=100, deadline=None)
def test_whatever_happens_weights_are_whole_and_the_old_version_is_there_to_go_back_to(steps: list[str]) -> None:
    endpoint, now, size = canary(keep_s=5.0), NOW, 3
    for step in steps:
        now += 1
        try:
            match step:
                case "ready":
                    endpoint = advanced(endpoint, sizes(size, endpoint, now), size, now)
                case "promote" if state(endpoint).state is RolloutState.RUNNING:
                    endpoint = decided(endpoint, Decision(Verdict.PROMOTE, "good"), now)
                case "back":
                    endpoint = rolled_back(endpoint, "asked", now)
                case "pause":
                    endpoint = paused(endpoint, "asked")
                case "resume":
                    endpoint = resumed(endpoint, now)
                case "push":
                    endpoint = promoted(endpoint, now)
                case "later":
                    now += 10
                case _:
                    pass
        except NotPossibleError:
            assert not state(endpoint).is_open
        assert sum(weights(endpoint).values()) == 100
        if state(endpoint).is_open or now < state(endpoint).kept_until:
            assert sizes(size, endpoint, now)[OLD] == size
