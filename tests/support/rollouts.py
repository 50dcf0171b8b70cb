"""Rollouts of a running yard: begin one, and wait for what becomes of it; and traffic that goes on meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import CONTEXT, EngineProcess, Yard

OPTIONS: dict[str, object] = {"slots": 16, "ttft_ms": 1, "itl_ms": 1, "context_length": CONTEXT}
QUICK = {"step_seconds": 0.5, "min_requests": 20}
"""Steps for tests: short, but not without samples."""


def canary(yard: Yard, endpoint: str, weight: int = 10, **wanted: Any) -> dict[str, Any]:
    """Begin a canary; without another ``framework`` of a new simulated version with ``options``."""
    order: dict[str, Any] = {"framework": "simulated", "weight": weight, **wanted}
    if order["framework"] == "simulated":
        journal = yard.folder / "tokens" / f"{endpoint}-{wanted.get('version', 'next')}.jsonl"
        order["options"] = {**OPTIONS, "journal": str(journal), **wanted.get("options", {})}
    reply = yard.call("POST", f"/v1/endpoints/{endpoint}/canary", order)
    assert reply.status == 202, reply.body
    return dict(reply.json())


def rollout(yard: Yard, endpoint: str) -> dict[str, Any]:
    """Return the rollout as the API shows it."""
    return dict(yard.get(f"/v1/endpoints/{endpoint}/rollout"))


def until_weight(yard: Yard, endpoint: str, weight: int, within_s: float = 60.0) -> None:
    """Wait until the candidate has so much of the traffic."""
    eventually(lambda: rollout(yard, endpoint)["weight"] == weight, within_s, f"the candidate has {weight} %")


async def until_state(yard: Yard, endpoint: str, state: str, within_s: float = 60.0) -> dict[str, Any]:
    """Wait until a rollout is over (or paused)."""

    async def there() -> dict[str, Any] | None:
        found = await asyncio.to_thread(rollout, yard, endpoint)
        return found if found["state"] == state else None

    return await eventually_async(there, within_s, f"the rollout is {state}")


def engine_of(yard: Yard, endpoint: str, version_id: str) -> EngineProcess:
    """Return the only running engine of a version."""
    rows = yard.query(f"SELECT replica_id FROM replicas WHERE model_id = '{version_id}' AND state = 'ready'")
    wanted = {str(row["replica_id"]) for row in rows}
    (engine,) = [one for one in yard.engines(endpoint) if one.replica_id in wanted]
    return engine


def versions_of(yard: Yard, exchanges: list[Exchange]) -> dict[str, str]:
    """Return which version answered each request, as the ledger has it."""
    rows = {
        str(row["request_id"]): str(row["model_id"])
        for row in yard.query("SELECT request_id, model_id FROM inference_requests")
    }
    return {rid: rows[rid] for exchange in exchanges if (rid := exchange.request_id) is not None and rid in rows}


@asynccontextmanager
async def traffic(
    load: Load, model: str, *, clients: int = 8, prompt: str = "hello", stream: bool = True
) -> AsyncIterator[None]:
    """Send requests without a pause, so many at once, until the block ends."""
    is_over = asyncio.Event()

    async def client(number: int) -> None:
        count = 0
        while not is_over.is_set():
            count += 1
            body = chat(model, f"{prompt} {number} {count}", stream=stream and count % 2 == 0)
            await load.send(body)
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        yield
    finally:
        is_over.set()
        await asyncio.gather(*tasks)


def failed(exchanges: list[Exchange]) -> list[Exchange]:
    """Return the requests that were not answered whole."""
    return [exchange for exchange in exchanges if exchange.outcome is not Outcome.COMPLETE]
