"""A controller that is cut off at any write of a rollout leaves one that the next controller finishes, with one end."""

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest
from tests.support.cuts import Cut
from tests.support.reconciling import WITHIN_S, Site, controller, open_site
from tests.support.waiting import eventually_async

from modelyard.domain.endpoints import Endpoint
from modelyard.domain.rollouts import Rollout, RolloutKind, RolloutState, Thresholds
from modelyard.domain.signals import Window
from modelyard.ids import new_id
from modelyard.policy.rollouts import begun

TOGETHER = 4
"""Sites at once: each mostly waits."""
LIMITS = Thresholds(min_step_s=0.0, min_requests=1)


class Counted:
    """Gateways that count as many failures of the candidate as a test says."""

    def __init__(self, candidate_id: str, errors: int) -> None:
        self._candidate_id = candidate_id
        self._errors = errors

    def window(self, endpoint_id: str, version_id: str | None, seconds: float) -> Window:
        errors = self._errors if version_id == self._candidate_id else 0
        return Window(seconds=seconds, requests=100, errors=errors)


async def begin(site: Site, endpoint: Endpoint, kind: RolloutKind) -> Rollout:
    """Store a rollout to a new version as the management API does."""
    (old,) = await site.store.versions()
    new = msgspec.structs.replace(old, id=new_id("ver-"), version="v2")
    rollout = Rollout(
        old.id, new.id, began_at=0.0, kind=kind, steps=(50, 100) if kind is RolloutKind.CANARY else (100,), keep_s=0.0
    )
    rollout = msgspec.structs.replace(rollout, thresholds=LIMITS, asked_at=1e12)
    stored = await site.endpoint(endpoint)
    assert stored is not None
    await site.store.add_release(new, begun(stored, rollout))
    return rollout


async def has_ended(site: Site, endpoint: Endpoint, version_id: str) -> bool:
    """Say whether one version has all traffic and the only replica, and nothing else runs."""
    stored = await site.endpoint(endpoint)
    running = {process.replica_id for process in await site.running()}
    replicas = [one for one in await site.replicas(endpoint) if one.id in running]
    return (
        stored is not None
        and [(one.version_id, one.weight) for one in stored.releases] == [(version_id, 100)]
        and [one.version_id for one in replicas] == [version_id]
        and len(running) == 1
        and stored.rollout is not None
        and not stored.rollout.is_live
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "errors"), [(RolloutKind.CANARY, 0), (RolloutKind.CANARY, 60), (RolloutKind.ROLLING, 0)]
)
async def test_rollout_survives_a_cut_at_any_write(tmp_path: Path, kind: RolloutKind, errors: int) -> None:
    for first in itertools.count(step=TOGETHER):
        folders = {writes: tmp_path / str(writes) for writes in range(first, first + TOGETHER)}
        for folder in folders.values():
            folder.mkdir()
        cuts = [cut_and_go_on(folder, writes, kind, errors) for writes, folder in folders.items()]
        if not all(await asyncio.gather(*cuts)):
            assert first + TOGETHER > 8, "a rollout takes more writes than that"
            return


async def cut_and_go_on(folder: Path, writes: int, kind: RolloutKind, errors: int) -> bool:
    """Run a rollout whose controller is cut off at a write, and see its end; say whether it was cut off before that."""
    async with open_site(folder) as site:
        endpoint = await site.deploy()
        async with controller(site):
            await site.until_ready(endpoint)
        rollout = await begin(site, endpoint, kind)
        windows = Counted(rollout.candidate_id, errors)
        winner = rollout.stable_id if errors else rollout.candidate_id
        cut = Cut(writes)

        async def is_over() -> bool:
            return await has_ended(site, endpoint, winner)

        async with controller(site, through=cut.through, windows=windows):

            async def is_cut_or_over() -> bool:
                return cut.is_dead or await is_over()

            await eventually_async(is_cut_or_over, WITHIN_S, "cut off or over")
        async with controller(site, windows=windows):
            await eventually_async(is_over, WITHIN_S, "it is over")
        stored = await site.endpoint(endpoint)
        assert stored is not None
        assert stored.rollout is not None
        assert stored.rollout.state is (RolloutState.ROLLED_BACK if errors else RolloutState.PROMOTED)
        return cut.is_dead
