"""What one choice costs, in microseconds of this machine: the best of some runs, because others use it too."""

import random
import timeit
from collections.abc import Callable
from functools import partial

from modelyard.domain.routing_table import ReplicaRoute
from modelyard.policy.job import Job
from modelyard.policy.prefixes import PrefixHolders, chain
from modelyard.policy.replica_load import ReplicaLoad
from modelyard.policy.routing import UNKNOWN_ENGINE, choose

Holders = PrefixHolders[ReplicaLoad]

PROMPT_BYTES = 48 * 1024
SHARED_BYTES = 20 * 1024


def table() -> dict[str, float]:
    """Return microseconds by what was done."""
    chance = random.Random(1)
    shared = chance.randbytes(SHARED_BYTES)
    prompts = [shared + chance.randbytes(PROMPT_BYTES - SHARED_BYTES) for _ in range(300)]
    chains = [chain(prompt, salt=1) for prompt in prompts]
    found = {"chain of 1 KB": _us(partial(chain, prompts[0], salt=1)) * 1024 / PROMPT_BYTES}
    short = Job("t", prompt_tokens=100)
    for count in (1, 8, 16, 64, 1000):
        fleet = _fleet(count, chance)
        holders: Holders | None = PrefixHolders(200_000) if count > 16 else None
        found[f"short prompt, {count} replicas"] = _us(partial(_choose, fleet, short, chance, holders))
        for prefix in chains:
            _note(fleet, prefix, chance, holders)
        found[f"12 K tokens, {count} replicas, choose and note"] = _us(partial(_next, fleet, chains, chance, holders))
    return found


def _choose(fleet: list[ReplicaLoad], job: Job, chance: random.Random, holders: Holders | None) -> ReplicaLoad:
    replica = choose(fleet, job, now_s=1.0, model=UNKNOWN_ENGINE, chance=chance.random, holders=holders)
    assert replica is not None
    return replica


def _note(fleet: list[ReplicaLoad], prefix: tuple[int, ...], chance: random.Random, holders: Holders | None) -> None:
    job = Job("t", prompt_tokens=PROMPT_BYTES // 4, prefix=prefix)
    replica = _choose(fleet, job, chance, holders)
    replica.prefixes.add(prefix)
    if holders is not None:
        holders.add(prefix, replica)


def _next(
    fleet: list[ReplicaLoad], chains: list[tuple[int, ...]], chance: random.Random, holders: Holders | None
) -> None:
    chains.append(chains.pop(0))
    _note(fleet, chains[0], chance, holders)


def _fleet(count: int, chance: random.Random) -> list[ReplicaLoad]:
    fleet = []
    for number in range(count):
        replica = ReplicaLoad(ReplicaRoute(f"rep_{number}", "127.0.0.1", 1, "", 64), "v1", 64)
        replica.running, replica.pending_tokens, replica.reading_since_s = chance.randrange(20), 500, 0.99
        fleet.append(replica)
    return fleet


def _us(act: Callable[[], object]) -> float:
    return min(timeit.repeat(act, number=200, repeat=25)) / 200 * 1e6
