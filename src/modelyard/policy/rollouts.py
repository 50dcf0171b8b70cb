"""What a rollout makes of an endpoint: replicas for each release, and the endpoint after each change. Pure.

A canary first gets the replicas that its next share needs, then the share; the
stable version keeps all of its own, so that going back needs nothing but other
weights. A rolling change takes over replica by replica: one more than needed is
started, and when it is ready an old one loses its share and is drained.

Every function looks at the endpoint as it is, so that whichever write was the
last one, the next pass goes on from there.
"""

import math
from collections.abc import Collection, Mapping

import msgspec

from modelyard.domain.endpoints import Endpoint, Release
from modelyard.domain.rollouts import JUDGEMENTS_KEPT, Judgement, Rollout, RolloutKind, RolloutMode, RolloutState
from modelyard.policy.canary import Decision, Verdict
from modelyard.policy.releases import WHOLE
from modelyard.policy.scaling import split

ROLLING_STEPS = (WHOLE,)
REPEAT_S = 5.0
"""Shortest time after which the numbers of a judgement are written anew: people watch them."""


class NotPossibleError(ValueError):
    """Why a rollout cannot be changed so, in words for whoever asked."""


def sizes(replicas: int, endpoint: Endpoint, now: float) -> dict[str, int]:
    """Return the replicas of each release of an endpoint that should have ``replicas``."""
    rollout, releases = endpoint.rollout, endpoint.releases
    # A fallback is there also while the others sleep: it answers for them until they are awake.
    fallbacks = {one.version_id: int(not endpoint.is_deleted) for one in releases if one.fallback}
    plain = split(replicas, releases) | fallbacks
    if replicas <= 0 or rollout is None or not {rollout.stable_id, rollout.candidate_id} <= plain.keys():
        return plain
    if rollout.is_open:
        weight = weight_of(endpoint, rollout.candidate_id)
        if rollout.kind is RolloutKind.ROLLING:
            # Weights are whole percents, rounded down: rounded up again they give the replicas that they came from.
            done = math.ceil(replicas * weight / WHOLE)
            ahead = max(1, math.ceil(replicas / WHOLE))
            return plain | {rollout.stable_id: replicas - done, rollout.candidate_id: min(replicas, done + ahead)}
        target = max(weight, rollout.target)
        return plain | {rollout.stable_id: replicas, rollout.candidate_id: max(1, math.ceil(replicas * target / WHOLE))}
    if rollout.state is RolloutState.PROMOTED and now < rollout.kept_until:
        return plain | {rollout.stable_id: replicas}
    return plain


def weight_of(endpoint: Endpoint, version_id: str) -> int:
    """Return the weight of a version's release, 0 where it has none."""
    return next((one.weight for one in endpoint.releases if one.version_id == version_id), 0)


def spares(endpoint: Endpoint) -> frozenset[str]:
    """Return the versions whose replicas come on top of the endpoint's size for a while: a candidate's, and kept
    ones."""
    rollout = endpoint.rollout
    if rollout is None or rollout.kind is RolloutKind.ROLLING:
        return frozenset()
    if rollout.is_open:
        return frozenset({rollout.candidate_id})
    return frozenset({rollout.stable_id}) if rollout.state is RolloutState.PROMOTED else frozenset()


def beside(endpoint: Endpoint) -> frozenset[str]:
    """Return the versions whose replicas never count for the endpoint's size: nobody waits for a shadow's, and a
    fallback's are there whatever the size is."""
    return frozenset(release.version_id for release in endpoint.releases if release.shadow or release.fallback)


def carriers(endpoint: Endpoint) -> frozenset[str]:
    """Return the versions that an endpoint's size is divided among: those with traffic that are no spares."""
    return frozenset(release.version_id for release in endpoint.releases if release.weight) - spares(endpoint)


# --- what people ask for -------------------------------------------------------------


def check_free(endpoint: Endpoint, names: Mapping[str, str]) -> None:
    """Refuse a change of releases beside a rollout.

    Raises:
        NotPossibleError: one is under way.
    """
    rollout = endpoint.rollout
    if rollout is not None and rollout.is_open:
        name = names.get(rollout.candidate_id, rollout.candidate_id)
        raise NotPossibleError(
            f"a rollout of version '{name}' is {rollout.state} at {weight_of(endpoint, rollout.candidate_id)} %; "
            "promote it or roll it back first"
        )


def stable_of(endpoint: Endpoint, names: Mapping[str, str]) -> Release:
    """Return the one release that has all traffic.

    Raises:
        NotPossibleError: several share it.
    """
    weighted = [release for release in endpoint.releases if release.weight]
    if len(weighted) != 1:
        shares = ", ".join(f"'{names.get(one.version_id, one.version_id)}' {one.weight} %" for one in weighted)
        raise NotPossibleError(
            f"a rollout needs one version with all traffic to compare with and go back to; now it is {shares or 'none'}"
        )
    return weighted[0]


