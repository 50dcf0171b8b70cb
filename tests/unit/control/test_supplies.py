"""How far a fetch is, and how fast: what an earlier try brought says nothing of the pace."""

from modelyard.control.supplies import _Copying, _fetch_of
from modelyard.domain.endpoints import Stage
from modelyard.policy.progress import Fetch


def test_pace_is_that_of_this_try_alone() -> None:
    copying = _Copying(begun_s=0.0)
    assert _fetch_of(copying, 1.0) == Fetch(Stage.DOWNLOADING, 0, None, None)
    copying.progressed(Stage.DOWNLOADING, 500, 1000, 10.0)
    assert _fetch_of(copying, 11.0) == Fetch(Stage.DOWNLOADING, 50, None, None)
    copying.progressed(Stage.DOWNLOADING, 600, 1000, 12.0)
    assert _fetch_of(copying, 12.0) == Fetch(Stage.DOWNLOADING, 60, 8.0, 50.0)


def test_each_stage_has_a_pace_of_its_own() -> None:
    copying = _Copying(begun_s=0.0)
    copying.progressed(Stage.DOWNLOADING, 0, 1000, 0.0)
    copying.progressed(Stage.DOWNLOADING, 1000, 1000, 100.0)
    copying.progressed(Stage.VERIFYING, 0, 1000, 100.0)
    copying.progressed(Stage.VERIFYING, 500, 1000, 101.0)
    assert _fetch_of(copying, 101.0) == Fetch(Stage.VERIFYING, 50, 1.0, 500.0)
