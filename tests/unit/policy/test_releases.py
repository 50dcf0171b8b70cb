"""Weights of releases sum to 100 whatever is asked for, and nobody loses traffic by rounding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.towns import endpoint

from modelyard.domain.endpoints import Release
from modelyard.policy.releases import (
    RELEASES_MAX,
    SharesError,
    serving_release,
    with_release,
    with_shares,
    without_release,
)


def shares(releases: tuple[Release, ...]) -> dict[str, tuple[int, int]]:
    return {release.version_id: (release.weight, release.shadow) for release in releases}


ONE = (Release("v1"),)
TWO = (Release("v1", 90), Release("v2", 10))


def test_a_new_release_takes_its_share_from_the_others_in_proportion() -> None:
    assert shares(with_release(ONE, Release("v2", 10))) == {"v1": (90, 0), "v2": (10, 0)}
    assert shares(with_release(TWO, Release("v3", 50))) == {"v1": (45, 0), "v2": (5, 0), "v3": (50, 0)}
    assert shares(with_release(TWO, Release("v3", 98))) == {"v1": (1, 0), "v2": (1, 0), "v3": (98, 0)}
    assert shares(with_release(TWO, Release("v3", 100))) == {"v1": (0, 0), "v2": (0, 0), "v3": (100, 0)}
    assert shares(with_release(TWO, Release("v3", 0, shadow=5))) == {"v1": (90, 0), "v2": (10, 0), "v3": (0, 5)}


def test_a_release_that_goes_leaves_its_share_to_the_others() -> None:
    assert shares(without_release(TWO, "v1")) == {"v2": (100, 0)}
    three = (Release("v1", 60), Release("v2", 30), Release("v3", 10), Release("v4", 0, shadow=100))
    assert shares(without_release(three, "v1")) == {"v2": (75, 0), "v3": (25, 0), "v4": (0, 100)}


def test_named_weights_stand_and_the_others_share_the_rest() -> None:
    assert shares(with_shares(TWO, {"v2": Release("v2", 25)})) == {"v1": (75, 0), "v2": (25, 0)}
    swapped = {"v1": Release("v1", 0, shadow=20), "v2": Release("v2", 100)}
    assert shares(with_shares(TWO, swapped)) == {"v1": (0, 20), "v2": (100, 0)}


@pytest.mark.parametrize(
    ("change", "param", "reason"),
    [
        (lambda: with_release(ONE, Release("v2", 101)), "weight", "0 to 100"),
        (lambda: with_release(ONE, Release("v2", -1)), "weight", "0 to 100"),
        (lambda: with_release(ONE, Release("v2", 0, shadow=101)), "shadow", "0 to 100"),
        (lambda: with_release(ONE, Release("v2", 10, shadow=10)), "shadow", "one of"),
        (lambda: with_release(TWO, Release("v3", 99)), "weight", "at least 1 to each of the 2"),
        (lambda: with_release((*TWO,) * (RELEASES_MAX // 2), Release("v3", 1)), "weight", "the most"),
        (lambda: without_release(ONE, "v1"), "weight", "no other release has traffic"),
        (lambda: without_release((*ONE, Release("v2", 0, 50)), "v1"), "weight", "no other release has traffic"),
        (lambda: with_shares(TWO, {"v1": Release("v1", 60), "v2": Release("v2", 60)}), "weight", "sum to 120"),
        (lambda: with_shares(TWO, {"v1": Release("v1", 60), "v2": Release("v2", 30)}), "weight", "10 of 100"),
        (lambda: with_shares((*ONE, Release("v2", 0)), {"v1": Release("v1", 40)}), "weight", "60 of 100"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(change: object, param: str, reason: str) -> None:
    with pytest.raises(SharesError, match=reason) as refusal:
        change()  # type: ignore[operator]
    assert refusal.value.param == param


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_weights_always_sum_to_the_whole_and_traffic_stays_traffic(wanted: list[int]) -> None:
    releases: tuple[Release, ...] = ONE
    for number, weight in enumerate(wanted, 2):
        before = releases
        try:
            releases = with_release(releases, Release(f"v{number}", weight))
        except SharesError:
            continue
        assert sum(release.weight for release in releases) == 100
        if weight < 100:
            kept = shares(releases)
            assert all(kept[old.version_id][0] > 0 for old in before if old.weight)
    while sum(release.weight > 0 for release in releases) > 1:
        gone = max(releases, key=lambda release: release.weight)
        releases = without_release(releases, gone.version_id)
        assert sum(release.weight for release in releases) == 100


@pytest.mark.parametrize(
    ("releases", "serving"),
    [
        (ONE, "v1"),
        (TWO, "v1"),
        ((Release("v1", 25), Release("v2", 75)), "v1"),
        ((Release("v1", 0), Release("v2", 100)), "v2"),
        ((Release("v1", 0, shadow=50), Release("v2", 100)), "v2"),
        ((), None),
    ],
)
def test_what_serves_is_the_first_with_traffic(releases: tuple[Release, ...], serving: str | None) -> None:
    found = serving_release(endpoint("one", releases=releases))
    assert (found and found.version_id) == serving
