"""An extra pool is used while an endpoint's own nodes are full and its callers late, and for nothing else."""

from tests.support.towns import GIB, Town, ask, endpoint, node, replica

from modelyard.control.asking import residents_of
from modelyard.control.bursts import Bursts, Placed
from modelyard.control.placing import Placer
from modelyard.control.promises import Need, Promise
from modelyard.domain.endpoints import Autoscale
from modelyard.domain.nodes import Part, Placement
from modelyard.policy.asks import NoRoom
from modelyard.policy.eviction import Rule

WHOLE = Placement((Part("own", (0,), 80 * GIB),))
RULES = Autoscale(burst_pool="extra", target_ttft_s=5.0)


class Streets:
    """A full node of one's own and an empty one to rent."""

    def __init__(self) -> None:
        self.town = Town(nodes={"own": node("own"), "rented": node("rented", pool="extra")})
        self.full, self.late = endpoint("full", floor=1), endpoint("late")
        self.town.settle(self.full, self.late)
        self.holder = self.town.run(replica(self.full), WHOLE)
        self.placer = Placer(Rule(min_residency_s=0.0, patience_s=0.0))
        self.bursts = Bursts(self.placer)
        self.see()

    def see(self) -> None:
        self.town.now_s += 1
        self.world = self.town.look()
        self.placer.see(self.world, self.town.nodes.values(), {})

    def place(self, need: Need) -> Placed | NoRoom:
        wanted = replica(self.late, ready_at=None)
        self.placer.begin(self.late.id)
        found = self.bursts.place(
            wanted,
            ask(60),
            need,
            lambda: residents_of(self.world, {}, but=self.late.id),
            RULES,
            now_s=self.town.now_s,
        )
        self.placer.end(self.late.id, ())
        return found


def need(*, queued: int = 3, ready: int = 1, wait_s: float = 9.0) -> Need:
    return Need("late", queued=queued, reload_s=1.0, ready=ready, wait_s=wait_s)


def test_who_is_late_and_finds_his_own_nodes_full_goes_to_the_extra_pool() -> None:
    found = Streets().place(need())
    assert isinstance(found, Placed)
    assert found.placement.node_id == "rented"
    assert found.reason == "in burst pool extra: all pools are full and callers would wait 9.0 s, above 5 s"


def test_who_would_wait_for_others_to_move_away_goes_to_the_extra_pool_while_that_has_room() -> None:
    streets = Streets()
    moving = frozenset({streets.holder.id})
    streets.placer.opener = lambda new, asked, no_room: Promise(
        new.id, new.endpoint_id, "ten-a", asked, WHOLE, reason=no_room.reason, leaving=moving
    )
    rented = streets.town.nodes.pop("rented")
    for _ in range(2):
        streets.see()
        assert isinstance(streets.place(need()), NoRoom)
        assert streets.placer.leaving == moving, "it waits for them where nothing is for rent"
    streets.town.nodes["rented"] = rented
    streets.see()
    found = streets.place(need())
    assert isinstance(found, Placed)
    assert found.placement.node_id == "rented"
    assert not streets.placer.leaving


def test_what_is_held_there_while_its_artifact_comes_stays_and_counts_once() -> None:
    streets = Streets()
    first = streets.place(need())
    for _ in range(5):
        streets.see()
        assert streets.place(need(wait_s=0.0)) == first, "it is on the way, whoever is late now"
    assert len(streets.placer._loads) == 1


def test_who_is_not_late_waits_and_says_why_nothing_is_rented() -> None:
    found = Streets().place(need(wait_s=2.0))
    assert isinstance(found, NoRoom)
    assert "burst pool extra is not used: the predicted wait of 2.0 s is within 5 s" in found.text


def test_where_nothing_answers_the_time_waited_and_a_load_are_the_wait() -> None:
    streets = Streets()
    assert isinstance(streets.place(need(ready=0, wait_s=0.0)), NoRoom)
    for _ in range(5):
        streets.see()
        found = streets.place(need(ready=0, wait_s=0.0))
    assert isinstance(found, Placed)
    assert "callers would wait 6.0 s" in found.reason


def test_room_of_his_own_and_idle_models_of_others_come_first() -> None:
    streets = Streets()
    streets.town.endpoints[streets.full.id] = endpoint("full", floor=0)
    streets.see()
    found = streets.place(need())
    assert isinstance(found, NoRoom), "an idle one goes for it"
    assert streets.placer.claimed == {streets.holder.id}
    streets.town.running.clear()
    streets.town.replicas.clear()
    streets.see()
    found = streets.place(need())
    assert isinstance(found, Placed)
    assert (found.placement.node_id, found.reason) == ("own", "")


def test_a_full_extra_pool_is_named_beside_the_own_one() -> None:
    streets = Streets()
    del streets.town.nodes["rented"]
    streets.see()
    found = streets.place(need())
    assert isinstance(found, NoRoom)
    assert "largest free 0.0 on own" in found.text
    assert "burst pool extra is full, too" in found.text
    streets.bursts.keep([])
    assert not streets.bursts._last
