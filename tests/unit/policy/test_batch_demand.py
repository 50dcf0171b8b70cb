"""An endpoint without the lines of batches: what is left is what people wait for."""

from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.policy.batch_demand import without_batches
from modelyard.policy.scaling import Seen, decide

BUSY = Seen(
    now_s=100.0, replicas=1, ready=1, slots=8, gateways=1, queued=3, in_flight=8, is_proven=True, wait_s=9.0,
    utilization=1.0, requests_s=4.0, tokens_s=100.0,
)  # fmt: skip


def test_what_engines_tell_is_shared_out_by_who_runs() -> None:
    seen = without_batches(BUSY, queued=3, running=6)
    assert (seen.queued, seen.in_flight, seen.wait_s) == (0, 2, 0.0)
    assert (seen.utilization, seen.requests_s, seen.tokens_s) == (0.25, 1.0, 25.0)


def test_who_waits_in_real_time_still_waits() -> None:
    seen = without_batches(BUSY, queued=2, running=6)
    assert (seen.queued, seen.wait_s) == (1, 9.0)


def test_batches_alone_keep_one_replica_awake_and_start_no_other() -> None:
    spec = Scaling(min_replicas=1, max_replicas=8, scale_to_zero=True)
    asleep = Seen(now_s=1.0, replicas=0, ready=0, slots=8, gateways=1, queued=50, is_proven=True)
    assert decide(spec, None, without_batches(asleep, queued=50, running=0), Autoscale()).replicas == 1
    assert decide(spec, None, without_batches(BUSY, queued=3, running=8), Autoscale()).replicas == 1
    assert decide(spec, None, BUSY, Autoscale()).replicas > 1


def test_nothing_changes_without_batches() -> None:
    assert without_batches(BUSY, queued=0, running=0) is BUSY
