"""From the tables of traffic in a scenario to the requests that come: what is drawn, and what a file has."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from modelyard.domain.lengths import Lengths, lengths_of
from modelyard.domain.tenants import Plan
from modelyard.policy.job import BANDS
from modelyard.sim import arrival_files
from modelyard.sim.requests import Arrival
from modelyard.sim.scenario_body import RequestBody, TrafficBody
from modelyard.sim.scenario_file import Fault, ScenarioError
from modelyard.sim.tasks import BLOCK_TOKENS
from modelyard.sim.traffic import REQUESTS_MAX, SPAN_MAX_S, Traffic, requests_of

_MINUTES = 10.0
_LESS = f"{REQUESTS_MAX:,} at most, so take fewer minutes or a lower rate"
R = TypeVar("R")


class Planned(NamedTuple):
    """Requests of one table of ``traffic``, whose keys begin with ``at``; those of ``file`` where it is not None."""

    at: str
    body: TrafficBody
    traffic: Traffic
    file: Path | None


def plans_of(body: RequestBody, folder: Path) -> tuple[list[Planned], list[Fault]]:
    """Return what comes by table, and what is wrong with it; files are meant from ``folder``."""
    listed = body.traffic or [TrafficBody()]
    plans: list[Planned] = []
    faults: list[Fault] = []
    for place, one in enumerate(listed):
        at = f"traffic[{place}]." if len(listed) > 1 else "traffic."
        try:
            file = path_of(one.file, folder) if one.file else None
            if file is not None:
                _readable(file, arrival_files.check)
            plans.append(Planned(at, one, _traffic(one, place), file))
        except ScenarioError as error:
            faults += [Fault(at + fault.param, fault.reason) for fault in error.faults]
    made = sum(one.traffic.rate * one.traffic.seconds for one in plans if one.file is None)
    if made > REQUESTS_MAX:
        faults.append(Fault(f"{plans[0].at}rate", f"comes to {made:,.0f} requests; {_LESS}"))
    return plans, faults


def path_of(name: str, folder: Path) -> Path:
    """Return a file that a scenario names.

    Raises:
        ScenarioError: it is in the folder of a user whom nobody knows.
    """
    try:
        return folder / Path(name).expanduser()
    except RuntimeError as error:
        raise ScenarioError([Fault("file", f"'{name}' is in the folder of a user who does not exist")]) from error


def _readable(file: Path, read: Callable[[Path], R]) -> R:
    """Return what ``read`` makes of a file of requests.

    Raises:
        ScenarioError: it can make nothing of it.
    """
    try:
        return read(file)
    except OSError as error:
        raise ScenarioError([Fault("file", f"{file} cannot be read: {error.strerror}")]) from error
    except ValueError as error:
        raise ScenarioError([Fault("file", str(error))]) from error


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Let names of what is wrong begin with ``place``."""
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError([Fault(place + fault.param, fault.reason) for fault in error.faults]) from error


def _traffic(body: TrafficBody, place: int) -> Traffic:
    faults: list[Fault] = []

    def lengths(name: str, text: str) -> Lengths:
        try:
            return lengths_of(text)
        except ValueError as error:
            faults.append(Fault(name, str(error)))
            return Lengths("constant", 1)

    minutes = body.minutes or _MINUTES
    if body.begin_minutes * 60 + minutes * 60 > SPAN_MAX_S:
        faults.append(Fault("begin_minutes", f"ends after minute {SPAN_MAX_S / 60:,.0f}; begin earlier"))
    found = Traffic(
        pattern=body.arrivals,
        rate=body.rate,
        begin_s=body.begin_minutes * 60,
        seconds=minutes * 60,
        burstiness=body.burstiness,
        peak=body.peak,
        period_s=body.period_hours * 3600,
        tenant_id=body.tenant or ("tenant" if not place else f"tenant-{place + 1}"),
        weight=body.weight,
        band=BANDS.index(Plan(body.plan)),
        input_tokens=lengths("input_tokens", body.input_tokens),
        output_tokens=lengths("output_tokens", body.output_tokens),
        output_max=body.max_tokens,
        shared_prefix_tokens=body.shared_prefix_tokens,
        shared_prefixes=body.shared_prefixes,
        turns=body.turns,
        think_s=body.think_s,
    )
    if faults:
        raise ScenarioError(faults)
    return found


