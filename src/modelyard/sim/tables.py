"""What gateways of a simulated world are told of its replicas, and how they are made."""

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.sim.gateway import Floor, Gateway, Table

if TYPE_CHECKING:
    from modelyard.sim.world import Replica
    from modelyard.sim.world_spec import WorldSpec


def table_of(spec: "WorldSpec", replicas: Iterable["Replica"], *, gateway: int, now_s: float) -> Table:
    """Return the releases with those of their replicas that serve now, and the slots of each for one gateway."""
    table, there = [], list(replicas)
    for release in spec.releases:
        engine = release.engine
        slots = spec.slots or engine.max_num_seqs
        workers = spec.gateways
        # As ``gateway/catalog.py`` divides them.
        share = slots if workers == 1 else max(1, slots // workers + (gateway < slots % workers))
        routes = [
            (
                ReplicaRoute(
                    replica.id,
                    "127.0.0.1",
                    1 + replica.number,
                    "",
                    slots,
                    is_draining=replica.is_draining,
                    kv_tokens=engine.kv_tokens if spec.knows_kv else 0,
                ),
                share,
            )
            for replica in there
            if replica.release is release and replica.ready_s <= now_s
        ]
        table.append((release.version_id, release.weight, release.shadow, routes))
    return table


def gateway_of(spec: "WorldSpec", number: int, floor: Floor, chance: random.Random) -> Gateway:
    """Return a production gateway of such a world."""
    return Gateway(
        number,
        floor,
        # As ``gateway/catalog.py`` divides memory among its workers.
        msgspec.structs.replace(spec.rules, kv_share_max=spec.rules.kv_share_max / spec.gateways),
        chance,
        queue_wait_s=spec.queue_wait_s,
        load_wait_s=spec.load_wait_s,
        hash_tokens=spec.releases[0].engine.hash_tokens if spec.uses_prefixes else 0,
    )
