"""Who could not start in time is told so at once, also before anything was served: by what engines' pages told."""

import pytest
from tests.unit.policy.test_dispatch import Story, start

from modelyard.policy.dispatch import Verdict
from modelyard.policy.engine_model import Speed, request_s


@pytest.mark.parametrize(("speed", "verdict"), [(None, Verdict.WAIT), (1.0, Verdict.FULL), (0.1, Verdict.WAIT)])
def test_the_first_who_wait_are_judged_by_the_engines_speed(speed: float | None, verdict: Verdict) -> None:
    story = Story(("a", 1), places=99)
    if speed is not None:
        story.dispatcher.expect(Speed(speed))
    start(story, "1")
    # At a second a token the second lasts 100 s, and the third may wait for 30.
    assert story.arrive("2", output=100) is Verdict.WAIT
    assert story.arrive("3", output=100) is verdict


@pytest.mark.parametrize(
    ("replicas", "kv_tokens", "verdict"), [(1, 0, Verdict.WAIT), (1, 150, Verdict.FULL), (4, 150, Verdict.WAIT)]
)
def test_each_replica_serves_as_many_at_once_as_its_slots_and_its_memory_hold(
    replicas: int, kv_tokens: int, verdict: Verdict
) -> None:
    story = Story(*[(f"{number}", 8) for number in range(replicas)], places=99, kv_tokens=kv_tokens)
    story.dispatcher.expect(Speed(1.0))
    for number in range(replicas * (1 if kv_tokens else 8)):
        story.arrive(f"{number}", output=100)
    assert story.arrive("next", output=100) is Verdict.WAIT
    assert story.arrive("last", output=100) is verdict


def test_a_short_one_is_not_refused_because_long_ones_wait_that_are_done_sooner_a_token() -> None:
    # An iteration costs the same whatever it does: long prompts are served at 30 times the tokens a second.
    story = Story(("a", 1), places=99)
    story.dispatcher.expect(Speed(0.5))
    story.arrive("running", prompt=3000, output=50)
    for number in range(2):
        assert story.arrive(f"long {number}", prompt=3000, output=50) is Verdict.WAIT
    assert story.arrive("short", prompt=10, output=10) is Verdict.WAIT, "50 s are ahead, and half is believed"


def test_what_others_take_of_an_iteration_counts() -> None:
    speed = Speed(0.01, 0.001, 1e-4, 1e-6)
    alone = request_s(speed, batch=1, prompt_tokens=1000, completion_tokens=100)
    assert alone == pytest.approx(0.1 + 100 * (0.01 + 0.001 + 1e-6 * 1050))
    many = request_s(speed, batch=32, prompt_tokens=1000, completion_tokens=100)
    assert many == pytest.approx(0.1 + 100 * (0.01 + 0.032 + 1e-6 * 32 * 1050) / 32)
