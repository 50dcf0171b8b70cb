"""A stand-in for the controller: publishes one routing table, with fake engines as the replicas.

``python -m bench.gateway.controller DATA_DIR ENGINE_PORT...``; writes the API
keys to ``DATA_DIR/ready.json``, one of a tenant of each plan, once gateways
can follow. Keys have every limit set, and high, and so has the engine's cache,
so that limiting is paid for and never strikes; the engine can go on in the
middle of an answer, so that streams are kept for that.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import Sequence
from pathlib import Path

from modelyard import compose
from modelyard.clock import SystemClock
from modelyard.config import DataDirectory
from modelyard.control.leases import LeaseOffice
from modelyard.domain.endpoints import Progress, Serving, Stage
from modelyard.domain.routing_table import EndpointRoute, Heartbeat, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.tenants import PLATFORM, ApiKey, Limits, Plan, Scope, Tenant
from modelyard.domain.usage import Price
from modelyard.ids import hash_secret, new_api_key, new_id
from modelyard.stores.feed import FeedServer

MANY = 1_000_000_000
SLOTS = 200_000
"""Of a replica: the fake engine takes what comes."""
LIMITS = Limits(requests_per_minute=MANY, tokens_per_minute=MANY * 1000, concurrency=MANY)
TENANTS = {Plan.STANDARD: PLATFORM, Plan.PRIORITY: "ten-priority", Plan.BATCH: "ten-batch"}


def table_of(ports: Sequence[int], keys: Sequence[ApiKey], serving: Serving, slots: int, now_s: float) -> RoutingTable:
    """Return the table: a tenant of each plan, their keys, one endpoint ``fake-model`` that all may use."""
    replicas = tuple(
        ReplicaRoute(f"rep-{number}", "127.0.0.1", port, "s" * 32, slots, kv_tokens=MANY)
        for number, port in enumerate(ports)
    )
    endpoint = EndpointRoute(
        id=new_id("ep-"),
        tenant_id=PLATFORM,
        name="fake-model",
        is_shared=True,
        created_at=int(now_s),
        releases=(ReleaseRoute(new_id("ver-"), 100, replicas),),
        routes=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}),
        engine_extras=frozenset({"cache_salt", "continue_final_message"}),
        context_length=0,
        price=Price(150_000_000, 75_000_000, 600_000_000),
        progress=Progress(Stage.READY),
        serving=serving,
    )
    return RoutingTable(
        epoch=new_id("epoch-"),
        revision=1,
        tenants=tuple(Tenant(name, plan.value, int(now_s), LIMITS, plan=plan) for plan, name in TENANTS.items()),
        keys=tuple(keys),
        endpoints=(endpoint,),
    )


async def serve(data: DataDirectory, options: argparse.Namespace) -> None:
    """Publish, then send a heartbeat each second until SIGTERM."""
    clock = SystemClock()
    shared = compose.load_secrets(data)
    now_s = clock.unix_s()
    keys, texts = [], {}
    for plan, tenant in TENANTS.items():
        texts[plan.value], parts = new_api_key()
        secret_hash = hash_secret(shared.pepper, parts.secret)
        keys.append(ApiKey(parts.key_id, tenant, "bench", secret_hash, (Scope.INFERENCE,), int(now_s), limits=LIMITS))
    feed = FeedServer(data.feed_socket, shared.internal_token)
    await feed.start()
    table = table_of(options.ports, keys, Serving(coalesce_ms=options.coalesce_ms), options.slots, now_s)
    office = LeaseOffice(feed=feed, table=lambda: table, workers=options.workers, clock=clock)
    leasing = asyncio.create_task(office.run())
    await feed.publish(table)
    (data.root / "ready.draft").write_text(json.dumps(texts))
    (data.root / "ready.draft").replace(data.root / "ready.json")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        feed.beat(Heartbeat(is_authoritative=True))
        try:
            await asyncio.wait_for(stop.wait(), 1.0)
        except TimeoutError:
            continue
    leasing.cancel()
    await asyncio.gather(leasing, return_exceptions=True)
    await feed.close()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.controller")
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--slots", type=int, default=SLOTS, help="of each replica")
    parser.add_argument("--workers", type=int, default=1, help="gateway workers that divide the limits")
    parser.add_argument("--coalesce-ms", type=int, default=0)
    options = parser.parse_args()
    data = DataDirectory(options.data_dir)
    data.create()
    asyncio.run(serve(data, options))


if __name__ == "__main__":
    main()
