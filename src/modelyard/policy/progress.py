"""How far an endpoint is, why it is not further, and whether it has failed.

What people see in the command line, the console, the API and the loading
comments of a stream comes from here. The texts hold no running numbers beyond
``Progress``' own, so that an unchanged situation gives an unchanged text.
"""

from collections.abc import Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Stage
from modelyard.domain.fleet import NAPPING, THERE, Replica, ReplicaState
from modelyard.policy.reconcile import crashes
from modelyard.policy.rollouts import beside

CRASHES_TO_FAIL = 3
"""Crashes in a row, none ready, until an endpoint counts as failed: one or two may be bad luck, and callers wait."""
PERCENT_FETCHED = 50
"""Share of the way to ready that fetching an artifact counts for, where one must be fetched."""


class Fetch(msgspec.Struct, frozen=True):
    """An artifact on its way. ``percent`` is of the fetch alone; ``left_s`` None is unknown."""

    stage: Stage
    percent: int
    left_s: float | None = None
    bytes_per_s: float | None = None
    """Pace of this try alone; None: unknown."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint after a pass.

    ``load_s``: expected seconds from start to ready, ``wake_s`` from asleep to ready. ``troubles``: why nothing can be
    started at all (a missing engine, a bad artifact), in our words, by version. ``waiting``: why the next start is not
    yet; ``is_coming``: one wakes soon all the same. ``size_reason``: why it has its size. ``is_proven``: it was ready
    once.
    ``replicas`` may hold those of shadows and fallbacks, ``wanted`` does not count them: nobody waits for them.
    """

    now_s: float
    wanted: int
    replicas: Sequence[Replica]
    load_s: float
    wake_s: float = 0.0
    is_proven: bool = False
    size_reason: str = ""
    waiting: str = ""
    is_coming: bool = False
    no_room: str = ""
    """Why a replica cannot be placed, and what would help."""
    troubles: Mapping[str, str] = {}
    fetch: Fetch | None = None
    moving: str = ""
    """What is to be said of a replica that moves, which ``replicas`` has once."""


class Outlook(msgspec.Struct, frozen=True):
    """What to tell people of an endpoint."""

    status: EndpointStatus
    progress: Progress
    failure: str = ""


def outlook(endpoint: Endpoint, view: View) -> Outlook:
    """Return status, progress and failure of ``endpoint``."""
    others = beside(endpoint)
    replicas = [replica for replica in view.replicas if replica.version_id not in others]
    states = [replica.state for replica in replicas]
    ready = states.count(ReplicaState.READY)
    if endpoint.is_deleted:
        return Outlook(EndpointStatus.STOPPED, Progress(Stage.QUEUED, reason="it is being deleted"))
    if view.wanted == 0:
        return Outlook(EndpointStatus.STOPPED, Progress(Stage.QUEUED, reason=f"asleep: {view.size_reason}"))
    if ready > 0:
        there = sum(state in THERE for state in states)  # who sleeps is one that is wanted, and there when it is needed
        is_settled = there >= view.wanted and ReplicaState.DRAINING not in states
        status = EndpointStatus.RUNNING if is_settled else EndpointStatus.SCALING
        going_on = "a replica drains" if there >= view.wanted else f"{there} of {view.wanted} replicas are ready"
        reason = _trouble(view) or view.no_room or view.waiting or (view.moving if is_settled else going_on)
        return Outlook(status, Progress(Stage.READY, percent=100, eta_s=0.0, reason=reason))
    if any(state in NAPPING for state in states):
        return _asleep(view, replicas)
    if failure := _failure(endpoint, view):
        return Outlook(EndpointStatus.FAILED, Progress(Stage.QUEUED, reason=view.waiting or failure), failure)
    status = EndpointStatus.SCALING if view.is_proven else EndpointStatus.PROVISIONING
    return Outlook(status, _under_way(view, replicas))


def _asleep(view: View, replicas: Sequence[Replica]) -> Outlook:
    """Return how one stands of which nothing answers, and something sleeps: it runs, and is there within seconds."""
    waking = [one.state_since for one in replicas if one.state is ReplicaState.WAKING]
    if waking:
        elapsed_s = max(0.0, view.now_s - min(waking))
        percent = min(99, int(100 * elapsed_s / max(view.wake_s, 0.001)))
        left_s = round(max(view.wake_s - elapsed_s, 0.5), 1)
        return Outlook(EndpointStatus.RUNNING, Progress(Stage.WARMING, percent, left_s, "its engine wakes"))
    eta_s = round(view.wake_s, 1)
    if reason := view.no_room or view.waiting:
        # Turns are as short as naps: those that change its status would soon be all of its events.
        status = EndpointStatus.RUNNING if view.is_coming and not view.no_room else EndpointStatus.SCALING
        return Outlook(status, Progress(Stage.PLACING, 0, eta_s, reason))
    reason = f"asleep: its engine sleeps beside its weights, and wakes within about {max(view.wake_s, 1.0):.0f} s"
    return Outlook(EndpointStatus.RUNNING, Progress(Stage.WARMING, eta_s=eta_s, reason=reason))


def _trouble(view: View) -> str:
    return next(iter(view.troubles.values()), "")


def _failure(endpoint: Endpoint, view: View) -> str:
    """Return why no release can answer: one that cannot must not turn away those whom another will serve."""
    answering = [release.version_id for release in endpoint.releases if release.weight]
    worst: dict[str, list[Replica]] = {}
    for (version_id, _), history in crashes(view.replicas).items():
        worst[version_id] = max(worst.get(version_id, []), history, key=len)
    failures = []
    for version_id in answering:
        history = worst.get(version_id, [])
        if trouble := view.troubles.get(version_id):
            failures.append(trouble)
        elif len(history) >= CRASHES_TO_FAIL:
            failures.append(f"it failed {len(history)} times in a row, the last time: {history[-1].reason}")
    return failures[0] if failures and len(failures) == len(answering) else ""


def _under_way(view: View, replicas: Sequence[Replica]) -> Progress:
    if (fetch := view.fetch) is not None:
        eta_s = None if fetch.left_s is None else round(fetch.left_s + view.load_s, 1)
        percent = fetch.percent * PERCENT_FETCHED // 100
        return Progress(fetch.stage, percent=percent, eta_s=eta_s, bytes_per_s=fetch.bytes_per_s)
    loading = [replica for replica in replicas if replica.state is ReplicaState.LOADING]
    if loading:
        elapsed_s = max(0.0, view.now_s - min(replica.started_at for replica in loading))
        # A load that takes longer than expected stays just short of the end instead of promising the past.
        percent = min(99, int(100 * elapsed_s / max(view.load_s, 0.001)))
        return Progress(Stage.LOADING, percent=percent, eta_s=round(max(view.load_s - elapsed_s, 0.5), 1))
    if any(replica.state is ReplicaState.STARTING for replica in replicas):
        return Progress(Stage.LOADING, percent=0, eta_s=round(view.load_s, 1))
    if view.no_room:
        return Progress(Stage.PLACING, percent=0, reason=view.no_room)
    reason = view.waiting or _trouble(view)
    return Progress(Stage.QUEUED, percent=0, eta_s=round(view.load_s, 1), reason=reason)
