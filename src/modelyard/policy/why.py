"""Answers to "why?" about an endpoint: what was decided, with its numbers, and what to do about it.

Every decision leaves its reason where it is made: in the endpoint's progress,
in the autoscaler's decision, in events. This only picks what answers a
question, and adds the next step.
"""

from collections.abc import Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Stage, Tier

Numbers = Mapping[str, str | int | float | bool | None]


class Happened(msgspec.Struct, frozen=True):
    """An event of the endpoint."""

    at: float
    kind: str
    reason: str
    replica_id: str = ""
    data: Numbers = {}


class Answer(msgspec.Struct, frozen=True):
    """One question with its answer; ``next_step`` is a command or a change, "" when there is nothing to do."""

    question: str
    answer: str
    next_step: str = ""
    at: int = 0
    """When it was so, unix seconds; 0: now."""
    data: Numbers = {}


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint now. ``size_reason``: why it has ``wanted`` replicas; "" before the first pass."""

    now_s: float
    wanted: int = 0
    ready: int = 0
    loading: Progress | None = None
    """How far those are that load; None: none does, or it is not known how long that takes."""
    running: int = 0
    """Requests at its replicas."""
    drain_timeout_s: float = 0.0
    size_reason: str = ""
    size_data: Numbers = {}
    tier: Tier | None = None
    tier_reason: str = ""
    failing: Sequence[str] = ()
    """What gateways say of each replica that fails them, a line each."""
    placed: Sequence[str] = ()
    """Where each replica runs, a line each."""
    events: Sequence[Happened] = ()
    """Oldest first."""


TROUBLES = {
    "replica_failed": "Why did {replica} end?",
    "guest_failed": "Why was it not loaded?",
    "replica_killed": "Why was {replica} killed?",
    "evicted": "Why was {replica} evicted?",
    "rollout_rolled_back": "Why was a version rolled back?",
}
"""Events that are trouble, by their kind. An artifact that cannot be used is the endpoint's state while it is so."""
_STEPS_OF = {
    "evicted": "keep it with: modelyard endpoints set {name} --tier warm; or add a node",
    "rollout_rolled_back": "see what was compared: modelyard rollout status {name}",
}
"""What follows from a kind of trouble; of the others it follows from the reason."""
TROUBLE_AGE_S = 86_400.0
_ENDS = ("replica_failed", "replica_killed", "replica_stopped", "replica_ended")
_GOING_ON = ("replicas are ready", "a replica drains")
"""Ends of what an endpoint says of its progress while nothing is wrong."""
_AFTER_NO_ROOM = "free what is named, add a node, or ask for less; see: modelyard nodes"
TROUBLES_MAX = 5
MAKING_ROOM = "to make room"
"""End of a reason for which nobody has to do anything: others move away."""


def explain(endpoint: Endpoint, known: Known) -> tuple[Answer, ...]:
    """Return the answers, what matters most first."""
    answers = [_deletion(known) if endpoint.is_deleted else _state(endpoint, known), _size(endpoint, known)]
    if known.failing:
        told = "; ".join(known.failing)
        answers.insert(1, Answer("Why do requests fail?", told, _after_failure(told, endpoint.name)))
    if known.placed:
        answers.append(Answer("Where does it run?", "; ".join(known.placed)))
    if known.tier is not None and not endpoint.is_deleted:
        answers.append(Answer(f"Why is it {known.tier}?", known.tier_reason))
    answers += _start(known) + _moved(known)
    answers += _troubles(endpoint, known)
    return tuple(answers)


def _deletion(known: Known) -> Answer:
    runs = f"{known.running} request{' still runs' if known.running == 1 else 's still run'}"
    ends = f"it ends with the last of them, or after {known.drain_timeout_s:g} s of draining (control.drain_timeout_s)"
    rest = f"{runs}; {ends}" if known.running else "no request runs any more; its replicas are being stopped"
    return Answer("Why is it still there?", f"it is being deleted; {rest}")


