"""The catalog: what is learnt of a model estimates prompts without ever blowing them up."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelyard.config import GatewayConfig
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import EndpointRoute, EngineSpeed, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.usage import Price
from modelyard.gateway.catalog import CHARS_PER_TOKEN, Catalog, EndpointState
from modelyard.policy.dispatch import Dispatcher, DispatchRules, Verdict
from modelyard.policy.job import Job


def state() -> EndpointState[Any]:
    unused: Any = None
    return EndpointState(unused, unused, last_request_s=0.0)


def test_long_prompts_teach_the_length_of_a_token() -> None:
    endpoint = state()
    for _ in range(200):
        endpoint.learn(text_length=3000, prompt_tokens=1000, seconds=1)
    assert endpoint.prompt_tokens(3000) in range(995, 1005)


def test_what_is_not_text_teaches_nothing_of_text() -> None:
    """A picture is many tokens to few characters; others must not pay for it."""
    endpoint = state()
    for _ in range(200):
        endpoint.learn(text_length=2, prompt_tokens=4000, seconds=1)
        endpoint.learn(text_length=300, prompt_tokens=4000, seconds=1)
    assert endpoint.prompt_tokens(4000) == 4000 / CHARS_PER_TOKEN


def test_short_prompts_teach_what_the_template_adds() -> None:
    endpoint = state()
    for _ in range(200):
        endpoint.learn(text_length=40, prompt_tokens=41, seconds=1)
    assert endpoint.prompt_tokens(40) in range(40, 42)
    assert endpoint.prompt_tokens(4000) in range(1030, 1032)


def test_one_answer_is_enough_to_estimate_the_prompt_of_a_stream_that_is_left() -> None:
    """A template of 29 tokens: SmolLM2's, which puts a system message before every chat."""
    endpoint = state()
    endpoint.learn(text_length=8, prompt_tokens=31, seconds=1)
    assert endpoint.prompt_tokens(8) == 31
    assert endpoint.prompt_tokens(12) in range(31, 33)


def test_a_short_prompt_with_tools_is_not_billed_to_those_without() -> None:
    endpoint = state()
    endpoint.learn(text_length=8, prompt_tokens=180, seconds=1)
    for _ in range(6):
        endpoint.learn(text_length=8, prompt_tokens=31, seconds=1)
    assert endpoint.prompt_tokens(8) in range(31, 35)


def test_the_template_is_not_counted_with_the_text_as_well() -> None:
    endpoint = state()
    for _ in range(200):
        endpoint.learn(text_length=8, prompt_tokens=31, seconds=1)
        endpoint.learn(text_length=300, prompt_tokens=104, seconds=1)
    assert endpoint.prompt_tokens(300) in range(102, 106)
    assert endpoint.prompt_tokens(8) in range(30, 33)


class Waiter:
    """Whoever asks for a replica."""

    failed_on = ()

    def __init__(self) -> None:
        self.job = Job("t")

    def turned_away(self, verdict: Verdict) -> None:
        """Nobody is in these tests."""


def served(*, in_flight: int, slots: int = 2) -> EndpointState[Any]:
    """Return an endpoint with one replica that has this many requests."""
    dispatcher: Dispatcher[Any] = Dispatcher(
        "ep", rules=DispatchRules(), deliver=lambda waiter, replica: True, chance=lambda: 0.0
    )
    replica = ReplicaRoute("r", "h", 1, "s", slots)
    dispatcher.update([("v", 100, 0, [(replica, slots)])], now_s=0.0)
    endpoint = EndpointState(
        cast("Any", SimpleNamespace(progress=Progress(Stage.READY))), dispatcher, last_request_s=0.0
    )
    for _ in range(in_flight):
        dispatcher.arrive(Waiter(), now_s=1.0, deadline_s=9.0)
        endpoint.in_flight += 1
    return endpoint


def test_a_request_that_came_now_would_not_wait_while_there_is_room() -> None:
    assert served(in_flight=0).wait_s(1.0) == 0.0
    assert served(in_flight=1).wait_s(1.0) == 0.0


def test_the_predicted_wait_grows_with_the_line() -> None:
    waits = [served(in_flight=count).wait_s(1.0) for count in (2, 3, 4, 8)]
    assert 0.0 < waits[0] < waits[1] < waits[2] < waits[3]


