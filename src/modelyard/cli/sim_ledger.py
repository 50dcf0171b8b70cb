"""What ``modelyard sim --replay`` reads of a database: the ledger, and endpoints' settings."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import close_names
from modelyard.config import Config, DataDirectory
from modelyard.sim.recorded import Asked, Stretch, Terms, asked_of
from modelyard.sim.recorded_speed import Size
from modelyard.sim.replay import Ledger
from modelyard.sim.replay_money import PriceList
from modelyard.sim.scenario_body import GatewayBody

if TYPE_CHECKING:
    from modelyard.compose import Readable
    from modelyard.domain.books import ReplicaLife
    from modelyard.domain.catalog import ModelVersion
    from modelyard.domain.endpoints import Endpoint
    from modelyard.engines import Engines, Settings
    from modelyard.policy.engine_model import Speed

CHUNK_TOKENS = 2048
"""vLLM's token budget of an iteration, for an engine that says nothing of its own."""

LOAD_S = 60.0
"""From the start of a replica until it serves, where nothing says how long that takes."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A version that answers a part of an endpoint's requests, as its engine has it; 0 and None are not known."""

    version: "ModelVersion | None" = None
    version_id: str = ""
    label: str = ""
    weight: int = 100
    size: Size
    fitted: "Speed | None" = None
    """What the controller measured while it ran."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One world to replay: a host with its guests, or an endpoint alone. ``endpoint`` is None where only rows are."""

    name: str
    ledger: Ledger
    parts: tuple[Part, ...]
    endpoint: "Endpoint | None" = None
    load_s: float = LOAD_S
    gateway: GatewayBody = GatewayBody()
    kind: str = ""
    """Of its accelerators; "": not known."""
    accelerators: float = 1.0
    nanousd: int = 0
    """Of one whole accelerator, an hour."""
    prices: Mapping[str, int] = {}
    terms: Mapping[str, Terms] = {}
    notes: tuple[str, ...] = ()


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be read: endpoints by name or id (none: all), the stretches, and how many requests at most."""

    names: tuple[str, ...]
    replayed: tuple[Stretch, ...]
    limit: int
    kind: str = ""
    """On what it runs, as whoever asks says: comes before what is recorded."""
    accelerators: float = 1.0

    def over(self) -> Failure:
        """Return why so many are not read."""
        return Failure(
            f"There are more than {self.limit:,} requests. Replay a shorter time (--from, --to), single endpoints "
            "(--endpoint), a part of each hour (--sample 10%), or more at once (--limit).",
            Exit.USAGE,
        )


# --- the database ------------------------------------------------------------------------


async def read_stores(config: Config, data: DataDirectory, wanted: Wanted) -> list[Case]:
    """Return the worlds of the database's ledger."""
    from modelyard import compose

    async with compose.reading(config, data) as stores:
        endpoints = {one.id: one for one in await stores.control.endpoints()}
        worlds = _worlds(endpoints, wanted.names)
        groups = await _grouped(stores, wanted, worlds if wanted.names else None, endpoints)
        return await _cases(stores, config, wanted, endpoints, groups)


def _worlds(endpoints: Mapping[str, "Endpoint"], names: Sequence[str]) -> set[str]:
    """Return the ids of the endpoints whose replicas serve those that are named."""
    found = set()
    for name in names:
        named = [one for one in endpoints.values() if name in (one.name, one.id)]
        if not named:
            known = close_names(name, [one.name for one in endpoints.values()])
            raise Failure(f"There is no endpoint '{name}'. {known}", Exit.NOT_FOUND)
        found |= {_host(one, endpoints) for one in named}
    return found


def _host(endpoint: "Endpoint", endpoints: Mapping[str, "Endpoint"]) -> str:
    return endpoint.host_id if endpoint.host_id in endpoints else endpoint.id


async def _grouped(
    stores: "Readable", wanted: Wanted, worlds: set[str] | None, endpoints: Mapping[str, "Endpoint"]
) -> dict[str, list[Asked]]:
    """Return rows by world, oldest first; ``worlds`` None: all."""
    from modelyard.domain.usage import EVERYTHING, UsageFilter
    from modelyard.metering.reading import stored_rows

    hosts = {one.id: _host(one, endpoints) for one in endpoints.values()}
    where = EVERYTHING
    if worlds is not None:
        where = UsageFilter(endpoint_ids=tuple(id for id, host in hosts.items() if host in worlds))
    spans = [(one.since, one.until) for one in wanted.replayed]
    groups: dict[str, list[Asked]] = {}
    number = 0
    async for page in stored_rows(stores.usage, where, spans):
        number += len(page)
        if number > wanted.limit:
            raise wanted.over()
        for row in page:
            groups.setdefault(hosts.get(row.endpoint_id, row.endpoint_id), []).append(asked_of(row))
    return groups