def arrivals_of(plans: Sequence[Planned], seed: int, kv_tokens: int, *, knows_kv: bool) -> list[Arrival]:
    """Return the requests of a seed, in order.

    Raises:
        ScenarioError: a file cannot be read, there are too many or none, or a prompt can never be taken.
    """
    chance = random.Random(seed)
    found: list[Arrival] = []
    files: dict[Path, int] = {}
    for plan in plans:
        own = random.Random(chance.random())
        if plan.file is None:
            found += requests_of(plan.traffic, own)
        else:
            # Two files name different prompts by the same number.
            first_hash = files.setdefault(plan.file, len(files)) << 64
            with placed(plan.at):
                found += _of_file(plan, own, first_hash)
        _check_size(plan, found)
    found.sort(key=lambda one: one.at_s)
    if not found:
        at = plans[0].at
        nothing = "no request comes in this time; take more minutes or a higher rate"
        raise ScenarioError([Fault(f"{at}rate" if plans[0].file is None else f"{at}minutes", nothing)])
    longest = max(one.prompt_tokens for one in found)
    if longest >= kv_tokens and not knows_kv:
        reason = (
            f"a prompt has {longest:,} tokens and the KV cache {kv_tokens:,}: without knows_kv it blocks its engine"
        )
        raise ScenarioError([Fault("routing.knows_kv", reason)])
    # An engine ends an answer where its cache does.
    return [_fitting(one, kv_tokens) for one in found]


def _check_size(plan: Planned, found: Sequence[Arrival]) -> None:
    """Refuse what would take weeks, or all memory.

    Raises:
        ScenarioError: there is too much of it.
    """
    if len(found) > REQUESTS_MAX:
        raise ScenarioError([Fault(f"{plan.at}rate", f"comes to {len(found):,} requests; {_LESS}")])
    last_s = found[-1].at_s if found else 0.0
    if last_s <= SPAN_MAX_S:
        return
    days = f"spans {last_s / 86_400:,.0f} days, more than {SPAN_MAX_S / 86_400:.0f}"
    if plan.file is None:
        raise ScenarioError([Fault(f"{plan.at}think_s", f"{days}: take shorter pauses, or fewer turns")])
    hint = "take the beginning (minutes = 600), or speedup = 1000 where its times are milliseconds"
    raise ScenarioError([Fault(f"{plan.at}file", f"{plan.file} {days}: {hint}")])


def _fitting(arrival: Arrival, kv_tokens: int) -> Arrival:
    """Return a request whose answer ends where the cache does; one whose prompt leaves no room for it cannot be."""
    prompt = arrival.prompt_tokens
    if prompt >= kv_tokens:
        # A prompt that just fits is let in by its size, and there would be no place for its first token.
        return msgspec.structs.replace(arrival, prompt_tokens=max(prompt, kv_tokens + 1))
    room = max(1, kv_tokens - prompt - BLOCK_TOKENS)
    if arrival.output_tokens <= room:
        return arrival
    return msgspec.structs.replace(arrival, output_tokens=room)


def _of_file(plan: Planned, chance: random.Random, first_hash: int) -> list[Arrival]:
    body, traffic = plan.body, plan.traffic
    assert plan.file is not None, "it has no file"
    found = _readable(
        plan.file,
        lambda file: arrival_files.read(
            file, traffic, chance, speedup=body.speedup, most=body.requests, first_hash=first_hash
        ),
    )
    until_s = inf if body.minutes is None else traffic.begin_s + traffic.seconds
    found = [one for one in found if one.at_s < until_s]
    return [msgspec.structs.replace(one, tenant_id=body.tenant) for one in found] if body.tenant else found