def test_a_sleeping_endpoint_has_no_wait_until_somebody_stands_before_it() -> None:
    endpoint = served(in_flight=0)
    endpoint.dispatcher.update([], now_s=1.0)
    endpoint.route = cast("Any", SimpleNamespace(progress=Progress(Stage.LOADING, eta_s=12.0)))
    assert endpoint.wait_s(1.0) == 0.0
    endpoint.dispatcher.arrive(Waiter(), now_s=1.0, deadline_s=9.0)
    endpoint.in_flight = 1
    assert endpoint.wait_s(1.0) == 12.0


def test_until_an_engine_has_answered_here_its_speed_is_what_the_controller_learned() -> None:
    endpoint = served(in_flight=3)
    replica = ReplicaRoute("r", "h", 1, "s", 2)
    endpoint.route = cast(
        "Any", SimpleNamespace(progress=Progress(Stage.READY), releases=(ReleaseRoute("v", 100, (replica,)),))
    )
    unknown_s = endpoint.wait_s(1.0)
    endpoint.expect({"other": EngineSpeed("other", 9.0, 0.0, 0.0, 0.0)})
    assert endpoint.wait_s(1.0) == unknown_s
    endpoint.expect({"v": EngineSpeed("v", 0.2, 0.0, 0.001, 0.0)})
    endpoint.expect({"v": EngineSpeed("v", 0.1, 0.0, 0.001, 0.0)})  # the newest word, as long as it is all there is
    assert endpoint.mean_s == pytest.approx(25.6)
    assert endpoint.wait_s(1.0) > 10 * unknown_s  # 256 tokens, a tenth of a second each
    assert 800 < endpoint.dispatcher.model.prefill_tokens_per_s < 1000
    known_s = endpoint.mean_s
    endpoint.learn(text_length=400, prompt_tokens=100, seconds=2.0)
    learned_s = endpoint.mean_s
    endpoint.expect({"v": EngineSpeed("v", 0.5, 0.0, 0.0, 0.0)})
    assert learned_s < known_s
    assert endpoint.mean_s == learned_s


def test_speeds_that_were_told_serve_endpoints_that_come_later_until_they_are_told_without_them() -> None:
    def route(name: str, version: str) -> EndpointRoute:
        return EndpointRoute(
            name, "t", name, False, 0, (ReleaseRoute(version, 100, ()),), frozenset(), frozenset(), 0, Price(1, 1, 1),
            Progress(Stage.READY),
        )  # fmt: skip

    catalog: Catalog[Any] = Catalog(
        worker=0, settings=GatewayConfig(workers=1), deliver=lambda waiter, load: True, chance=lambda: 0.0
    )
    first = route("first", "v")
    catalog.take(RoutingTable("e", 1, (), (), (first,)), now_s=0.0)
    catalog.expect([EngineSpeed("v", 0.1, 0.0, 0.0, 0.0), EngineSpeed("w", 0.2, 0.0, 0.0, 0.0)])
    catalog.take(RoutingTable("e", 2, (), (), (first, route("second", "w"))), now_s=1.0)
    assert [one.mean_s for one in catalog.endpoints] == pytest.approx([25.6, 51.2])
    catalog.expect([EngineSpeed("v", 0.1, 0.0, 0.0, 0.0)])
    catalog.take(RoutingTable("e", 3, (), (), (first, route("third", "w"))), now_s=2.0)
    assert [one.mean_s for one in catalog.endpoints] == pytest.approx([25.6, 1.0])


def test_workers_divide_the_memory_of_a_replica_as_they_divide_its_slots() -> None:
    replica = ReplicaRoute("r", "h", 1, "s", 8, kv_tokens=1000)
    route = EndpointRoute(
        "ep", "t", "m", False, 0, (ReleaseRoute("v", 100, (replica,)),), frozenset(), frozenset(), 0, Price(1, 1, 1),
        Progress(Stage.READY),
    )  # fmt: skip
    taken = []
    for worker in (0, 1):
        catalog: Catalog[Any] = Catalog(
            worker=worker, settings=GatewayConfig(workers=2), deliver=lambda waiter, load: True, chance=lambda: 0.0
        )
        catalog.take(RoutingTable("e", 1, (), (), (route,)), now_s=0.0)
        (endpoint,) = catalog.endpoints
        found = []
        for _ in range(8):
            waiter = Waiter()
            waiter.job = Job("t", prompt_tokens=200, output_tokens=40, output_max=40)
            found.append(endpoint.dispatcher.arrive(waiter, now_s=0.0, deadline_s=9.0))
        taken.append(sum(one is not Verdict.WAIT for one in found))
    assert taken == [2, 2]  # of 970 tokens that may be reserved, 240 each
