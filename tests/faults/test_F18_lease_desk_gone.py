"""F18 (limits in memory): the controller is killed. Limits and quotas never open, and nobody waits for it.

Gateways bound requests by what they know themselves; what is spent of quotas goes on being counted from what they
heard last. With a shared store in the place of the controller the same must hold; it joins this file with that store.
"""

import json
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome
from tests.support.waiting import eventually
from tests.support.yard import Yard

PROMPT = "!" * 2000
BODY: dict[str, Any] = {"model": "sim", "prompt": PROMPT, "max_tokens": 8}
WORST = len(json.dumps(BODY).encode()) + 8
TOO_MUCH = BODY | {"prompt": "!" * 10 * WORST}


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def settings(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"gateway.workers": request.param}


async def test_limits_hold_while_the_controller_is_dead_and_answers_are_as_quick(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    with Yard(tmp_path, settings) as yard:
        yard.deploy("sim", options={"slots": 64, "ttft_ms": 20, "itl_ms": 1, "context_length": 65_536})
        by_requests = yard.new_key(limits={"requests_per_minute": 10})
        by_quota = yard.new_key(limits={"tokens_per_day": 10 * WORST})
        free = yard.new_key()
        eventually(lambda: all_judge(yard, by_requests, by_quota), 30, "all workers know the keys and what is spent")
        async with Load(yard.port, free) as load:
            before = [await load.send(BODY, path="/v1/completions") for _ in range(10)]
            (control,) = yard.plane_pids("control")
            yard.signal(control, signal.SIGSTOP)  # its successor must not come: it hangs first, and is killed later
            try:
                begun_s = time.monotonic()
                for _ in range(60):
                    load.start(BODY, path="/v1/completions", key=by_requests)
                    load.start(BODY, path="/v1/completions", key=by_quota)
                storm = load.exchanges[len(before) :]
                await load.finish()
                took_s = time.monotonic() - begun_s
                during = [await load.send(BODY, path="/v1/completions") for _ in range(10)]
            finally:
                yard.kill(control)
            eventually(lambda: yard.plane_pids("control") not in ([], [control]), 30, "another controller")
            again = [load.start(BODY, path="/v1/completions", key=by_quota) for _ in range(60)]
            await load.finish()
            check_ledger(yard, load.exchanges)
        passed = {key: [one for one in storm[place::2] if one.status == 200] for place, key in enumerate("rq")}
        assert len(passed["r"]) <= 10 + 2 + took_s / 6, "limits opened"
        assert 0 < len(passed["q"]) <= 10, "quotas opened"
        assert {one.status for one in storm} == {200, 429}
        assert {one.outcome for one in during} == {Outcome.COMPLETE}
        spent = len(passed["q"]) + sum(one.status == 200 for one in again)
        assert spent <= 10, "a quota began anew"
        if settings["gateway.workers"] == 1:
            assert len(passed["q"]) == 10
        assert {one.status for one in again} <= {200, 429}
        # Not a matter of speed: an admission that asked a dead controller would wait for a time-out, not milliseconds.
        assert middle(during) < middle(before) + 1.0


def all_judge(yard: Yard, by_requests: str, by_quota: str) -> bool:
    """Say whether whichever worker is asked knows both keys; what is too much for a quota spends nothing of it."""
    known = {yard.call("GET", "/v1/models", key=by_requests).status for _ in range(12)}
    refused = {yard.call("POST", "/v1/completions", TOO_MUCH, key=by_quota).status for _ in range(12)}
    return (known, refused) == ({200}, {429})


def middle(exchanges: list[Exchange]) -> float:
    return statistics.median(one.duration_s for one in exchanges)
