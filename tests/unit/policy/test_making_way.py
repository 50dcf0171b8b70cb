"""Who gives up a slot: lines of batches for everybody, and whoever has too many for who asks for little."""

from dataclasses import dataclass, field

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy import making_way
from modelyard.policy.dispatch import Dispatcher, DispatchRules, ReplicaLoad, Verdict
from modelyard.policy.headroom import LOST_SHARE, SPARE_MAX_S
from modelyard.policy.job import Job

PRIORITY, STANDARD, BATCH = range(3)


class Line:
    """A line on a replica."""

    def __init__(self, gave_way: int = 0, *, is_begun: bool = False) -> None:
        self.gave_way = gave_way
        self.is_begun = is_begun


def cut(lines: list[Line], needed: int) -> list[Line]:
    """Return which lines were cut off until ``needed`` were."""
    gone: list[Line] = []

    def cut_off(line: Line) -> None:
        lines.remove(line)
        gone.append(line)

    making_way.make_way(
        lambda: reversed(lines),
        waits=lambda: len(gone) < needed,
        can_stop=lambda line: not line.is_begun,
        cut=cut_off,
    )
    return gone


def test_the_youngest_makes_way_and_no_more_than_needed() -> None:
    lines = [Line(), Line(), Line()]
    youngest = lines[-1]
    assert cut(lines, 1) == [youngest]


def test_who_has_begun_or_gave_way_often_enough_stays() -> None:
    old, often, begun = Line(), Line(making_way.CUTS_OF_LINE_MAX), Line(is_begun=True)
    assert cut([old, often, begun], 5) == [old]


def test_one_request_cuts_off_a_few_at_most() -> None:
    assert len(cut([Line() for _ in range(50)], 50)) == making_way.CUTS_MAX


@dataclass(eq=False)
class Request:
    """A request on a replica or in line."""

    name: str
    job: Job
    replica: ReplicaLoad | None = None
    gave_way: int = 0
    is_seen: bool = False
    failed_on: list[ReplicaLoad] = field(default_factory=list)
    is_turned_away: bool = False

    def turned_away(self, verdict: Verdict) -> None:
        self.is_turned_away = True


class Endpoint:
    """One replica of four slots, and what came in order."""

    def __init__(self, *, kv_tokens: int = 0, places: int = 100) -> None:
        self.came: list[Request] = []
        self.now_s = 0.0
        rules = DispatchRules(places=places)
        self.dispatcher: Dispatcher[Request] = Dispatcher("ep", rules=rules, deliver=self._start, chance=lambda: 0.5)
        route = ReplicaRoute("r", "127.0.0.1", 1, "s", 4, kv_tokens=kv_tokens)
        self.dispatcher.update([("v1", 100, 0, [(route, 4)])], now_s=0.0)

    def _start(self, request: Request, replica: ReplicaLoad) -> bool:
        request.replica = replica
        return True

    def ask(self, tenant_id: str, *, band: int = STANDARD, tokens: int = 100) -> Request:
        request = Request(tenant_id, Job(tenant_id, 1.0, band, tokens, tokens, tokens, is_seen=False))
        verdict = self.dispatcher.arrive(request, now_s=self.now_s, deadline_s=self.now_s + 9.0)
        if isinstance(verdict, ReplicaLoad):
            self._start(request, verdict)
        request.is_turned_away |= verdict is Verdict.FULL
        self.came.append(request)
        return request

    def end(self, request: Request) -> None:
        """Let an answer end."""
        replica, request.replica = request.replica, None
        assert replica is not None
        size = request.job.prompt_tokens
        self.dispatcher.finish(replica, request.job, now_s=self.now_s, prompt_tokens=size, output_tokens=size)

    def trade(self, request: Request) -> Request | None:
        """Return who gave its place to ``request``."""
        traded = making_way.trade(
            request,
            self.dispatcher,
            reversed(self.came),
            can_stop=lambda one: not one.is_seen,
            now_s=self.now_s,
            deadline_s=self.now_s + 9.0,
        )
        if traded is None:
            return None
        traded[0].gave_way += 1
        traded[0].replica = None
        return traded[0]


def test_the_youngest_of_a_flood_makes_way_for_who_asks_for_little_and_is_the_next_of_its_tenant() -> None:
    endpoint = Endpoint()
    flood = [endpoint.ask("flood") for _ in range(8)]
    quiet = endpoint.ask("quiet")
    assert quiet.replica is None
    assert endpoint.trade(quiet) is flood[3]
    assert quiet.replica is not None
    assert endpoint.dispatcher.running == 4
    assert [one for one in endpoint.dispatcher.line.order() if one.name == "flood"] == [flood[3], *flood[4:]]


def test_nobody_makes_way_whose_answer_was_seen() -> None:
    endpoint = Endpoint()
    flood = [endpoint.ask("flood") for _ in range(8)]
    for one in flood[1:]:
        one.is_seen = True
    assert endpoint.trade(endpoint.ask("quiet")) is flood[0]
    flood[0].is_seen = True
    assert endpoint.trade(endpoint.ask("other")) is None


