"""What an endpoint is like for a replay, and what is to be tried otherwise."""

from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec

from modelyard.domain import autoscale_bounds, scaling_bounds
from modelyard.domain.endpoints import Autoscale, Scaling
from modelyard.domain.facts import ModelFacts
from modelyard.domain.prices import PriceEntry
from modelyard.policy.dispatch import DispatchRules
from modelyard.policy.engine_model import Speed
from modelyard.policy.fit import advise
from modelyard.policy.hardware import KINDS, Kind, Offer
from modelyard.policy.roofline import Load, pace_of
from modelyard.policy.scaling import divide
from modelyard.sim.comparison import KV_BLOCKS_UNKNOWN
from modelyard.sim.recorded import Terms
from modelyard.sim.recorded_speed import Size
from modelyard.sim.scenario_body import GatewayBody
from modelyard.sim.tasks import BLOCK_TOKENS, EngineSpec
from modelyard.sim.world_spec import ReleaseSpec, WorldSpec
from modelyard.sim.worlds import UNKNOWN_HERE

IDLE_PASS_S = 20.0
"""A replay may be of a week in which little happens."""


class SettingError(ValueError):
    """Why something cannot be tried, in one line."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its share of traffic."""

    version_id: str
    label: str = ""
    weight: int = 100
    speed: Speed
    size: Size
    facts: ModelFacts = ModelFacts()


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint as it is, or as it is to be tried. ``replicas``: how many it has at first.

    ``kind`` ("": not known) and ``accelerators`` are of one replica (0.25: a quarter of one), ``nanousd`` is what a
    whole one of that kind costs in an hour, ``prices`` the same of other kinds.
    """

    name: str
    releases: tuple[Release, ...]
    scaling: Scaling = Scaling()
    autoscale: Autoscale = Autoscale()
    gateway: GatewayBody = GatewayBody()
    replicas: int = 1
    load_s: float = 60.0
    kind: str = ""
    accelerators: float = 1.0
    nanousd: int = 0
    prices: Mapping[str, int] = {}
    terms: Mapping[str, Terms] = {}
    is_sticky: bool = False
    has_prefixes: bool = True
    """Whether engines keep beginnings of prompts; not so where nothing was ever cached."""
    block_tokens: int = BLOCK_TOKENS
    """What a block of a beginning stands for."""

    @property
    def replica_nanousd(self) -> int:
        """What a replica costs in an hour."""
        return round(self.nanousd * self.accelerators)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something to try. ``settings`` are texts by their paths, like ``scaling.max_replicas``.

    ``prices`` are nano-dollars of an accelerator for an hour by kind, ``token_prices`` come before those of the
    platform for what they price, ``traffic`` is how many times as many requests come.
    """

    name: str
    settings: Mapping[str, str] = {}
    hardware: str = ""
    prices: Mapping[str, int] = {}
    token_prices: tuple[PriceEntry, ...] = ()
    traffic: float = 1.0

    @property
    def is_price_only(self) -> bool:
        """Whether nothing else changes than what things cost: then nothing has to be simulated."""
        return not self.settings and not self.hardware and self.traffic == 1.0


def changed(setup: Setup, change: Change) -> Setup:
    """Return ``setup`` with what is to be tried.

    Raises:
        SettingError: it cannot be.
    """
    for path, text in change.settings.items():
        setup = _set(setup, path, text)
    if change.hardware:
        setup = _on(setup, change.hardware)
    if setup.kind in change.prices:
        setup = msgspec.structs.replace(setup, nanousd=change.prices[setup.kind])
    _check_autoscale(setup, change)
    low, high = setup.scaling.min_replicas, setup.scaling.max_replicas
    if low > high:
        raise SettingError(f"scaling.min_replicas={low} is above scaling.max_replicas={high}: set both.")
    if any(_ALSO.get(path, path).startswith("scaling.") for path in change.settings):
        for name, reason in scaling_bounds.faults(setup.scaling):
            raise SettingError(f"scaling.{name} {reason}.")
    # Bounds that had always been so would have been met before the first request.
    at_first = min(max(setup.replicas, setup.scaling.floor), max(high, 1))
    return msgspec.structs.replace(setup, replicas=at_first)


