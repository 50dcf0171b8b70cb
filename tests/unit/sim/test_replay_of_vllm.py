"""What real vLLM 0.19 did, taken for a ledger, is replayed as it was: recordings of LLMServingSim (MIT)."""

from pathlib import Path

import pytest

from modelyard.sim.recorded import Asked, stretches
from modelyard.sim.recorded_speed import Size, learn
from modelyard.sim.replay import Ledger, replay
from modelyard.sim.replay_money import PriceList
from modelyard.sim.replay_setup import Release, Setup
from modelyard.sim.scenario_body import GatewayBody
from modelyard.sim.traces import Recorded, recorded

T0 = 1_796_000_000.0
RUNS = recorded(Path(__file__).parents[2] / "data" / "llmservingsim")
# Where the cache is always full the gateway keeps more of it free than vLLM does, and half of the wait is before it.
BOUNDS = {run.name: 0.2 if "4090" in run.name else 0.1 for run in RUNS}


def rows(run: Recorded) -> tuple[Asked, ...]:
    return tuple(
        Asked(
            at_s=T0 + one.come_s,
            endpoint_id="ep",
            model="m",
            version_id="ver",
            replica_id="rep",
            key_id="k",
            prompt_tokens=one.prompt_tokens,
            completion_tokens=one.output_tokens,
            ttft_s=one.ttft_s,
            latency_s=one.last_s - one.come_s,
        )
        for one in run.served
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_real_engine_is_replayed_as_it_was(run: Recorded) -> None:
    asked, ranks = rows(run), run.data_parallel
    size = Size(run.max_num_seqs * ranks, run.chunk_tokens * ranks, run.kv_blocks * 16 * ranks)
    learned = learn(asked, size)
    assert learned is not None
    assert learned.judged.worst < 0.1
    setup = Setup(
        name="m",
        releases=(Release(version_id="ver", speed=learned.speed, size=size),),
        # Its callers had no gateway before it, which would have told most of them to come later.
        gateway=GatewayBody(queue_max=1000, queue_wait_s=1000.0),
        has_prefixes=False,
    )
    ledger = Ledger(
        asked=asked,
        replayed=tuple(stretches(T0, asked[-1].at_s + 1)),
        prices=PriceList(entries=(), factor_micro=0),
    )
    as_is, real = (one.runs[0].figures for one in replay(setup, ledger, []).tried)
    assert as_is["refused"] == 0
    for key in ("ttft_p50_s", "ttft_p99_s", "latency_p50_s", "latency_p99_s"):
        assert as_is[key] == pytest.approx(real[key], rel=BOUNDS[run.name]), key
