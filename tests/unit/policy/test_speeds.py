"""Speeds of engines: one model a version, and what replicas write of late."""

from modelyard.policy.engine_model import SAMPLES_MIN, Look
from modelyard.policy.speeds import Speeds


def page(second: int, *, tokens: float | None = None) -> Look:
    """Return what a page says of an engine that takes 20 ms for each iteration of four requests."""
    return Look(float(second), 4, 0.0, 200.0 * second if tokens is None else tokens, iterations=50.0 * second)


def taught(seconds: int) -> Speeds:
    speeds = Speeds()
    for second in range(seconds):
        speeds.take("a", "v", page(second))
    return speeds


def test_a_speed_is_told_once_enough_was_seen() -> None:
    assert not list(taught(SAMPLES_MIN).known())
    ((version_id, speed),) = taught(SAMPLES_MIN + 1).known()
    assert version_id == "v"
    assert abs(speed.iteration_s(4, 0, 0) - 0.02) < 1e-4


def test_what_replicas_write_is_summed_and_a_page_read_twice_or_late_changes_nothing() -> None:
    speeds = taught(5)
    assert speeds.tokens_s(["a", "b"]) == 200.0
    speeds.take("a", "v", page(4, tokens=9e9))
    assert speeds.tokens_s(["a"]) == 200.0
    assert speeds.tokens_s(["b"]) is None
    speeds.take("b", "v", page(1))
    speeds.take("b", "v", page(2))
    assert speeds.tokens_s(["a", "b"]) == 400.0


def test_an_engine_that_begins_anew_writes_what_it_wrote_before() -> None:
    speeds = taught(5)
    speeds.take("a", "v", page(6, tokens=3.0))
    assert speeds.tokens_s(["a"]) == 200.0
    assert speeds.models["v"].samples == 4


def test_versions_that_nobody_serves_are_forgotten() -> None:
    speeds = taught(SAMPLES_MIN + 1)
    speeds.keep([], ["v"])
    assert speeds.tokens_s(["a"]) is None
    assert [version_id for version_id, _ in speeds.known()] == ["v"]
    speeds.keep([], ["w"])
    assert not list(speeds.known())