def world_of(setup: Setup) -> WorldSpec:
    """Return the world of an endpoint."""
    shares = divide(setup.replicas, {one.version_id: one.weight for one in setup.releases})
    gateway = setup.gateway
    return WorldSpec(
        releases=tuple(
            ReleaseSpec(
                engine=_engine(one, setup.block_tokens if setup.has_prefixes else 0),
                version_id=one.version_id,
                weight=one.weight,
                replicas=shares[one.version_id],
            )
            for one in setup.releases
        ),
        knows_kv=all(one.size.kv_tokens for one in setup.releases),
        uses_prefixes=setup.has_prefixes,
        gateways=gateway.workers,
        rules=DispatchRules(places=gateway.queue_max, kv_share_max=gateway.kv_share_max),
        queue_wait_s=gateway.queue_wait_s,
        load_wait_s=gateway.load_wait_s,
        scaling=setup.scaling,
        autoscale=setup.autoscale,
        load_s=setup.load_s,
        idle_pass_s=IDLE_PASS_S,
    )


def _engine(release: Release, hash_tokens: int) -> EngineSpec:
    size = release.size
    return EngineSpec(
        speed=release.speed,
        max_num_seqs=size.slots,
        chunk_tokens=max(size.chunk_tokens, size.slots),
        kv_blocks=size.kv_tokens // BLOCK_TOKENS or KV_BLOCKS_UNKNOWN,
        hash_tokens=hash_tokens,
    )


# --- settings by their paths ---------------------------------------------------------------


_PARTS: Mapping[str, type[msgspec.Struct]] = {"scaling": Scaling, "autoscale": Autoscale, "gateway": GatewayBody}


_ALSO: Mapping[str, str] = {
    "hardware.min_replicas": "scaling.min_replicas",
    "hardware.max_replicas": "scaling.max_replicas",
    "scaling.scale_to_zero_after_idle_seconds": "scaling.idle_s",
    "engine.max_num_seqs": "engine.slots",
    "engine.max_num_batched_tokens": "engine.chunk_tokens",
    "engine.load_s": "load_s",
}
"""What a deployment's file, and a scenario's, calls otherwise."""


def _set(setup: Setup, path: str, text: str) -> Setup:
    path = _ALSO.get(path, path)
    part, _, name = path.partition(".")
    if part in _PARTS:
        value = _read(_PARTS[part], path, name, text)
        return msgspec.structs.replace(setup, **{part: msgspec.structs.replace(getattr(setup, part), **value)})
    if part == "engine":
        value = _read(Size, path, name, text)
        releases = tuple(
            msgspec.structs.replace(one, size=msgspec.structs.replace(one.size, **value)) for one in setup.releases
        )
        return msgspec.structs.replace(setup, releases=releases)
    if path == "load_s":
        return msgspec.structs.replace(setup, load_s=_number(path, text))
    raise SettingError(f"'{path}' cannot be set; there are scaling.*, autoscale.*, gateway.*, engine.* and load_s.")


