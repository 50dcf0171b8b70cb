"""How long a candidate has had to become ready."""

import msgspec
from tests.support.towns import endpoint, replica

from modelyard.control.passes import Passed
from modelyard.control.rollouts import start_of
from modelyard.domain.fleet import ReplicaState
from modelyard.domain.rollouts import Rollout
from modelyard.domain.signals import Window
from modelyard.policy.canary import Evidence, Verdict, judge

DAY_S = 86_400.0


def test_a_candidate_of_an_endpoint_that_slept_for_a_day_has_all_its_time_again() -> None:
    rollout = Rollout("ver-old", "ver-new", began_at=0.0, asked_at=0.0)
    one = endpoint("one", "ver-old", "ver-new", rollout=rollout)
    slept = msgspec.structs.replace(replica(one, version_id="ver-new"), state=ReplicaState.STOPPED, state_since=60.0)

    def verdict(now_s: float, awake_at: float) -> Verdict:
        passed = Passed(1, {}, has_rollout=True, no_room={"ver-new": "needs 40 GiB"}, awake_at=awake_at)
        start = start_of(rollout, [slept], passed)
        nothing = Window(seconds=0.0)
        return judge(rollout, Evidence(weight=0, stable=nothing, candidate=nothing, start=start), now_s).verdict

    assert verdict(DAY_S + 10, DAY_S) is Verdict.WAIT
    assert verdict(DAY_S + 1900, DAY_S) is Verdict.ROLL_BACK
