"""An endpoint without the lines of batches: what is left is what people wait for."""

import msgspec

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy.batch_demand import without_batches
from modelyard.policy.scaling import Seen, decide

BUSY = Seen(
    now_s=100.0, replicas=1, ready=1, slots=8, gateways=1, queued=3, in_flight=8, is_proven=True, wait_s=9.0,
    utilization=1.0, kv_use=0.96, requests_s=4.0, tokens_s=100.0,
)  # fmt: skip


def test_what_engines_tell_is_shared_out_by_who_runs() -> None:
    seen = without_batches(BUSY, queued=3, running=6)
    assert (seen.queued, seen.in_flight, seen.wait_s) == (0, 2, 0.0)
    assert (seen.utilization, seen.kv_use, seen.requests_s, seen.tokens_s) == (0.25, 0.24, 1.0, 25.0)


def test_who_waits_in_real_time_still_waits() -> None:
    seen = without_batches(BUSY, queued=2, running=6)
    assert (seen.queued, seen.wait_s) == (1, 9.0)


def test_batches_alone_keep_one_replica_awake_and_start_no_other() -> None:
    spec = Scaling(min_replicas=1, max_replicas=8, scale_to_zero=True)
    asleep = Seen(now_s=1.0, replicas=0, ready=0, slots=8, gateways=1, queued=50, is_proven=True)
    assert decide(spec, None, without_batches(asleep, queued=50, running=0), Autoscale()).replicas == 1
    assert decide(spec, None, without_batches(BUSY, queued=3, running=8), Autoscale()).replicas == 1
    assert decide(spec, None, BUSY, Autoscale()).replicas > 1


def test_lines_that_fill_slots_and_memory_for_an_hour_start_nothing() -> None:
    spec, rules, memory = Scaling(min_replicas=1, max_replicas=8), Autoscale(batch_scales=False), None
    for now_s in range(0, 3600, 10):
        full = msgspec.structs.replace(BUSY, now_s=float(now_s), queued=50, in_flight=8)
        decision = decide(spec, memory, without_batches(full, queued=50, running=7), rules)
        memory = decision.memory
        assert decision.replicas == 1, decision.reason


def test_nothing_changes_without_batches() -> None:
    assert without_batches(BUSY, queued=0, running=0) is BUSY