def test_nobody_makes_way_again_and_again() -> None:
    endpoint = Endpoint()
    for one in [endpoint.ask("flood") for _ in range(8)]:
        one.gave_way = making_way.TRADES_MAX
    assert endpoint.trade(endpoint.ask("quiet")) is None


def test_a_tenant_keeps_its_fair_share() -> None:
    endpoint = Endpoint()
    for tenant_id in ("a", "a", "b", "b"):
        endpoint.ask(tenant_id)
    # A third of four slots is one and a third: one more may not be taken from who has two.
    assert endpoint.trade(endpoint.ask("c")) is None


def test_who_asks_for_much_is_given_nothing() -> None:
    endpoint = Endpoint()
    for _ in range(6):
        endpoint.ask("flood")
    first, second = endpoint.ask("quiet"), endpoint.ask("quiet")
    assert endpoint.trade(second) is None, "it waits in line already"
    assert first.replica is None


def test_the_most_urgent_do_not_make_way_for_less_urgent_ones() -> None:
    endpoint = Endpoint()
    for _ in range(6):
        endpoint.ask("flood", band=PRIORITY)
    assert endpoint.trade(endpoint.ask("quiet")) is None


def test_a_place_that_does_not_suffice_is_kept() -> None:
    endpoint = Endpoint(kv_tokens=1000)
    flood = [endpoint.ask("flood") for _ in range(8)]
    large = endpoint.ask("quiet", tokens=400)
    assert endpoint.trade(large) is None
    assert [one for one in flood if one.replica is not None] == flood[:4]
    assert endpoint.dispatcher.running == 4
    assert not flood[3].gave_way


def test_who_made_way_is_not_the_one_that_a_full_line_puts_out() -> None:
    endpoint = Endpoint(places=6)
    flood = [endpoint.ask("flood") for _ in range(10)]
    for name in ("quiet", "other", "third"):
        newcomer = endpoint.ask(name)
        if newcomer.replica is None:
            endpoint.trade(newcomer)
    put_out = [one for one in flood if one.gave_way]
    assert put_out
    assert not any(one.is_turned_away for one in put_out), "it ran, and then was refused for others"
    assert any(one.is_turned_away for one in flood), "the line was full"


def test_a_trade_that_does_not_help_leaves_the_victim_as_it_was() -> None:
    endpoint = Endpoint(kv_tokens=1000)  # four of 200 tokens
    flood = [endpoint.ask("flood") for _ in range(5)]
    endpoint.now_s = 3.0
    quiet = endpoint.ask("quiet", tokens=450)
    dispatched = [(one.job.dispatched_s, one.job.pending_tokens, one.job.beside) for one in flood]
    assert endpoint.trade(quiet) is None
    assert [(one.job.dispatched_s, one.job.pending_tokens, one.job.beside) for one in flood] == dispatched


def test_a_place_of_a_release_that_has_no_weight_any_more_helps_nobody() -> None:
    endpoint = Endpoint()
    for _ in range(6):
        endpoint.ask("flood")
    route = ReplicaRoute("r", "127.0.0.1", 1, "s", 4)
    endpoint.dispatcher.update([("v1", 0, 0, [(route, 4)]), ("v2", 100, 0, [])], now_s=0.0)
    quiet = endpoint.ask("quiet")
    assert quiet.replica is None
    assert endpoint.trade(quiet) is None


def test_who_may_get_somebodys_place_is_not_refused_because_the_line_is_slow() -> None:
    endpoint = Endpoint()
    flood = [endpoint.ask("flood") for _ in range(9)]
    for _ in range(4):
        endpoint.now_s += 20.0
        done = next(one for one in flood if one.replica is not None)
        endpoint.end(done)
    late = endpoint.ask("flood")
    assert late.is_turned_away, "its nine seconds would be over"
    quiet = endpoint.ask("quiet")
    assert not quiet.is_turned_away
    assert endpoint.trade(quiet) is not None
    assert quiet.replica is not None


def test_no_more_is_thrown_away_than_a_small_part_of_what_slots_do() -> None:
    endpoint = Endpoint()
    for _ in range(80):
        endpoint.ask("flood")
    lost_s, seconds = 0.0, 2000
    for _ in range(seconds // 5):
        endpoint.now_s += 5.0
        quiet = endpoint.ask("quiet", tokens=1)
        began = {one: one.job.dispatched_s for one in endpoint.came if one.replica is not None}
        victim = endpoint.trade(quiet) if quiet.replica is None else None
        lost_s += endpoint.now_s - began[victim] if victim is not None else 0.0
        if quiet.replica is not None:
            endpoint.end(quiet)
        oldest = min((one for one in endpoint.came if one.replica is not None), key=lambda one: one.job.dispatched_s)
        endpoint.end(oldest)
        endpoint.ask("flood")
    assert 0 < lost_s <= SPARE_MAX_S + LOST_SHARE * 4 * seconds
