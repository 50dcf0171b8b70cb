"""From the body of a scenario of a fleet to runs of it, in the form that all results have."""

import random
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile, ZipFile

import msgspec

from modelyard.domain import autoscale_bounds
from modelyard.domain.endpoints import Scaling
from modelyard.policy.hardware import CPU, KINDS
from modelyard.sim.examples import RATES
from modelyard.sim.fleet import Scenario, simulate
from modelyard.sim.fleet.models import NoRoomError
from modelyard.sim.fleet.scenario import NODES, Nodes, Traffic
from modelyard.sim.rates import RATES_FILE, Client, servegen
from modelyard.sim.results import Figure, Ran, Results, Tried, present
from modelyard.sim.runs import Progress
from modelyard.sim.scenario_body import FleetScenarioBody
from modelyard.sim.scenario_file import Fault, ScenarioError

if TYPE_CHECKING:
    from modelyard.sim.fleet.tally import Outcome

FIGURES = (
    Figure("requests_s", "Requests", "rate"),
    Figure("gpu_hours", "Accelerator hours", "hours", "less"),
    Figure("batch_gpu_hours", "Accelerator hours, batches' own", "hours", "less"),
    Figure("dedicated_gpu_hours", "Hours of one replica each", "hours"),
    Figure("gpus_most", "Accelerators, most", "count", "less"),
    Figure("online_busy", "Busy with requests", "share", "more"),
    Figure("total_busy", "Busy, with batches", "share", "more"),
    Figure("usd_per_hour", "Cost an hour", "usd", "less"),
    Figure("usd_per_million", "Cost of 1M requests", "usd", "less"),
    Figure("ttft_p50_s", "First token p50, warm", "s", "less"),
    Figure("ttft_p99_s", "First token p99, warm", "s", "less"),
    Figure("late", "Waited for more than 5 s", "share", "less"),
    Figure("dropped", "Turned away", "share", "less"),
    Figure("available", "Answered", "share", "more"),
    Figure("activations", "Cold starts", "count", "less"),
    Figure("starts", "Replicas started", "count", "less"),
    Figure("no_room", "Starts without room", "count", "less"),
    Figure("evicted", "Replicas evicted", "count", "less"),
    Figure("batch_done", "Batch lines done on idle replicas", "share", "more"),
    Figure("lost_nodes", "Nodes failed", "count"),
    Figure("reclaimed", "Spot nodes taken back", "count"),
)


_MOST = 1e18
_BYTES_S_LEAST = 1_000_000
"""Slower ones load for weeks, all of which pre-warming looks at."""
_DAYS = 14
"""Of ServeGen's rates."""
_RATES_BYTES_MAX = 256 * 1024 * 1024
"""ServeGen's own are seven megabytes."""


class FleetVariant(msgspec.Struct, frozen=True):
    """A fleet to try."""

    name: str
    scenario: Scenario


def variant_of(name: str, body: FleetScenarioBody) -> FleetVariant:
    """Return the variant of a body.

    Raises:
        ScenarioError: it cannot be run.
    """
    faults = list(_faults(body))
    if faults:
        raise ScenarioError(faults)
    traffic, endpoints = body.traffic, body.traffic.endpoints
    share = endpoints / Traffic().endpoints
    scenario = Scenario(
        name=name,
        nodes=_nodes(body, share),
        traffic=Traffic(
            endpoints=endpoints,
            # Of so many endpoints as a whole fleet has.
            rate=traffic.rate / share if traffic.rate is not None else Traffic().rate,
            bases=traffic.bases or max(4, round(Traffic().bases * share)),
            **{name: getattr(traffic, name) for name in _AS_IT_IS},
        ),
        measures=body.measures,
        rules=body.autoscale,
        faults=body.faults,
        loading=body.loading,
        idle_s=body.scaling.scale_to_zero_after_idle_seconds,
        replicas_most=body.hardware.max_replicas,
        start_day=body.start_day,
        hours=body.hours,
        tick_s=body.tick_s,
        warmup_s=body.warmup_s,
        gateways=body.gateway.workers,
        queue_most=body.gateway.queue_max,
        queue_wait_s=body.gateway.queue_wait_s,
        load_wait_s=body.gateway.load_wait_s,
    )
    return FleetVariant(name, scenario)


_AS_IT_IS = ("share_pooled", "share_small", "share_exact", "spread", "burst_most", "batch_share")


def _nodes(body: FleetScenarioBody, share: float) -> tuple[Nodes, ...]:
    prices = body.fleet.accelerator_prices
    given = [Nodes(**msgspec.structs.asdict(one)) for one in body.nodes] or [
        msgspec.structs.replace(one, count=max(4, round(one.count * share))) for one in NODES
    ]
    return tuple(msgspec.structs.replace(one, price_usd=prices.get(one.kind)) for one in given)