def _state(endpoint: Endpoint, known: Known) -> Answer:
    name, progress = endpoint.name, endpoint.progress
    question = f"Why is it {endpoint.status}?"
    if endpoint.failure:
        return Answer(question, endpoint.failure, _next_step(endpoint.failure, endpoint))
    match endpoint.status:
        case EndpointStatus.STOPPED:
            step = "send it a request"
            if not endpoint.host_id:  # a guest has no size of its own
                step += f", or: modelyard endpoints set {name} --scale 1"
            return Answer(question, progress.reason or "it sleeps", step)
        case EndpointStatus.RUNNING:
            return Answer(question, progress.reason or _ready(known))
        case _:
            return _under_way(question, endpoint, known)


def _ready(known: Known) -> str:
    # Fallbacks, and what drains, are beyond the number that is wanted.
    of_wanted = f" of {known.wanted}" if known.ready <= known.wanted else ""
    return f"{known.ready}{of_wanted} replicas are ready"


def _under_way(question: str, endpoint: Endpoint, known: Known) -> Answer:
    progress = endpoint.progress
    parts = [_ready(known)]
    # One that is ready is the furthest; what is waited for are those behind it.
    awaited = known.loading if progress.stage is Stage.READY else progress
    if awaited is not None:
        parts.append(f"the {'next' if progress.stage is Stage.READY else 'furthest'} is {awaited.stage}")
        if awaited.percent is not None:
            parts[-1] += f" ({awaited.percent} %)"
        if awaited.eta_s:
            parts.append(f"about {max(1, round(awaited.eta_s))} s are left")
    is_fine = progress.reason.endswith(_GOING_ON)
    if progress.reason and not progress.reason.endswith(_GOING_ON[0]):
        parts.append(progress.reason)
    step = _next_step(progress.reason, endpoint) if progress.reason and not is_fine else ""
    if progress.stage is Stage.PLACING:
        step = "" if progress.reason.endswith(MAKING_ROOM) else _AFTER_NO_ROOM
    return Answer(question, "; ".join(parts), step)


def _size(endpoint: Endpoint, known: Known) -> Answer:
    question = f"Why {known.wanted} replica{'' if known.wanted == 1 else 's'}?"
    scaled = [one for one in known.events if one.kind == "scaled"]
    answer = known.size_reason or "the controller has not looked at it yet"
    if scaled:
        last = scaled[-1]
        answer += f"; last changed {_ago(known.now_s - last.at)} {last.reason}"
    step = ""
    if known.wanted >= endpoint.scaling.max_replicas and "configured most" in known.size_reason:
        step = f"allow more: modelyard endpoints set {endpoint.name} --scale {endpoint.scaling.min_replicas}..N"
    return Answer(question, answer, step, data=known.size_data)


def _start(known: Known) -> list[Answer]:
    """Return what the last start that became ready took, and how the weights came there."""
    ready = next((one for one in reversed(known.events) if one.kind == "replica_ready" and "load_s" in one.data), None)
    if ready is None:
        return []
    begun = next(
        (one for one in known.events if one.kind == "replica_started" and one.replica_id == ready.replica_id), None
    )
    parts = [f"{ready.data['load_s']} s from start to ready"]
    numbers = dict(ready.data)
    if begun is not None and "weights_bytes" in begun.data:
        numbers |= begun.data
        fetch_s = begun.data["fetch_s"]
        parts.append(
            "its weights were on the node" if fetch_s is None else f"{fetch_s} s before that to fetch its weights"
        )
    return [Answer("What did its last start take?", "; ".join(parts), at=int(ready.at), data=numbers)]


