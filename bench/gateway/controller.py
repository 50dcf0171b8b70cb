"""A stand-in for the controller: publishes one routing table, with the fake engine as the only replica.

``python -m bench.gateway.controller DATA_DIR ENGINE_PORT``; writes the API key
to ``DATA_DIR/ready.json`` once gateways can follow. The key has every limit
set, and high, so that limiting is paid for and never strikes.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

from modelyard import compose
from modelyard.clock import SystemClock
from modelyard.config import DataDirectory
from modelyard.domain.endpoints import Progress, Stage
from modelyard.domain.routing_table import EndpointRoute, Heartbeat, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.tenants import PLATFORM, ApiKey, Limits, Scope, Tenant
from modelyard.domain.usage import Price
from modelyard.ids import hash_secret, new_api_key, new_id
from modelyard.stores.feed import FeedServer

MANY = 1_000_000_000
SLOTS = 20_000
"""Of the one replica: the fake engine takes what comes."""


def table_of(engine_port: int, key: ApiKey, now_s: float) -> RoutingTable:
    """Return the table: one tenant, one key, one endpoint ``fake-model``."""
    limits = Limits(requests_per_minute=MANY, tokens_per_minute=MANY * 1000, concurrency=SLOTS)
    endpoint = EndpointRoute(
        id=new_id("ep-"),
        tenant_id=PLATFORM,
        name="fake-model",
        is_shared=False,
        created_at=int(now_s),
        releases=(
            ReleaseRoute(new_id("ver-"), 100, (ReplicaRoute("rep-0", "127.0.0.1", engine_port, "s" * 32, SLOTS),)),
        ),
        routes=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}),
        engine_extras=frozenset(),
        context_length=0,
        price=Price(150_000_000, 75_000_000, 600_000_000),
        progress=Progress(Stage.READY),
    )
    return RoutingTable(
        epoch=new_id("epoch-"),
        revision=1,
        tenants=(Tenant(PLATFORM, "platform", int(now_s), limits),),
        keys=(key,),
        endpoints=(endpoint,),
    )


async def serve(data: DataDirectory, engine_port: int) -> None:
    """Publish, then send a heartbeat each second until SIGTERM."""
    clock = SystemClock()
    shared = compose.load_secrets(data)
    text, parts = new_api_key()
    key = ApiKey(
        id=parts.key_id,
        tenant_id=PLATFORM,
        name="bench",
        secret_hash=hash_secret(shared.pepper, parts.secret),
        scopes=(Scope.INFERENCE,),
        created_at=int(clock.unix_s()),
        limits=Limits(requests_per_minute=MANY, tokens_per_minute=MANY * 1000, concurrency=SLOTS),
    )
    feed = FeedServer(data.feed_socket, shared.internal_token)
    await feed.start()
    await feed.publish(table_of(engine_port, key, clock.unix_s()))
    (data.root / "ready.draft").write_text(json.dumps({"key": text}))
    (data.root / "ready.draft").replace(data.root / "ready.json")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        feed.beat(Heartbeat(is_authoritative=True))
        try:
            await asyncio.wait_for(stop.wait(), 1.0)
        except TimeoutError:
            continue
    await feed.close()


def main() -> None:
    """Read the command line and serve."""
    data = DataDirectory(Path(sys.argv[1]))
    data.create()
    asyncio.run(serve(data, int(sys.argv[2])))


if __name__ == "__main__":
    main()
