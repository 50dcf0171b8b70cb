"""From the body of a scenario of requests to the world that is run, its traffic and its prices."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from modelyard.domain import autoscale_bounds
from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.domain.facts import ModelFacts
from modelyard.formats import ArtifactInvalidError
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.policy.hardware import KINDS
from modelyard.policy.scaling import divide
from modelyard.sim.fleet.models import MODELS
from modelyard.sim.hardware import PRECISION_NAMES, Place, estimate
from modelyard.sim.requests import Arrival
from modelyard.sim.runs import Price, Variant
from modelyard.sim.scenario_body import EngineBody, ReleaseBody, RequestBody
from modelyard.sim.scenario_file import Fault, ScenarioError
from modelyard.sim.scenario_traffic import arrivals_of, path_of, placed, plans_of
from modelyard.sim.tasks import BLOCK_TOKENS, EngineSpec
from modelyard.sim.traffic import HASH_TOKENS
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec

UNKNOWN_HERE = (
    "node_pool",
    "burst_pool",
    "prewarm",
    "prewarm_s",
    "prewarm_budget",
    "prewarm_cold_cost_s",
)
"""Settings of ``autoscale`` that a world of requests has no use for: it has one endpoint, no nodes and no last week."""


_CONFIG_BYTES_MAX = 16 * 1024 * 1024


def variant_of(name: str, body: RequestBody, folder: Path, *, place: str = "") -> Variant:
    """Return the variant of a body; files that it names are meant from ``folder``.

    ``place`` is where it stands, like ``variant[0].``, for what is found wrong only when requests are made.

    Raises:
        ScenarioError: it cannot be run.
    """
    faults = [*_scaling_faults(body), *_release_faults(body)]
    plans, flaws = plans_of(body, folder)
    faults += flaws
    # What is wrong with a release itself would be told once more.
    releases, prices, flaws = _releases(body, folder) if not faults else ([], {}, [])
    if faults or flaws:
        raise ScenarioError([*faults, *flaws])
    most = min(release.engine.kv_tokens for release in releases)

    def arrivals(seed: int) -> list[Arrival]:
        with placed(place):
            return arrivals_of(plans, seed, most, knows_kv=body.routing.knows_kv)

    return Variant(
        name=name,
        spec=_world(body, releases),
        arrivals=arrivals,
        prices=prices,
        slo_s=body.autoscale.target_ttft_s,
    )


def _world(body: RequestBody, releases: Sequence[ReleaseSpec]) -> WorldSpec:
    gateway, routing = body.gateway, body.routing
    return WorldSpec(
        releases=tuple(releases),
        slots=routing.slots,
        knows_kv=routing.knows_kv,
        uses_prefixes=routing.prefixes,
        gateways=gateway.workers,
        rules=DispatchRules(places=gateway.queue_max, kv_share_max=gateway.kv_share_max),
        queue_wait_s=gateway.queue_wait_s,
        load_wait_s=gateway.load_wait_s,
        scaling=_scaling(body),
        autoscale=body.autoscale,
        load_s=body.engine.load_s,
    )


def _scaling(body: RequestBody) -> Scaling | None:
    """Return the bounds of the size, None where it never changes."""
    hardware, scaling = body.hardware, body.scaling
    most = max(1, hardware.min_replicas) if hardware.max_replicas is None else hardware.max_replicas
    if not scaling.scale_to_zero and most == hardware.min_replicas:
        return None
    return Scaling(
        min_replicas=hardware.min_replicas,
        max_replicas=most,
        scale_to_zero=scaling.scale_to_zero,
        idle_s=scaling.scale_to_zero_after_idle_seconds,
    )


def _scaling_faults(body: RequestBody) -> Iterator[Fault]:
    hardware = body.hardware
    if hardware.min_replicas == 0 and not body.scaling.scale_to_zero:
        yield Fault("hardware.min_replicas", "0 needs scaling.scale_to_zero = true")
    if hardware.max_replicas is not None and hardware.max_replicas < hardware.min_replicas:
        yield Fault("hardware.max_replicas", f"must be {hardware.min_replicas} (min_replicas) or more")
    asked = msgspec.structs.asdict(body.autoscale)
    for name, reason in autoscale_bounds.faults(asked):
        yield Fault(f"autoscale.{name}", reason)
    for name, reason in autoscale_bounds.contradictions(body.autoscale, _scaling(body) or Scaling()):
        yield Fault(f"autoscale.{name}", reason)
    defaults = msgspec.structs.asdict(Autoscale())
    for name in (*UNKNOWN_HERE, "batch_scales"):  # there are no lines of batches in a scenario of requests
        if asked[name] != defaults[name]:
            yield Fault(f"autoscale.{name}", 'changes nothing at this level; leave it out, or try level = "fleet"')


def _release_faults(body: RequestBody) -> Iterator[Fault]:
    for place, release in enumerate(_listed(body)):
        at = f"releases[{place}]." if body.releases else ""
        engine, hardware = release.engine, release.hardware
        if hardware.gpu_type not in KINDS and (engine.speed is None or not engine.kv_tokens):
            known = f"use one of {', '.join(KINDS)}, or give engine.speed and engine.kv_tokens"
            yield Fault(f"{at}hardware.gpu_type", f"nothing is known of '{hardware.gpu_type}'; {known}")
        if release.precision and release.precision not in PRECISION_NAMES:
            yield Fault(f"{at}precision", f"'{release.precision}' is none; use one of {', '.join(PRECISION_NAMES)}")
        if engine.max_num_batched_tokens < engine.max_num_seqs:
            yield Fault(
                f"{at}engine.max_num_batched_tokens",
                f"must be max_num_seqs ({engine.max_num_seqs}) or more: each request needs a token of every iteration",
            )
    if len({release.version for release in body.releases}) < len(body.releases):
        yield Fault("releases", "two have the same version; give each its own")
    if body.releases and not any(release.weight for release in body.releases):
        yield Fault("releases", "none has weight; give one a weight above 0")


def _listed(body: RequestBody) -> list[ReleaseBody]:
    """Return the releases: those of the file, or the one that it is."""
    return body.releases or [
        ReleaseBody(model=body.model, precision=body.precision, hardware=body.hardware, engine=body.engine)
    ]


def _releases(body: RequestBody, folder: Path) -> tuple[list[ReleaseSpec], dict[str, Price], list[Fault]]:
    listed = _listed(body)
    first = divide(body.hardware.min_replicas, {one.version: one.weight for one in listed})
    releases: list[ReleaseSpec] = []
    prices: dict[str, Price] = {}
    faults: list[Fault] = []
    for place, one in enumerate(listed):
        at = f"releases[{place}]." if body.releases else ""
        try:
            engine = _engine(one, folder)
        except ScenarioError as error:
            faults += [Fault(at + fault.param, fault.reason) for fault in error.faults]
            continue
        replicas = first[one.version] if one.replicas is None else one.replicas
        releases.append(ReleaseSpec(engine=engine, version_id=one.version, weight=one.weight, replicas=replicas))
        prices[one.version] = _price(one, body)
    return releases, prices, faults


def _price(release: ReleaseBody, body: RequestBody) -> Price:
    kind = release.hardware.gpu_type
    default = KINDS[kind].price_usd if kind in KINDS else 0.0
    each = body.fleet.accelerator_prices.get(kind, default)
    return Price(release.hardware.gpu_count, each * release.hardware.gpu_count)


def _engine(release: ReleaseBody, folder: Path) -> EngineSpec:
    given, hardware = release.engine, release.hardware
    speed, kv_tokens = None if given.speed is None else _speed(given), given.kv_tokens
    if speed is None or not kv_tokens:
        place = Place(hardware.gpu_type, hardware.gpu_count, hardware.memory_gib)
        facts = _facts(release.model, folder)
        try:
            expected = estimate(facts, release.precision, place)
        except ValueError as error:
            raise ScenarioError([Fault("hardware", str(error))]) from error
        speed, kv_tokens = speed or expected.speed, kv_tokens or expected.kv_tokens
    return EngineSpec(
        speed=Speed(*(number * given.slowdown for number in msgspec.structs.astuple(speed))),
        max_num_seqs=given.max_num_seqs,
        chunk_tokens=given.max_num_batched_tokens,
        kv_blocks=max(1, kv_tokens // BLOCK_TOKENS),
        hash_tokens=HASH_TOKENS if given.enable_prefix_caching else 0,
        ahead=int(given.async_scheduling),
        by_band=given.scheduling_policy == "priority",
    )


def _speed(given: EngineBody) -> Speed:
    assert given.speed is not None, "it was looked at before"
    return Speed(given.speed.step_s, given.speed.request_s, given.speed.prefill_token_s, given.speed.kv_token_s)


def _facts(model: str, folder: Path) -> ModelFacts:
    """Return the shape of a model that writes tokens: one that is known, or a file's.

    Raises:
        ScenarioError: it is neither.
    """
    facts = MODELS[model] if model in MODELS else _facts_of_file(model, folder)
    if not facts.kv_bytes_per_token or not (facts.parameters or facts.weights_bytes):
        lacks = "a size of its KV cache and its weights, as models that write tokens have"
        raise ScenarioError([Fault("model", f"'{model}' does not say {lacks}; use one of {', '.join(_WRITERS)}")])
    return facts


_WRITERS = [name for name, facts in MODELS.items() if facts.kv_bytes_per_token]


def _facts_of_file(model: str, folder: Path) -> ModelFacts:
    try:
        path = path_of(model, folder)
    except ScenarioError as error:
        raise ScenarioError([Fault("model", error.faults[0].reason)]) from error
    if not path.is_file():
        known = ", ".join(_WRITERS)
        raise ScenarioError([Fault("model", f"'{model}' is neither a file nor one of {known}; name a config.json")])
    from modelyard.formats.folder import facts_of
    from modelyard.formats.huggingface import facts_from

    try:
        if path.suffix == ".json":
            if path.stat().st_size > _CONFIG_BYTES_MAX:
                raise ScenarioError([Fault("model", f"{path} has more than {_CONFIG_BYTES_MAX:,} bytes")])
            facts = facts_from({"config.json": path.read_bytes()})
        else:
            facts = facts_of({path.name: path})
    except (ArtifactInvalidError, OSError) as error:
        raise ScenarioError([Fault("model", f"{path} cannot be read: {error}")]) from error
    return facts if facts.name else msgspec.structs.replace(facts, name=path.stem)
