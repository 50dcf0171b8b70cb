"""How far an endpoint is, why it is not further, and whether it has failed.

What people see in the command line, the console, the API and the loading
comments of a stream comes from here. The texts hold no running numbers beyond
``Progress``' own, so that an unchanged situation gives an unchanged text.
"""

from collections.abc import Sequence

import msgspec

from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Stage
from modelyard.domain.fleet import Replica, ReplicaState
from modelyard.policy.reconcile import crashes

CRASHES_TO_FAIL = 3
"""Crashes in a row, none ready, until an endpoint counts as failed: one or two may be bad luck, and callers wait."""
PERCENT_FETCHED = 50
"""Share of the way to ready that fetching an artifact counts for, where one must be fetched."""


class Fetch(msgspec.Struct, frozen=True):
    """An artifact on its way. ``percent`` is of the fetch alone; ``left_s`` None is unknown."""

    stage: Stage
    percent: int
    left_s: float | None = None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint after a pass.

    ``load_s``: expected seconds from start to ready. ``trouble``: why nothing can be started at all (a missing
    engine, a bad artifact), in our words. ``waiting``: why the next start is not yet. ``size_reason``: why it has
    its size. ``is_proven``: it was ready once.
    """

    now_s: float
    wanted: int
    replicas: Sequence[Replica]
    load_s: float
    is_proven: bool = False
    size_reason: str = ""
    waiting: str = ""
    trouble: str = ""
    fetch: Fetch | None = None


class Outlook(msgspec.Struct, frozen=True):
    """What to tell people of an endpoint."""

    status: EndpointStatus
    progress: Progress
    failure: str = ""


def outlook(endpoint: Endpoint, view: View) -> Outlook:
    """Return status, progress and failure of ``endpoint``."""
    states = [replica.state for replica in view.replicas]
    ready = states.count(ReplicaState.READY)
    if endpoint.is_deleted:
        return Outlook(EndpointStatus.STOPPED, Progress(Stage.QUEUED, reason="it is being deleted"))
    if view.wanted == 0:
        return Outlook(EndpointStatus.STOPPED, Progress(Stage.QUEUED, reason=f"asleep: {view.size_reason}"))
    if ready > 0:
        is_settled = ready >= view.wanted and ReplicaState.DRAINING not in states
        status = EndpointStatus.RUNNING if is_settled else EndpointStatus.SCALING
        going_on = "a replica drains" if ready >= view.wanted else f"{ready} of {view.wanted} replicas are ready"
        reason = view.trouble or view.waiting or ("" if is_settled else going_on)
        return Outlook(status, Progress(Stage.READY, percent=100, eta_s=0.0, reason=reason))
    if failure := view.trouble or _crash_loop(view):
        return Outlook(EndpointStatus.FAILED, Progress(Stage.QUEUED, reason=view.waiting or failure), failure)
    status = EndpointStatus.SCALING if view.is_proven else EndpointStatus.PROVISIONING
    return Outlook(status, _under_way(view))


def _crash_loop(view: View) -> str:
    worst = max(crashes(view.replicas).values(), key=len, default=[])
    if len(worst) < CRASHES_TO_FAIL:
        return ""
    return f"it failed {len(worst)} times in a row, the last time: {worst[-1].reason}"


def _under_way(view: View) -> Progress:
    if (fetch := view.fetch) is not None:
        eta_s = None if fetch.left_s is None else round(fetch.left_s + view.load_s, 1)
        return Progress(fetch.stage, percent=fetch.percent * PERCENT_FETCHED // 100, eta_s=eta_s)
    loading = [replica for replica in view.replicas if replica.state is ReplicaState.LOADING]
    if loading:
        elapsed_s = max(0.0, view.now_s - min(replica.started_at for replica in loading))
        # A load that takes longer than expected stays just short of the end instead of promising the past.
        percent = min(99, int(100 * elapsed_s / max(view.load_s, 0.001)))
        return Progress(Stage.LOADING, percent=percent, eta_s=round(max(view.load_s - elapsed_s, 0.5), 1))
    if any(replica.state is ReplicaState.STARTING for replica in view.replicas):
        return Progress(Stage.PLACING, percent=0, eta_s=round(view.load_s, 1))
    return Progress(Stage.QUEUED, percent=0, eta_s=round(view.load_s, 1), reason=view.waiting)