async def _cases(
    stores: "Readable",
    config: Config,
    wanted: Wanted,
    endpoints: Mapping[str, "Endpoint"],
    groups: Mapping[str, Sequence[Asked]],
) -> list[Case]:
    from modelyard.metering.prices import configured, micro_of, nano_of
    from modelyard.policy.job import BANDS

    versions = {one.id: one for one in await stores.control.versions()}
    since = wanted.replayed[0].since
    lives, busy = await _lives(stores, wanted)
    loads, fits = await stores.control.observed_loads(), await stores.control.engine_fits()
    kept_since = await stores.usage.kept_since()
    terms = {one.id: Terms(weight=one.weight, band=BANDS.index(one.plan)) for one in await stores.control.tenants()}
    prices = PriceList(
        entries=(*configured(config.prices), *await stores.billing.prices()),
        factor_micro=micro_of(config.batch.price_factor),
        labels={one.id: one.version for one in versions.values()},
    )
    found = []
    for id, rows in groups.items():
        endpoint = endpoints.get(id)
        replayed = _lived(wanted.replayed, endpoint)
        # A guest may have been there before its host was.
        asked = tuple(one for one in rows if one.at_s >= replayed[0].since)
        if not asked:
            continue
        notes = list(_notes(asked, endpoint, endpoints, kept_since, since))
        parts = _parts(endpoint, versions, fits, stores.engines, notes) if endpoint else []
        if parts and id not in lives:
            notes.append("Nothing is known of its replicas in this time: what they cost is not told.")
        case = Case(
            name=endpoint.name if endpoint else asked[-1].model,
            ledger=Ledger(
                asked=asked, replayed=replayed, prices=prices, lives=tuple(lives.get(id, ())) or None, busy=busy.get(id)
            ),
            parts=tuple(parts),
            endpoint=endpoint,
            load_s=_load_s(parts, loads, stores.engines),
            gateway=GatewayBody(**{name: getattr(config.gateway, name) for name in GatewayBody.__struct_fields__}),
            prices={kind: nano_of(usd) for kind, usd in config.fleet.accelerator_prices.items()},
            terms=terms,
            notes=tuple(notes),
        )
        found.append(_placed(case, wanted))
    return sorted(found, key=lambda one: -len(one.ledger.asked))


