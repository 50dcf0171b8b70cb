"""F3: ``kill -9`` of the control plane while twenty deployments are in every state."""

from collections import Counter
from pathlib import Path

from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import Yard

DEPLOYS = 20
SETTINGS = {"control.pass_interval_s": 0.2}


async def test_twenty_deployments_converge_though_the_controller_is_killed_and_traffic_does_not_notice(
    tmp_path: Path,
) -> None:
    with Yard(tmp_path, SETTINGS) as yard:
        yard.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 5})
        async with Load(yard.port, yard.admin_key) as load:
            await load.until_served("sim")
            streams = [load.start(chat("sim", f"[[sim: tokens=400 slow=20]] {at}", stream=True)) for at in range(4)]
            wanted = {}
            for at in range(DEPLOYS):
                # Some load at once, some slowly, some need two, some are deleted again half way.
                order = {
                    "model_name": f"many-{at}",
                    "framework": "simulated",
                    "options": {"load_s": (at % 4) * 0.4},
                    "hardware": {"min_replicas": 1 + at % 2, "max_replicas": 1 + at % 2},
                }
                reply = eventually(lambda order=order: taken(yard, order), 30, f"{order['model_name']} is taken on")
                wanted[reply] = 1 + at % 2
                if at % 6 == 5:
                    yard_deletes(yard, f"many-{at}")
                    del wanted[reply]
                if at in (5, 11, 17):
                    # The first: an engine that is just being started looks like its parent for a moment.
                    yard.kill(yard.plane_pids("control")[0])
            eventually(lambda: served(yard) == Counter(wanted) + Counter({"sim": 1}), 60, "what should run, runs")
            eventually(
                lambda: sum(wanted.values()) + 1 == len(yard.engines()), 30, "no engine runs that no record names"
            )
            await load.finish()
            assert {stream.outcome for stream in streams} == {Outcome.COMPLETE}
            exchanges = list(load.exchanges)
        check_ledger(yard, exchanges)
        started = yard.query(
            "SELECT replica_id, count(*) AS n FROM endpoint_events WHERE kind='replica_ready' GROUP BY 1"
        )
        assert {row["n"] for row in started} == {1}, "nothing was started twice under one id"


def taken(yard: Yard, order: dict[str, object]) -> str:
    """Deploy once, however often it must be asked; a controller that was killed may have stored it already."""
    reply = yard.call("POST", "/v1/models/deploy", order)
    return str(order["model_name"]) if reply.status in (202, 409) else ""


def yard_deletes(yard: Yard, name: str) -> None:
    eventually(lambda: yard.call("DELETE", f"/v1/endpoints/{name}").status in (202, 404), 30, f"{name} is deleted")


def served(yard: Yard) -> Counter[str]:
    """Return the ready replicas of each endpoint that is not being deleted."""
    endpoints = yard.get("/v1/endpoints?limit=100")["data"]
    return Counter({one["name"]: one["current_replicas"] for one in endpoints if not one["is_deleted"]})