def _read(kind: type[msgspec.Struct], path: str, name: str, text: str) -> dict[str, Any]:
    if name not in kind.__struct_fields__:
        part = path.partition(".")[0]
        raise SettingError(f"there is no '{path}'; {part} has {', '.join(kind.__struct_fields__)}.")
    try:
        read = msgspec.convert({name: None if text == "none" else text}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingError(f"{path}={text}: {str(error).partition(' - at')[0]}.") from error
    value = getattr(read, name)
    if isinstance(value, int | float) and not 0 <= value < inf:
        raise SettingError(f"{path}={text}: it must be a number from 0 on.")
    return {name: value}


def _number(path: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise SettingError(f"{path}={text}: it must be a number from 0 on.")
    return number


def _check_autoscale(setup: Setup, change: Change) -> None:
    """Refuse what the API would refuse, and what would change nothing here.

    Raises:
        SettingError: a setting of ``autoscale`` cannot be.
    """
    own = {path.partition(".")[2] for path in change.settings if path.startswith("autoscale.")}
    if useless := sorted(own & set(UNKNOWN_HERE)):
        raise SettingError(f"autoscale.{useless[0]} changes nothing in a replay: it knows no nodes and no forecast.")
    if own:
        asked = msgspec.structs.asdict(setup.autoscale)
        reasons = [*autoscale_bounds.faults(asked), *autoscale_bounds.contradictions(setup.autoscale, setup.scaling)]
        if reasons:
            name, reason = reasons[0]
            raise SettingError(f"autoscale.{name} {reason}.")


# --- other hardware ------------------------------------------------------------------------


def _on(setup: Setup, name: str) -> Setup:
    """Return ``setup`` on as many accelerators of another kind."""
    if name not in KINDS:
        raise SettingError(f"nothing is known of '{name}'; known: {', '.join(sorted(KINDS))}.")
    if setup.kind not in KINDS:
        raise SettingError(f"on what {setup.name} runs now is not known ('{setup.kind}'): say it with --runs-on.")
    old, new = KINDS[setup.kind], KINDS[name]
    if not new.memory_gib:
        raise SettingError(f"what fits a '{new.name}', and what an hour of it costs, is not known: try accelerators.")
    count = max(1, round(setup.accelerators))
    accelerators = float(count)
    if setup.accelerators < 1 and old.memory_gib:
        # What shares one accelerator is of the same bytes on another.
        accelerators = setup.accelerators * old.memory_gib / new.memory_gib
        if accelerators > 1:
            needed = f"{setup.accelerators * old.memory_gib:.3g} of {new.memory_gib} GiB"
            raise SettingError(f"{setup.name} does not fit 1 x {new.name}: it has {needed}.")
    releases = tuple(_release_on(one, old, new, count) for one in setup.releases)
    price = setup.prices.get(name, round(new.price_usd * 1e9))
    return msgspec.structs.replace(setup, releases=releases, kind=name, accelerators=accelerators, nanousd=price)


def _release_on(release: Release, old: Kind, new: Kind, count: int) -> Release:
    facts, size = release.facts, release.size
    speed = _moved(release.speed, facts, old, new, count)
    if not facts.weights_bytes or not facts.kv_bytes_per_token or not size.kv_tokens:
        return msgspec.structs.replace(release, speed=speed)
    offer = Offer(new, new.memory_bytes, count, 0)
    rows = [row for row in advise(facts, [offer], Load(1, 1024, 1024), is_fixed=True).rows if row.count == count]
    if rows and not rows[0].fits:
        raise SettingError(f"{release.label or release.version_id} does not fit {count} x {new.name}: {rows[0].note}.")
    kv_tokens = rows[0].kv_tokens_max if rows else size.kv_tokens
    return msgspec.structs.replace(release, speed=speed, size=msgspec.structs.replace(size, kv_tokens=kv_tokens))


def _moved(speed: Speed, facts: ModelFacts, old: Kind, new: Kind, count: int) -> Speed:
    """Return a speed that was seen on one kind as the roofline expects it on another.

    What waits for memory (the step, tokens held) goes by the bandwidth that is reached, what computes (requests,
    prompts) by the arithmetic.
    """
    before, after = pace_of(facts, None, old, count), pace_of(facts, None, new, count)
    memory, compute = before.bytes_s / after.bytes_s, before.operations_s / after.operations_s
    return Speed(
        speed.step_s * memory, speed.request_s * compute, speed.prefill_token_s * compute, speed.kv_token_s * memory
    )