async def _lives(stores: "Readable", wanted: Wanted) -> tuple[dict[str, list["ReplicaLife"]], dict[str, float]]:
    """Return the lives of replicas in the time, and the share of it in which they had a request, by endpoint."""
    since, until = wanted.replayed[0].since, wanted.replayed[-1].until
    lives: dict[str, list[ReplicaLife]] = {}
    for life in await stores.books.lives(since=since, until=until):
        lives.setdefault(life.endpoint_id, []).append(life)
    sums: dict[str, tuple[float, float]] = {}
    for hour in await stores.books.hours(since=int(since // 3600 * 3600), until=ceil(until)):
        busy_s, present_s = sums.get(hour.endpoint_id, (0.0, 0.0))
        sums[hour.endpoint_id] = busy_s + hour.busy_s, present_s + hour.present_s
    return lives, {id: min(1.0, busy_s / present_s) for id, (busy_s, present_s) in sums.items() if present_s}


def _lived(replayed: tuple[Stretch, ...], endpoint: "Endpoint | None") -> tuple[Stretch, ...]:
    """Return the stretches as far as the endpoint was there; a sample stays as it is."""
    first, *others = replayed
    if endpoint is None or others or not first.since < endpoint.created_at < first.until:
        return replayed
    return (msgspec.structs.replace(first, since=float(endpoint.created_at)),)


def _placed(case: Case, wanted: Wanted) -> Case:
    """Return a case with what a replica of it holds: as is said, that of the latest, or what its version asks for."""
    from modelyard.policy.hardware import KINDS

    if wanted.kind:
        return as_said(case, wanted)
    lives = case.ledger.lives
    latest = max(lives, key=lambda one: one.started_at, default=None) if lives else None
    if latest is not None and latest.accelerators > 0:
        price = round(latest.hourly_nanousd / latest.accelerators)
        return msgspec.structs.replace(case, kind=latest.accelerator, accelerators=latest.accelerators, nanousd=price)
    version = case.parts[0].version if case.parts else None
    if version is None:
        return case
    known = KINDS.get(version.gpu_type)
    price = case.prices.get(version.gpu_type, round(known.price_usd * 1e9) if known else 0)
    return msgspec.structs.replace(case, kind=version.gpu_type, accelerators=float(version.gpu_count), nanousd=price)


def as_said(case: Case, wanted: Wanted) -> Case:
    """Return a case on the accelerators that whoever asks names."""
    from modelyard.policy.hardware import KINDS

    if wanted.kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise Failure(f"Nothing is known of '{wanted.kind}'; --runs-on takes: {known}.", Exit.USAGE)
    price = case.prices.get(wanted.kind, round(KINDS[wanted.kind].price_usd * 1e9))
    return msgspec.structs.replace(case, kind=wanted.kind, accelerators=wanted.accelerators, nanousd=price)


def _notes(
    asked: Sequence[Asked],
    endpoint: "Endpoint | None",
    endpoints: Mapping[str, "Endpoint"],
    kept_since: float,
    since: float,
) -> Iterable[str]:
    if kept_since > since:
        yield "Rows of the beginning of this time are not kept any more: see 'control.usage_rows_days'."
    guests = {one.endpoint_id for one in asked} - {endpoint.id if endpoint else ""}
    names = sorted(endpoints[id].name for id in guests if id in endpoints)
    if endpoint and names:
        yield f"Guests on its replicas are replayed with it: {', '.join(names)}."
    left = sum(not one.is_replayable for one in asked)
    if left:
        yield f"{left:,} requests are left out: they have no prompt tokens (they failed before, or count none)."
    if endpoint is None:
        return
    shares = {one.version_id for one in endpoint.releases if one.weight}
    gone = sum(one.version_id not in shares for one in asked if one.endpoint_id == endpoint.id)
    if gone:
        yield f"{gone:,} requests were answered by versions that have no share now; those of now replay them."
    if endpoint.autoscale.prewarm and not endpoint.scaling.floor:
        yield "Pre-warming is not replayed: what it avoids starts cold here."


def _parts(
    endpoint: "Endpoint",
    versions: Mapping[str, "ModelVersion"],
    fits: Mapping[str, bytes],
    engines: "Engines",
    notes: list[str],
) -> list[Part]:
    found = []
    for release in endpoint.releases:
        version = versions.get(release.version_id)
        if not release.weight or version is None:
            continue
        engine = engines.get(version.framework)
        if engine is not None and engine.is_remote:
            notes.append("Its model runs at a provider: prices can be tried, nothing else.")
            return []
        settings = _settings(version, engines)
        chunk = version.options.get("max_num_batched_tokens", 0)
        size = Size(
            settings.slots if settings else 8,
            int(chunk) if isinstance(chunk, int | float) and chunk > 0 else CHUNK_TOKENS,
            settings.kv_tokens if settings else 0,
        )
        found.append(
            Part(
                version=version,
                version_id=version.id,
                label=f"{version.name}@{version.version}",
                weight=release.weight,
                size=size,
                fitted=_fitted(fits.get(version.id)),
            )
        )
    return found


def _fitted(text: bytes | None) -> "Speed | None":
    from modelyard.policy.engine_model import decode

    try:
        model = decode(text) if text is not None else None
    except ValueError:
        return None
    return model.speed if model is not None and model.is_known else None


def _settings(version: "ModelVersion", engines: "Engines") -> "Settings | None":
    engine = engines.get(version.framework)
    if engine is None:
        return None
    try:
        return engine.settings(version.options, artifact_bytes=version.artifact.size_bytes, facts=version.facts)
    except ValueError:
        return None


def _load_s(parts: Sequence[Part], loads: Mapping[str, Sequence[float]], engines: "Engines") -> float:
    """Return what a start takes, as the controller expects it."""
    for part in parts:
        if part.version is not None:
            if seconds := loads.get(part.version_id):
                return median(seconds)
            if (settings := _settings(part.version, engines)) is not None:
                return settings.load_s
    return LOAD_S


def replicas_at_first(case: Case) -> int:
    """Return how many replicas served when the time began: by their lives, else by who answered first."""
    lives, since = case.ledger.lives, case.ledger.replayed[0].since
    if lives is not None:
        return sum(
            one.ready_at is not None and one.ready_at <= since and (one.ended_at is None or one.ended_at > since)
            for one in lives
        )
    first_s = case.ledger.asked[0].at_s
    return max(1, len({one.replica_id for one in case.ledger.asked if one.at_s < first_s + 600 and one.replica_id}))
