"""Who is served first at a saturated endpoint: bands by plan, fair shares by weight within a band.

One slot, a request that holds it, a line behind it; the order in which the
engine begins is read from its own journal.
"""

from collections.abc import Sequence
from typing import Any

from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.yard import CONTEXT, Yard

SETTINGS = {"gateway.queue_wait_s": 60}
SEEN: list[Exchange] = []
TOKENS = 10


def deploy(yard: Yard, name: str) -> None:
    """Deploy a model that every tenant may call, with one slot."""
    journal = yard.folder / "tokens" / f"{name}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    options = {"slots": 1, "ttft_ms": 1, "itl_ms": 2, "context_length": CONTEXT, "journal": str(journal)}
    order = {"model_name": name, "framework": "simulated", "options": options, "shared": True}
    reply = yard.call("POST", "/v1/models/deploy", order)
    assert reply.status == 202, reply.body
    yard.wait_ready(name)


def key_of(yard: Yard, name: str, **tenant: object) -> str:
    """Make a tenant and return a key of it."""
    made = yard.call("POST", "/v1/tenants", {"name": name, **tenant})
    assert made.status == 201, made.body
    return yard.new_key(name=name, tenant_id=made.json()["id"])


async def order_of(yard: Yard, model: str, waiting: Sequence[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Let ``(label, key, fields)`` wait in a line, and return the labels in the order in which the engine began."""
    async with Load(yard.port, yard.admin_key) as load:
        # It takes long and counts little: a twentieth of what is served is owed to less urgent bands. It ends when
        # this client leaves.
        holder = load.start(chat(model, "[[sim: tokens=30 slow=1500]] hold", stream=True, max_tokens=30), within_s=70)
        await load.delivered(holder, 1)
        for number, (label, key, fields) in enumerate(waiting):
            body = chat(model, f"[[sim: tokens={TOKENS}]] {label} {number}", max_tokens=TOKENS, **fields)
            load.start(body, key=key, label=label, within_s=60)

        def are_waiting() -> bool:
            return bool(yard.get(f"/v1/endpoints/{model}")["queued"] == len(waiting))

        await eventually_async(are_waiting, 35, f"{len(waiting)} wait")
        holder.leave()
        await load.finish(60)
        waited = [one for one in load.exchanges if one is not holder]
        assert {one.outcome for one in waited} == {Outcome.COMPLETE}, waited
        SEEN.extend(load.exchanges)
    labels = {str(one.request_id): one.label for one in waited}
    begun = [str(record["rid"]) for record in yard.journal() if record["event"] == "begin"]
    check_ledger(yard, SEEN)
    return [labels[rid] for rid in begun if rid in labels]


async def test_an_urgent_plan_overtakes_a_patient_one(yard: Yard) -> None:
    deploy(yard, "bands")
    batch, urgent = key_of(yard, "night", plan="batch"), key_of(yard, "now", plan="priority")
    usual = key_of(yard, "usual")
    line = [("batch", batch, {})] * 8 + [("standard", usual, {})] * 6 + [("priority", urgent, {})] * 6
    order = await order_of(yard, "bands", line)
    # One token in twenty is reserved for those who are less urgent, so one of each band may come early.
    assert order[:8].count("priority") == 6, order
    assert order[:14].count("standard") >= 5, order
    assert order[-5:] == ["batch"] * 5, order


async def test_a_caller_may_be_patient_but_never_more_urgent_than_its_plan(yard: Yard) -> None:
    deploy(yard, "tiers")
    urgent, usual = key_of(yard, "vip", plan="priority"), key_of(yard, "plain")
    line = [
        *[("flex", urgent, {"service_tier": "flex"})] * 6,
        *[("pushy", usual, {"service_tier": "priority"})] * 5,
        *[("priority", urgent, {})] * 5,
    ]
    order = await order_of(yard, "tiers", line)
    assert order[:7].count("priority") == 5, order
    assert order[-4:] == ["flex"] * 4, order


async def test_tenants_of_a_band_share_by_weight(yard: Yard) -> None:
    deploy(yard, "weights")
    heavy, light = key_of(yard, "heavy", weight=3), key_of(yard, "light", weight=1)
    line = [("light", light, {})] * 20 + [("heavy", heavy, {})] * 20
    order = await order_of(yard, "weights", line)
    # While both wait: the first twenty-four begun are eighteen to six, give or take two requests.
    assert 15 <= order[:24].count("heavy") <= 20, order


async def test_a_change_of_plan_and_weight_counts_at_once(yard: Yard) -> None:
    deploy(yard, "change")
    made = yard.call("POST", "/v1/tenants", {"name": "promoted", "plan": "batch"}).json()
    promoted, usual = yard.new_key(name="promoted", tenant_id=made["id"]), key_of(yard, "other")
    reply = yard.call("PATCH", f"/v1/tenants/{made['id']}", {"plan": "priority"})
    assert reply.status == 200, reply.body
    line = [("standard", usual, {})] * 6 + [("promoted", promoted, {})] * 6
    order = await order_of(yard, "change", line)
    assert order[:7].count("promoted") == 6, order
