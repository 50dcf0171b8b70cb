"""What accelerators cost: nothing is lost when it is shared out, and waste comes with something to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.books import EndpointUse, ReplicaHour
from modelyard.domain.nodes import Accelerator, Node, Part, Placement
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
