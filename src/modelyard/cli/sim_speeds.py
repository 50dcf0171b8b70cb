"""How fast the engines of a replay are, from the best that is known of them, and what that is, in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from modelyard.cli.sim_ledger import Case, Part, replicas_at_first
from modelyard.domain.endpoints import Scaling, Sticky
from modelyard.domain.facts import ModelFacts
from modelyard.policy.engine_model import Speed
from modelyard.sim.recorded import Asked, block_tokens_of
from modelyard.sim.recorded_speed import REQUESTS_MIN, judge, learn
from modelyard.sim.replay import FAR
from modelyard.sim.replay_setup import Release, SettingError, Setup

if TYPE_CHECKING:
    from modelyard.domain.catalog import ModelVersion


def setup_of(case: Case) -> tuple[Setup, list[str]]:
    """Return the endpoint of a case as it is, and what has to be known of its engines' speeds.

    Raises:
        SettingError: nothing is known of them.
    """
    if not case.parts:
        if case.endpoint is None:
            raise SettingError(
                f"{case.name} was removed, and its settings with it: try prices, or its rows alone (--usage FILE)."
            )
        raise SettingError(f"{case.name} has no engine of ours to simulate.")
    requests = case.ledger.requests
    releases, notes = [], []
    for part in case.parts:
        speed, told = _speed(part, case, requests)
        release = Release(
            version_id=part.version_id,
            label=part.label,
            weight=part.weight,
            speed=speed,
            size=part.size,
            facts=part.version.facts if part.version else ModelFacts(),
        )
        releases.append(release)
        notes.append(told)
    replicas = replicas_at_first(case)
    endpoint = case.endpoint
    setup = Setup(
        name=case.name,
        releases=tuple(releases),
        # A file says nothing of its endpoint's settings: as many replicas as there were, always.
        scaling=endpoint.scaling if endpoint else Scaling(min_replicas=replicas, max_replicas=replicas),
        gateway=case.gateway,
        replicas=replicas,
        load_s=case.load_s,
        kind=case.kind,
        accelerators=case.accelerators,
        nanousd=case.nanousd,
        prices=case.prices,
        terms=case.terms,
        has_prefixes=any(one.cached_tokens for one in requests),
        block_tokens=block_tokens_of(requests),
    )
    if endpoint is not None:
        setup = msgspec.structs.replace(
            setup, autoscale=endpoint.autoscale, is_sticky=endpoint.serving.sticky is not Sticky.NONE
        )
    return setup, notes


def _speed(part: Part, case: Case, requests: Sequence[Asked]) -> tuple[Speed, str]:
    """Return the speed of a version, and where it is from: measured, else learned from the ledger, else expected."""
    name = part.label or "its engine"
    own = [one for one in requests if one.version_id == part.version_id]
    own = own if len(own) >= REQUESTS_MIN else list(requests)
    ready = {one.replica_id: one.ready_at for one in case.ledger.lives or () if one.ready_at is not None}
    measured = judge(part.fitted, own, part.size, ready=ready) if part.fitted is not None else None
    if part.fitted is not None and (measured is None or measured.judged.worst <= FAR):
        seen = f", within {measured.judged.worst:.0%} on {measured.requests} requests of the ledger" if measured else ""
        return part.fitted, f"Speed of {name}: as the controller measured it while it ran{seen}: {_text(part.fitted)}."
    learned = learn(own, part.size, ready=ready)
    if learned is not None and measured is not None and measured.judged.worst <= learned.judged.worst:
        return measured.speed, (
            f"Speed of {name}: as the controller measured it while it ran, {measured.judged.worst:.0%} off on "
            f"{measured.requests} requests of the ledger: {_text(measured.speed)}."
        )
    if learned is not None:
        other = f" (What the controller measured is {measured.judged.worst:.0%} off.)" if measured else ""
        return learned.speed, (
            f"Speed of {name}: learned from {learned.requests} requests of the ledger, within "
            f"{learned.judged.worst:.0%} on the half that it was not learned from: {_text(learned.speed)}.{other}"
        )
    if part.version is not None and (found := _roofline(part.version, case)) is not None:
        return found, f"Speed of {name}: by the data sheet of {case.kind}, not measured: {_text(found)}."
    raise SettingError(
        f"{case.name}: fewer than {REQUESTS_MIN} requests wrote tokens and ended well, and nothing says how fast "
        f"{name} is on {case.kind or 'its hardware'}. Replay a longer time."
    )


def _roofline(version: "ModelVersion", case: Case) -> Speed | None:
    """Return what data sheets say, None where the model or the hardware is not known."""
    from modelyard.policy.hardware import GIB, KINDS
    from modelyard.sim.hardware import Place, estimate

    facts, kind = version.facts, KINDS.get(case.kind)
    if kind is None or not (facts.parameters or facts.weights_bytes):
        return None
    count = max(1, round(case.accelerators))
    # It runs there, so that it fits: of a CPU's memory nothing is known.
    room = 0.0 if kind.memory_gib else 2 * (facts.weights_bytes or 2 * facts.parameters) / GIB + 1
    try:
        return estimate(facts, "", Place(case.kind, count, room)).speed
    except ValueError:
        return None


def _text(speed: Speed) -> str:
    """Return the four numbers."""
    return (
        f"{speed.step_s * 1000:.3g} ms a step + {speed.request_s * 1000:.3g} ms a request + "
        f"{speed.prefill_token_s * 1e6:.3g} µs a prompt token + {speed.kv_token_s * 1e9:.3g} ns a token held"
    )