def begun(endpoint: Endpoint, rollout: Rollout) -> Endpoint:
    """Return the endpoint with ``rollout`` begun: the candidate is there without traffic, what was kept is let go."""
    kept = endpoint.rollout.stable_id if endpoint.rollout and endpoint.rollout.kept_until else ""
    gone = {kept} - {rollout.stable_id, rollout.candidate_id}
    releases = [one for one in endpoint.releases if one.version_id not in gone | {rollout.candidate_id}]
    return msgspec.structs.replace(
        endpoint, releases=(*releases, Release(rollout.candidate_id, weight=0)), rollout=rollout
    )


def rolling(endpoint: Endpoint, version_id: str, now: float) -> Endpoint:
    """Return the endpoint with a version that takes over from the one that has all traffic, replica by replica."""
    stable = next(release for release in endpoint.releases if release.weight)
    rollout = Rollout(
        stable_id=stable.version_id,
        candidate_id=version_id,
        began_at=now,
        asked_at=now,
        kind=RolloutKind.ROLLING,
        steps=ROLLING_STEPS,
        keep_s=0.0,
    )
    return begun(endpoint, rollout)


def moved_to(endpoint: Endpoint, asked: Rollout, now: float) -> Endpoint:
    """Return the endpoint with its rollout as ``asked``, running, on the way to the first of its steps.

    Raises:
        NotPossibleError: no canary is under way.
    """
    if _open(endpoint).kind is RolloutKind.ROLLING:
        raise NotPossibleError("a rolling change takes over replica by replica; it has no share to set")
    endpoint = msgspec.structs.replace(endpoint, rollout=_running(asked, now))
    # Less traffic needs nothing first; more waits for its replicas.
    is_less = asked.steps[0] < weight_of(endpoint, asked.candidate_id)
    return _reached(endpoint, asked.steps[0], now) if is_less else endpoint


def promoted(endpoint: Endpoint, now: float) -> Endpoint:
    """Return the endpoint with the candidate on its way to all traffic, as somebody asked for: no judge overrules that.

    Raises:
        NotPossibleError: nothing is under way.
    """
    rollout = msgspec.structs.replace(_running(_open(endpoint), now), mode=RolloutMode.MANUAL, steps=(WHOLE,))
    return msgspec.structs.replace(endpoint, rollout=rollout)


def paused(endpoint: Endpoint, reason: str) -> Endpoint:
    """Return the endpoint with its rollout paused.

    Raises:
        NotPossibleError: nothing is under way.
    """
    return msgspec.structs.replace(
        endpoint, rollout=msgspec.structs.replace(_open(endpoint), state=RolloutState.PAUSED, reason=reason)
    )


def resumed(endpoint: Endpoint, now: float) -> Endpoint:
    """Return the endpoint with its rollout running again; the step begins anew.

    Raises:
        NotPossibleError: nothing is under way.
    """
    rollout = _open(endpoint)
    began = now if rollout.step_began_at else 0.0
    rollout = msgspec.structs.replace(rollout, state=RolloutState.RUNNING, reason="", step_began_at=began)
    return msgspec.structs.replace(endpoint, rollout=rollout)


def rolled_back(endpoint: Endpoint, reason: str, now: float) -> Endpoint:
    """Return the endpoint with all traffic on the version that served before; its replicas are there.

    Raises:
        NotPossibleError: there is nothing to go back from, or the version before is not kept any more.
    """
    rollout = endpoint.rollout
    if rollout is None or rollout.state is RolloutState.ROLLED_BACK:
        raise NotPossibleError("there is no rollout to go back from")
    if not any(one.version_id == rollout.stable_id for one in endpoint.releases):
        raise NotPossibleError("the version that served before is not kept any more")
    releases = tuple(
        msgspec.structs.replace(one, weight=WHOLE if one.version_id == rollout.stable_id else 0)
        for one in endpoint.releases
        if one.version_id != rollout.candidate_id
    )
    rollout = msgspec.structs.replace(
        rollout, state=RolloutState.ROLLED_BACK, reason=reason, ended_at=now, kept_until=0.0
    )
    return msgspec.structs.replace(endpoint, releases=releases, rollout=rollout)


def settled(endpoint: Endpoint, named: Collection[str] = ()) -> Endpoint:
    """Return the endpoint without its rollout, which is over, and without what is kept for it unless it is ``named``.

    For changes of shares by hand: there is no one version to go back to any more.
    """
    rollout = endpoint.rollout
    if rollout is None:
        return endpoint
    kept = rollout.stable_id if rollout.kept_until and rollout.stable_id not in named else ""
    releases = tuple(one for one in endpoint.releases if one.version_id != kept or _is_of_use(one))
    return msgspec.structs.replace(endpoint, releases=releases, rollout=None)


# --- what the loop does --------------------------------------------------------------


