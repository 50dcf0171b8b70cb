"""How long a request would wait: by the line's own rate, else by answers and slots, else by a load."""

from typing import Any

import pytest

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.admission import OUTPUT_DEFAULT
from modelyard.policy.dispatch import Dispatcher, DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.policy.job import Job
from modelyard.policy.waits import RETRY_AFTER_S, answer_s, retry_after_s, wait_s


class Waiter:
    failed_on = ()

    def __init__(self) -> None:
        self.job = Job("t", prompt_tokens=10, output_tokens=10)

    def turned_away(self, verdict: object) -> None:
        raise AssertionError(verdict)


def line_of(waiting: int, *, slots: int = 2) -> Dispatcher[Any]:
    dispatcher: Dispatcher[Any] = Dispatcher(
        "ep", rules=DispatchRules(), deliver=lambda waiter, replica: True, chance=lambda: 0.5
    )
    if slots:
        dispatcher.update([("v", 100, 0, [(ReplicaRoute("r", "h", 1, "s", slots), slots)])], now_s=0.0)
    for _ in range(slots + waiting):
        dispatcher.arrive(Waiter(), now_s=0.0, deadline_s=1e9)
    return dispatcher


@pytest.mark.parametrize(("waiting", "expected_s"), [(0, 2.0), (1, 4.0), (3, 8.0)])
def test_until_the_line_has_a_rate_answers_and_slots_say_it(waiting: int, expected_s: float) -> None:
    dispatcher = line_of(waiting)
    assert wait_s(dispatcher, now_s=1.0, in_flight=2 + waiting, mean_s=4.0, eta_s=None) == expected_s
    assert wait_s(dispatcher, now_s=1.0, in_flight=0, mean_s=4.0, eta_s=None) == 0.0


def test_for_a_model_that_loads_the_load_says_it() -> None:
    assert wait_s(line_of(1, slots=0), now_s=1.0, in_flight=1, mean_s=4.0, eta_s=30.0) == 30.0
    assert wait_s(line_of(1, slots=0), now_s=1.0, in_flight=1, mean_s=4.0, eta_s=None) == 0.0


def test_what_a_caller_is_told_is_bounded() -> None:
    assert retry_after_s(line_of(0), now_s=1.0, mean_s=1e-9) == RETRY_AFTER_S[0]
    assert retry_after_s(line_of(50), now_s=1.0, mean_s=1e9) == RETRY_AFTER_S[1]
    assert retry_after_s(line_of(3), now_s=1.0, mean_s=4.0) == 8.0


def test_an_answer_of_usual_length_takes_an_iteration_a_token() -> None:
    assert answer_s(Speed(0.02), 8) == pytest.approx(OUTPUT_DEFAULT * 0.02)
    assert answer_s(Speed(0.02, request_s=0.01), 8) > answer_s(Speed(0.02, request_s=0.01), 1)