def _faults(body: FleetScenarioBody) -> Iterator[Fault]:
    for place, nodes in enumerate(body.nodes):
        if nodes.kind not in KINDS or nodes.kind == CPU:
            known = ", ".join(kind for kind in KINDS if kind != CPU)
            yield Fault(f"nodes[{place}].kind", f"nothing is known of '{nodes.kind}'; use one of {known}")
    if body.traffic.share_pooled + body.traffic.share_small > 1:
        yield Fault("traffic.share_small", "and share_pooled are more than all endpoints together; give less of one")
    if body.start_day + body.hours / 24 > _DAYS:
        yield Fault("hours", f"ends after day {_DAYS} of the rates; begin earlier (start_day), or take fewer")
    if body.warmup_s >= body.start_day * 86_400:
        yield Fault("warmup_s", "begins before the rates do; take less, or a later start_day")
    for name, table in (("faults", body.faults), ("loading", body.loading), ("measures", body.measures)):
        yield from _below(name, msgspec.structs.asdict(table))
    sizes = Scaling(scale_to_zero=body.measures.scale_to_zero)
    for key, reason in (
        *autoscale_bounds.faults(msgspec.structs.asdict(body.autoscale)),
        *autoscale_bounds.contradictions(body.autoscale, sizes),
    ):
        yield Fault(f"autoscale.{key}", reason)


def _below(name: str, values: Mapping[str, float]) -> Iterator[Fault]:
    for key, value in values.items():
        # Compared as it is: an integer of a file may be too large for a float.
        if not 0 <= value <= _MOST:
            yield Fault(f"{name}.{key}", f"must be 0 or more, {_MOST:.0e} at most")
        elif value < _BYTES_S_LEAST and key in ("remote", "disk", "memory"):
            yield Fault(f"{name}.{key}", f"must be {_BYTES_S_LEAST:,} or more: bytes a second")
        elif not value and key == "static_batch":
            yield Fault(f"{name}.{key}", "must be 1 or more: requests of a batch")


def rates_of(body: FleetScenarioBody, folder: Path) -> Sequence[Client]:
    """Return the rates that a body names, or those that come with the package.

    Raises:
        ScenarioError: they cannot be read.
    """
    path = RATES
    try:
        if body.traces:
            path = folder / Path(body.traces).expanduser()
            _check_size(path / RATES_FILE)
        return servegen(path)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    # What a file that is another may be to readers of zips, of numpy's heads and of numbers.
    except (
        ValueError,
        LookupError,
        TypeError,
        SyntaxError,
        RuntimeError,
        BadZipFile,
        struct.error,
        zlib.error,
    ) as error:
        raise _unreadable(path, f"it is not what it should be: {error}") from error


def _check_size(file: Path) -> None:
    with ZipFile(file) as archive:
        if sum(one.file_size for one in archive.infolist()) > _RATES_BYTES_MAX:
            raise ValueError(f"it unpacks to more than {_RATES_BYTES_MAX:,} bytes")


def _unreadable(path: Path, why: str) -> ScenarioError:
    reason = f"{path / RATES_FILE} cannot be read ({why}); leave it out, or save ServeGen's rates there"
    return ScenarioError([Fault("traces", reason)])


def run_all(
    variants: Sequence[FleetVariant],
    clients: Sequence[Client],
    seeds: Sequence[int],
    *,
    title: str = "",
    progress: Progress | None = None,
) -> Results:
    """Run every variant with every seed; equal arguments give equal results.

    Raises:
        ImportError: numpy is not installed.
    """
    tried = tuple(Tried(one.name, tuple(_run(one, clients, seed, progress) for seed in seeds)) for one in variants)
    figures = present(FIGURES, [run.figures for one in tried for run in one.runs])
    return Results(title, "fleet", figures, tried)


def _run(variant: FleetVariant, clients: Sequence[Client], seed: int, progress: Progress | None) -> Ran:
    scenario = variant.scenario
    whole = scenario.hours + scenario.warmup_s / 3600

    def tell(hours: float) -> None:
        if progress is not None:
            progress(variant.name, seed, min(1.0, hours / whole))

    try:
        outcome = simulate(scenario, clients, random.Random(seed), watch=tell)
    except NoRoomError as error:
        raise ScenarioError([Fault("nodes", f"of '{variant.name}', {error}")]) from error
    return Ran(seed, _figures(outcome), {name: list(column) for name, column in outcome.series.items()})


def _figures(outcome: "Outcome") -> dict[str, float]:
    hours = max(outcome.hours, 1e-9)
    names = ({figure.key for figure in FIGURES} - {"batch_done"}) & {*outcome.__struct_fields__, "gpu_hours"}
    found = {name: max(0.0, float(getattr(outcome, name))) for name in names}  # sums of differences round
    # What batches have of their own is charged at what the others cost.
    usd = outcome.usd * outcome.gpu_hours / max(outcome.online_gpu_hours, 1e-9)
    found |= {
        "requests_s": outcome.requests / hours / 3600,
        "available": outcome.availability,
        "usd_per_hour": usd / hours,
        "usd_per_million": usd / max(outcome.requests, 1.0) * 1e6,
    }
    if outcome.batch_requests:
        found["batch_done"] = outcome.batch_done / outcome.batch_requests
    return found
