"""What accelerators cost: nothing is lost when it is shared out, and waste comes with something to do."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.books import EndpointUse, ReplicaHour
from modelyard.domain.nodes import Accelerator, Node, Part, Placement
from modelyard.domain.tenants import PLATFORM
from modelyard.policy.gpu_costs import CANARY_S, HOUR_S, Setup, WasteKind, report, shares

USD = 1_000_000_000
NOW_S = 1e9
GIB = 1024**3


def hour(
    endpoint: str = "ep", *, busy: float = 0.5, usd: float = 2.0, ready: float = 1.0, replica: str = "rep", at: int = 0
) -> ReplicaHour:
    return ReplicaHour(
        hour=at * HOUR_S,
        replica_id=replica,
        endpoint_id=endpoint,
        owner_id="owner",
        model=f"model-{endpoint}",
        accelerator="h100",
        present_s=HOUR_S,
        ready_s=ready * HOUR_S,
        busy_s=busy * HOUR_S,
        accelerator_s=HOUR_S,
        cost_nanousd=round(usd * USD),
    )


def use(tenant: str, prompt: int, completion: int, *, endpoint: str = "ep", usd: float = 1.0) -> EndpointUse:
    return EndpointUse(endpoint, tenant, f"model-{endpoint}", 10, prompt, completion, round(usd * USD))


def setup(**given: object) -> dict[str, Setup]:
    made: dict[str, object] = {"name": "m", "owner_id": "owner", "min_replicas": 1, "max_replicas": 2}
    return {"ep": Setup(**{**made, "scale_to_zero": False, **given})}  # type: ignore[arg-type]


def node(id: str, *, price: int = 0, kind: str = "h100") -> Node:
    accelerators = tuple(Accelerator(index, kind, 80 * GIB) for index in range(4))
    return Node(id, accelerators, price_nanousd=price)


@pytest.mark.parametrize(
    ("parts", "price", "prices", "wanted"),
    [
        ((Part("n", (0,), 80 * GIB),), 3 * USD, {}, ("h100", 1.0, 3 * USD)),
        ((Part("n", (1,), 20 * GIB),), 4 * USD, {}, ("h100", 0.25, 1 * USD)),
        ((Part("n", (0, 1), 10 * GIB),), 3 * USD, {}, ("h100", 2.0, 6 * USD)),  # one over several is alone on them
        ((Part("n", (0,), 80 * GIB),), 0, {"h100": 2 * USD}, ("h100", 1.0, 2 * USD)),
        ((Part("n", (0,), 80 * GIB),), 0, {}, ("h100", 1.0, 3_500_000_000)),  # of the table of kinds
        ((Part("gone", (0,), 80 * GIB),), 3 * USD, {}, ("", 0.0, 0)),
        ((), 3 * USD, {}, ("", 0.0, 0)),
    ],
)
def test_a_place_costs_its_share_of_its_accelerators(
    parts: tuple[Part, ...], price: int, prices: dict[str, int], wanted: tuple[str, float, int]
) -> None:
    assert shares(Placement(parts), {"n": node("n", price=price)}, prices) == wanted


def test_an_endpoint_shows_cost_idle_time_margin_and_price_per_token() -> None:
    found = report([hour(at=0), hour(at=1, busy=0.0)], [use("a", 1_000_000, 1_000_000)], {}, now_s=NOW_S)
    (cost,) = found.endpoints
    assert (cost.accelerator_hours, cost.idle_accelerator_hours, cost.utilisation) == (2.0, 1.5, 0.25)
    assert (cost.cost_nanousd, cost.idle_nanousd) == (4 * USD, 3 * USD)
    assert (cost.revenue_nanousd, cost.margin_nanousd) == (1 * USD, -3 * USD)
    assert cost.nanousd_per_million_tokens == 2 * USD


def test_work_is_shared_out_by_tokens_and_idle_time_is_the_owners() -> None:
    found = report([hour(usd=10.0)], [use("a", 400, 0), use("b", 0, 300)], {}, now_s=NOW_S)
    costs = {one.tenant_id: one.cost_nanousd for one in found.customers}
    # Five dollars of work: a generated token weighs four times one of a prompt.
    assert costs == {"a": 1_250_000_000, "b": 3_750_000_000, "owner": 5 * USD}


hours_of_three = st.lists(
    st.builds(
        lambda endpoint, busy, nano, at: hour(f"ep{endpoint}", busy=busy, usd=nano / USD, at=at),
        st.integers(0, 2),
        st.floats(0, 1),
        st.integers(0, 10 * USD),
        st.integers(0, 50),
    ),
    max_size=20,
)
uses_of_three = st.lists(
    st.builds(
        lambda tenant, endpoint, prompt, completion: use(f"t{tenant}", prompt, completion, endpoint=f"ep{endpoint}"),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 10**9),
        st.integers(0, 10**9),
    ),
    max_size=12,
)


@given(hours_of_three, uses_of_three)
def test_no_money_and_no_hour_is_lost_or_made(hours: list[ReplicaHour], uses: list[EndpointUse]) -> None:
    found = report(hours, uses, {}, now_s=NOW_S)
    cost = sum(one.cost_nanousd for one in hours)
    assert sum(one.cost_nanousd for one in found.endpoints) == cost
    assert sum(one.cost_nanousd for one in found.customers) == cost
    assert sum(one.revenue_nanousd for one in found.customers) == sum(one.revenue_nanousd for one in uses)
    assert sum(one.accelerator_hours for one in found.customers) == pytest.approx(
        sum(one.accelerator_hours for one in found.endpoints)
    )
    assert sum(one.nanousd for one in found.waste) <= cost


@pytest.mark.parametrize(
    ("hours", "uses", "setups", "kind", "fix"),
    [
        ([hour(busy=0)], [], setup(), WasteKind.NEVER_USED, "--scale 0..2 --idle 5m"),
        ([hour(busy=0.02)], [use("a", 1, 1)], setup(), WasteKind.IDLE, "--idle 5m"),
        ([hour(busy=0.1)], [use("a", 1, 1)], setup(min_replicas=4, max_replicas=8), WasteKind.TOO_MANY, "--scale 1..8"),
        (
            [hour(busy=0.9)],
            [use("a", 1, 1)],
            setup(canary_since=NOW_S - 9 * CANARY_S),
            WasteKind.CANARY,
            "canary promote m",
        ),
        ([hour(ready=0.0, busy=0.0)], [], setup(), WasteKind.FAILING, "modelyard why model-ep"),
    ],
)
def test_waste_is_named_with_what_to_do(
    hours: list[ReplicaHour], uses: list[EndpointUse], setups: dict[str, Setup], kind: WasteKind, fix: str
) -> None:
    (waste,) = report(hours, uses, setups, now_s=NOW_S).waste
    assert waste.kind is kind
    assert fix in waste.fix
    assert 0 < waste.nanousd <= 2 * USD


@pytest.mark.parametrize(
    ("hours", "setups"),
    [
        ([hour(busy=0.9)], setup()),
        ([hour(busy=0.9)], setup(canary_since=NOW_S - 60)),  # a canary may take its time
        ([hour(busy=0.0, usd=0.001)], setup()),  # not worth a line
        ([hour(busy=0.0)], {}),  # its endpoint is gone
    ],
)
def test_what_is_no_waste_is_not_named(hours: list[ReplicaHour], setups: dict[str, Setup]) -> None:
    assert report(hours, [use("a", 1, 1)], setups, now_s=NOW_S).waste == []


# --- guests ---


def seated(host: str = "ep", **guests: str) -> dict[str, Setup]:
    """Return the set-ups of a host and of its guests, by the tenant of each."""
    return setup() | {
        id: Setup(name=id, owner_id=tenant, min_replicas=0, max_replicas=1, scale_to_zero=True, host_id=host)
        for id, tenant in guests.items()
    }


def test_guests_bear_what_their_host_worked_for_them() -> None:
    uses = [use("a", 400, 0), use("b", 0, 300, endpoint="guest")]
    found = report([hour(usd=10.0)], uses, seated(guest="b"), now_s=NOW_S)
    costs = {one.endpoint_id: one for one in found.endpoints}
    # Five dollars of work and five of idling: a generated token weighs four times one of a prompt.
    assert (costs["ep"].cost_nanousd, costs["guest"].cost_nanousd) == (6_250_000_000, 3_750_000_000)
    assert (costs["ep"].idle_nanousd, costs["guest"].idle_nanousd) == (5 * USD, 0)
    assert (costs["ep"].accelerator_hours, costs["guest"].accelerator_hours) == (0.625, 0.375)
    assert costs["guest"].nanousd_per_million_tokens == 12_500_000_000_000
    assert (costs["guest"].owner_id, costs["guest"].accelerator) == ("b", "h100")
    assert costs["guest"].margin_nanousd == 1 * USD - 3_750_000_000
    assert {(one.tenant_id, one.endpoint_id): one.cost_nanousd for one in found.customers} == {
        ("a", "ep"): 1_250_000_000,
        ("owner", "ep"): 5 * USD,
        ("b", "guest"): 3_750_000_000,
    }


def test_a_host_whose_guests_are_used_is_not_called_unused() -> None:
    found = report([hour(busy=0.1)], [use("b", 5, 5, endpoint="guest")], seated(guest="b"), now_s=NOW_S)
    assert [one.kind for one in found.waste] == [WasteKind.IDLE]


@given(hours_of_three, uses_of_three, st.dictionaries(st.sampled_from(["ep1", "ep2", "ep3"]), st.just("t1")))
def test_with_guests_too_no_money_and_no_hour_is_lost_or_made(
    hours: list[ReplicaHour], uses: list[EndpointUse], guests: dict[str, str]
) -> None:
    found = report(hours, uses, seated("ep0", **guests), now_s=NOW_S)
    cost, took = sum(one.cost_nanousd for one in hours), sum(one.accelerator_s for one in hours) / HOUR_S
    for rows in (found.endpoints, found.customers):
        assert sum(one.cost_nanousd for one in rows) == cost
        assert sum(one.accelerator_hours for one in rows) == pytest.approx(took)
        assert sum(one.revenue_nanousd for one in rows) == sum(one.revenue_nanousd for one in uses)
        assert sum(one.margin_nanousd for one in rows) == sum(one.revenue_nanousd for one in uses) - cost


def test_idle_time_of_which_nobody_knows_the_owner_is_the_operators() -> None:
    orphan = msgspec.structs.replace(hour(), owner_id="")
    found = report([orphan], [use("a", 1, 0)], {}, now_s=NOW_S)
    assert {one.tenant_id: one.accelerator_hours for one in found.customers} == {"a": 0.5, PLATFORM: 0.5}
    assert sum(one.cost_nanousd for one in found.customers) == 2 * USD


# --- what is no failure, and what helps ---


def test_one_that_was_loading_as_an_hour_ended_did_not_fail() -> None:
    found = report([hour(ready=0.0, busy=0.0, at=0), hour(busy=0.9, at=1)], [use("a", 1, 1)], setup(), now_s=NOW_S)
    assert WasteKind.FAILING not in {one.kind for one in found.waste}


@pytest.mark.parametrize(
    ("idle_s", "fix"), [(3600.0, "--idle 5m"), (400.0, "--idle 200s"), (90.0, "--idle 1m"), (60.0, "")]
)
def test_one_that_sleeps_already_is_told_to_sleep_sooner_or_nothing(idle_s: float, fix: str) -> None:
    found = report([hour(busy=0.1)], [use("a", 1, 1)], setup(scale_to_zero=True, idle_s=idle_s), now_s=NOW_S)
    assert [one.fix for one in found.waste] == (
        [f"let it sleep sooner: modelyard endpoints set m --scale 0..2 {fix}"] if fix else []
    )


def test_a_pool_is_not_told_to_sleep() -> None:
    (waste,) = report([hour(busy=0.0)], [], setup(is_pool=True), now_s=NOW_S).waste
    assert "modelyard pools rm m" in waste.fix