def advanced(endpoint: Endpoint, ready: Mapping[str, int], replicas: int, now: float) -> Endpoint:
    """Return the endpoint with the traffic that its candidate has the replicas for by now.

    ``ready`` are replicas by version, ``replicas`` is how many the endpoint should have. Also lets go of what was kept
    long enough.
    """
    rollout = endpoint.rollout
    if rollout is None:
        return endpoint
    if not rollout.is_open:
        return _without_kept(endpoint, rollout, now)
    there, weight = ready.get(rollout.candidate_id, 0), weight_of(endpoint, rollout.candidate_id)
    if rollout.state is RolloutState.PAUSED or replicas <= 0 or there == 0:
        return endpoint
    if rollout.kind is RolloutKind.ROLLING:
        target = math.floor(WHOLE * min(there, replicas) / replicas)
    else:
        target = rollout.target if there >= sizes(replicas, endpoint, now).get(rollout.candidate_id, 0) else 0
    return _reached(endpoint, target, now) if target > weight else endpoint


def decided(endpoint: Endpoint, decision: Decision, now: float) -> Endpoint:
    """Return the endpoint after the judge's decision, with the decision remembered."""
    rollout = endpoint.rollout
    assert rollout is not None, "only rollouts are judged"
    weight = weight_of(endpoint, rollout.candidate_id)
    judgement = Judgement(now, weight, str(decision.verdict), decision.reason, dict(decision.data))
    rollout = _remembered(rollout, judgement)
    endpoint = msgspec.structs.replace(endpoint, rollout=rollout)
    if decision.verdict is Verdict.ROLL_BACK:
        return rolled_back(endpoint, decision.reason, now)
    if decision.verdict is Verdict.PROMOTE and not rollout.is_last_step:
        rollout = msgspec.structs.replace(rollout, step=rollout.step + 1, asked_at=now)
        return msgspec.structs.replace(endpoint, rollout=rollout)
    return endpoint


def _is_of_use(release: Release) -> bool:
    return bool(release.weight or release.shadow or release.fallback)


def _running(rollout: Rollout, now: float) -> Rollout:
    return msgspec.structs.replace(rollout, state=RolloutState.RUNNING, reason="", step=0, asked_at=now)


def _open(endpoint: Endpoint) -> Rollout:
    if endpoint.rollout is None or not endpoint.rollout.is_open:
        raise NotPossibleError("no rollout is under way")
    return endpoint.rollout


def _weighed(endpoint: Endpoint, weight: int) -> Endpoint:
    """Return the endpoint with this weight of the candidate, and the rest on the stable version."""
    rollout = endpoint.rollout
    assert rollout is not None, "weights move in a rollout"
    shares = {rollout.candidate_id: weight, rollout.stable_id: WHOLE - weight}
    releases = tuple(
        msgspec.structs.replace(one, weight=shares[one.version_id], shadow=0) if one.version_id in shares else one
        for one in endpoint.releases
    )
    return msgspec.structs.replace(endpoint, releases=releases)


def _reached(endpoint: Endpoint, weight: int, now: float) -> Endpoint:
    endpoint = _weighed(endpoint, weight)
    rollout = endpoint.rollout
    assert rollout is not None, "weights move in a rollout"
    if weight < WHOLE:
        return msgspec.structs.replace(endpoint, rollout=msgspec.structs.replace(rollout, step_began_at=now))
    rollout = msgspec.structs.replace(
        rollout,
        state=RolloutState.PROMOTED,
        reason="the candidate has all traffic",
        step_began_at=now,
        ended_at=now,
        kept_until=now + rollout.keep_s,
    )
    return _without_kept(msgspec.structs.replace(endpoint, rollout=rollout), rollout, now)


def _without_kept(endpoint: Endpoint, rollout: Rollout, now: float) -> Endpoint:
    if rollout.kept_until <= 0 or now < rollout.kept_until:
        return endpoint
    releases = tuple(one for one in endpoint.releases if one.version_id != rollout.stable_id or _is_of_use(one))
    return msgspec.structs.replace(
        endpoint, releases=releases, rollout=msgspec.structs.replace(rollout, kept_until=0.0)
    )


def _remembered(rollout: Rollout, new: Judgement) -> Rollout:
    """Return the rollout with ``new``: as another judgement, or for the last one where only its numbers went on."""
    last = rollout.judgements[-1] if rollout.judgements else None
    is_repeated = last is not None and _kind(last) == _kind(new)
    if is_repeated and last is not None and new.at - last.at < REPEAT_S:
        return rollout
    before = rollout.judgements[:-1] if is_repeated else rollout.judgements
    return msgspec.structs.replace(rollout, judgements=(*before, new)[-JUDGEMENTS_KEPT:])


def _kind(judgement: Judgement) -> tuple[str, int, str]:
    """Return what makes a judgement another one; running numbers do not."""
    words = "".join(letter for letter in judgement.reason if not letter.isdigit())
    return judgement.verdict, judgement.weight, words
