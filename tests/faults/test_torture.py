"""Everything at once: a seeded storm of requests, faults, kills and table changes, and not a token unaccounted for."""

import asyncio
import random
import signal

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.yard import Yard

SETTINGS = {
    "gateway.queue_max": 12,
    "gateway.queue_wait_s": 3,
    "gateway.first_token_timeout_s": 3,
    "gateway.token_timeout_s": 2,
    "gateway.total_timeout_s": 12,
}
MODEL = "storm"
STORM_S = 10.0
SEEN: list[Exchange] = []
WORDS = "the quick brown fox jumps over the lazy dog, é 你好 🙂, and goes on to the end of the story"
FAULTS = (
    "slow=20", "tokens=80 slow=5", "tokens=40 slow=40", "ttft=300", "crash_after=5 slow=20", "crash_before_first",
    "cut_after=4", "clean_end_after=3", "error_after=3", "http_error=503", "http_error=500", "http_error=400",
    "garbage=invalid_json", "hang_after=4", "usage_every_chunk", "missing_role", "no_done", "split_bytes", "crlf",
    "early_headers", "ping",
)  # fmt: skip
STREAM_FAULTS = (*FAULTS, "no_usage", "null_usage")
"""A whole answer without usage is billed by its words, in its customer's favour, which the ledger check knows not."""


def _body(rng: random.Random, number: int) -> tuple[str, dict[str, object]]:
    is_stream = rng.random() < 0.75
    fault = rng.choice(STREAM_FAULTS if is_stream else FAULTS) if rng.random() < 0.3 else "slow=10"
    prompt = f"[[sim: {fault}]] {number} {WORDS}"
    fields: dict[str, object] = {"stream": is_stream}
    if rng.random() < 0.3:
        fields["max_tokens"] = rng.choice((1, 5, 30))
    if is_stream and rng.random() < 0.4:
        fields["stream_options"] = {"include_usage": True}
    if rng.random() < 0.2:
        return "/v1/completions", {"model": MODEL, "prompt": prompt, **fields}
    return "/v1/chat/completions", chat(MODEL, prompt, **fields)


async def _kill(yard: Yard, rng: random.Random) -> None:
    """Kill, or stop for a moment, one engine."""
    engines = await asyncio.to_thread(yard.engines, MODEL)
    if not engines:
        return
    engine = rng.choice(engines)
    if rng.random() < 0.5:
        yard.signal(engine.pid, signal.SIGKILL)
        return
    yard.signal(engine.pid, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    if engine.pid in {other.pid for other in await asyncio.to_thread(yard.engines, MODEL)}:
        yard.signal(engine.pid, signal.SIGCONT)


@pytest.fixture(scope="module", autouse=True)
def _model(yard: Yard) -> None:
    yard.deploy(MODEL, options={"slots": 4, "ttft_ms": 2, "itl_ms": 2}, replicas=3)


@pytest.mark.parametrize("seed", [7])
async def test_a_storm_leaves_nothing_behind(yard: Yard, seed: int) -> None:
    rng = random.Random(seed)
    async with Load(yard.port, yard.admin_key) as load:
        loop = asyncio.get_running_loop()
        until_s, number = loop.time() + STORM_S, 0
        kills: list[asyncio.Task[None]] = []
        while loop.time() < until_s:
            for _ in range(rng.randint(1, 4)):
                path, body = _body(rng, number)
                number += 1
                load.start(body, path=path, within_s=60)
            if rng.random() < 0.15:
                running = [exchange for exchange in load.exchanges if exchange.outcome is None]
                rng.choice(running).leave()
            if rng.random() < 0.02:
                kills.append(asyncio.ensure_future(_kill(yard, rng)))
            await asyncio.sleep(rng.uniform(0.01, 0.12))
        await asyncio.gather(*kills)
        await load.finish()
        honest = await load.until_served(MODEL, within_s=40)
        assert honest.outcome is Outcome.COMPLETE
        seen = load.exchanges
        SEEN.extend(seen)
    outcomes = {outcome: sum(exchange.outcome is outcome for exchange in seen) for outcome in Outcome}
    assert outcomes[Outcome.HUNG] == outcomes[Outcome.CUT_SHORT] == 0, outcomes
    assert outcomes[Outcome.COMPLETE] > len(seen) // 4, outcomes
    await asyncio.to_thread(check_ledger, yard, SEEN)
