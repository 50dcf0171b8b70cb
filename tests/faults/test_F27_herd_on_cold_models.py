"""F27: a herd on many cold models with room for a few: everyone gets a turn, and nobody is evicted for nothing."""

from pathlib import Path

from tests.support.load import Load, Outcome, chat
from tests.support.yard import Yard

MODELS = 8
ROOM = 2
SETTINGS = {"control.min_residency_s": 0.5, "gateway.load_wait_s": 100, "gateway.total_timeout_s": 110}


async def test_every_model_of_a_herd_is_served_in_turn_without_thrashing(tmp_path: Path) -> None:
    config = tmp_path / "modelyard.toml"
    config.write_text(f'[[fleet.nodes]]\nid = "gpu"\naccelerators = [{{ kind = "h100", count = {ROOM} }}]\n')
    with Yard(tmp_path, SETTINGS, options=("--config", str(config))) as yard:
        keys = [yard.new_key(name=f"t{at}", scopes=["manage"], tenant_id=tenant_of(yard, f"t{at}")) for at in range(2)]
        for at in range(MODELS):
            order = {
                "model_name": f"m{at}",
                "framework": "simulated",
                "options": {"memory_gib": 60, "load_s": 0.2},
                "hardware": {"gpu_type": "h100", "min_replicas": 0, "max_replicas": 1},
                "scaling": {"scale_to_zero": True},
            }
            # Most belong to one tenant: its herd must not starve the other's.
            key = keys[0] if at < MODELS - 2 else keys[1]
            reply = yard.call("POST", "/v1/models/deploy", order, key=key)
            assert reply.status == 202, reply.body
        async with Load(yard.port, keys[0]) as first, Load(yard.port, keys[1]) as second:
            sent = [first.start(chat(f"m{at}", f"hello {at}", stream=True), within_s=120) for at in range(MODELS - 2)]
            sent += [
                second.start(chat(f"m{at}", f"hello {at}", stream=True), within_s=120)
                for at in range(MODELS - 2, MODELS)
            ]
            await first.finish(130)
            await second.finish(130)
        assert {one.outcome for one in sent} == {Outcome.COMPLETE}
        count = {
            row["kind"]: row["n"] for row in yard.query("SELECT kind, count(*) AS n FROM endpoint_events GROUP BY 1")
        }
        assert count["replica_ready"] >= MODELS
        assert count.get("evicted", 0) <= count["replica_ready"]
        assert count["replica_ready"] <= 3 * MODELS, "models are not loaded over and over"


def tenant_of(yard: Yard, name: str) -> str:
    reply = yard.call("POST", "/v1/tenants", {"name": name})
    assert reply.status == 201, reply.body
    return str(reply.json()["id"])