def _moved(known: Known) -> list[Answer]:
    """Return why a replica moved last: the start of the one that took over says it."""
    begun = next((one for one in reversed(known.events) if "takes_over" in one.data), None)
    if begun is None:
        return []
    old_id, new_id = begun.data["takes_over"], begun.replica_id
    for one in known.events:
        if one.kind == "moved" and one.replica_id == old_id:
            return [Answer(f"Why did {old_id} move?", f"{begun.reason}; {new_id} took over", at=int(one.at))]
        if one.kind in _ENDS and one.replica_id == new_id:
            why = f"{begun.reason}; {new_id} was to take over, but {one.reason}; it is tried again after a pause"
            return [Answer(f"Why did {old_id} not move?", why, at=int(one.at))]
        if one.kind in _ENDS and one.replica_id == old_id:
            why = f"{begun.reason}; it ended before: {one.reason}; {new_id} has its place"
            return [Answer(f"Why did {old_id} not move?", why, at=int(one.at))]
    return [Answer(f"Why does {old_id} move?", f"{begun.reason}; {new_id} takes over once it is ready")]


def _troubles(endpoint: Endpoint, known: Known) -> list[Answer]:
    """Return what went wrong in the last day, the newest first, each place once."""
    found: list[Answer] = []
    seen: set[tuple[str, str]] = set()
    for event in reversed(known.events):
        key = (event.kind, event.reason)
        if event.kind not in TROUBLES or key in seen or known.now_s - event.at > TROUBLE_AGE_S:
            continue
        seen.add(key)
        times = sum(one.kind == event.kind and one.reason == event.reason for one in known.events)
        said = str(event.data.get("last_lines") or "")
        answer = event.reason + (f" ({times} times)" if times > 1 else "") + (f'. It said: "{said}"' if said else "")
        question = TROUBLES[event.kind].format(replica=event.replica_id or "a replica")
        of_kind = _STEPS_OF.get(event.kind, "").format(name=endpoint.name)
        step = of_kind or _next_step(f"{event.reason} {said}", endpoint)
        found.append(Answer(question, answer, step, int(event.at), event.data))
        if len(found) == TROUBLES_MAX:
            break
    return found


def _next_step(reason: str, endpoint: Endpoint) -> str:
    of_guest = _after_guest_failure(reason, endpoint.name) if endpoint.host_id else ""
    return of_guest or _after_failure(reason, endpoint.name)


def _after_guest_failure(reason: str, name: str) -> str:
    """Return the next step for a guest: its log is its host's, who says in the reason what it has to say."""
    lowered = reason.lower()
    again = f"modelyard endpoints rm {name}, then: modelyard deploy model:{name} --on HOST --name {name}"
    if "host is gone" in lowered:
        return f"deploy it onto another host: {again}"
    if "another base" in lowered:
        return f"deploy it with the base that it was trained on: modelyard endpoints rm {name}, then deploy with --base"
    if "refused it" in lowered:
        return f"give it a version that its host can load: modelyard endpoints add-release {name} …"
    return ""


def _after_failure(reason: str, name: str) -> str:
    """Return the next step for a reason, by what it is about."""
    lowered = reason.lower()
    steps = (
        (
            ("the provider refused", "check_model="),
            "deploy a version whose options url, model and key are what the provider has: modelyard endpoints "
            f"add-release {name}",
        ),
        (("out of memory",), "give it less to hold (options slots, context_length), or a node with more memory"),
        (("largest free", "no room", "no node", "none is free"), _AFTER_NO_ROOM),
        (
            ("its tenant may have",),
            "free accelerators of this tenant, or allow it more: modelyard tenants limit TENANT_ID --accelerators N",
        ),
        (("upload it again",), "upload the same file again: modelyard models upload FILE"),
        (("artifact", "digest", "gguf", "safetensors", "onnx"), "deploy a version with a good artifact"),
        (("pip install",), "install what is named on the node"),
        (("idle", "no request", "asleep"), f"send it a request, or: modelyard endpoints set {name} --scale 1"),
    )
    for words, step in steps:
        if any(word in lowered for word in words):
            return step
    return f"see its log: modelyard logs {name}"


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {unit}{'' if number == 1 else 's'} ago"
    return f"{max(0, int(seconds))} s ago"
