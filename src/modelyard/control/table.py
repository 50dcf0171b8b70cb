"""The routing table: from what is stored to what gateways serve from.

Built from the store alone, so that a controller that starts anew publishes
what the last one did. It is pushed only when something in it changed. While
the store cannot be read nothing is pushed, and gateways keep what they have.
A route is made anew only when one of the objects that it comes from is another
one than last time, so that one change among thousands of endpoints is cheap.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from modelyard.config.billing import PriceConfig
from modelyard.control.terms import TermsDesk
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.demand import Report
from modelyard.domain.endpoints import Endpoint, Release
from modelyard.domain.fleet import Replica, ReplicaState, replica_of, seats_of
from modelyard.domain.prices import PriceEntry, Tariff
from modelyard.domain.routing_table import EndpointRoute, ReleaseRoute, ReplicaRoute, RoutingTable
from modelyard.domain.usage import Price
from modelyard.engines import Engines
from modelyard.ids import new_id
from modelyard.metering.prices import configured, price_of, release_price
from modelyard.policy.pricelist import tariffs
from modelyard.stores import ControlStore, TableFeed

_NONE: Sequence[Replica] = []
REST_MAX_S = 0.1
"""Longest pause between two pushes for passes: what they change is seen soon, and gateways get to serve meanwhile."""
# One that wakes may have been woken before its last requests had ended.
_DRAINING = frozenset({ReplicaState.DRAINING, ReplicaState.FALLING_ASLEEP, ReplicaState.WAKING})
_ROUTED = _DRAINING | {ReplicaState.READY}


class _Made(NamedTuple):
    """A route, and all that it was made of (besides prices and engines, which never change)."""

    endpoint: Endpoint
    replicas: Sequence[Replica]
    version_ids: frozenset[str]
    route: EndpointRoute
    bases: tuple[str, ...]


class TablePublisher:
    """Builds tables and pushes them to ``feed``, one at a time, so that an older one never follows a newer."""

    def __init__(
        self,
        *,
        store: ControlStore,
        engines: Engines,
        prices: Mapping[str, PriceConfig],
        feed: TableFeed,
        terms: TermsDesk | None = None,
    ) -> None:
        self._store = store
        self._engines = engines
        self._prices = prices
        self._configured = configured(prices)
        self._terms = terms
        self._listed: tuple[PriceEntry, ...] = ()
        """The stored prices that the present table is made with."""
        self._feed = feed
        self._epoch = new_id("")
        self._table = RoutingTable(self._epoch, 0, (), (), ())
        self._turn = asyncio.Lock()
        self._asked = 0
        self._served = 0
        self._rests_until_s = 0.0
        self._draining: dict[str, int] = {}
        """Replicas that drain, fall asleep or wake, with the first revision that sends nothing new to them."""
        self._routes: dict[str, _Made] = {}
        self._versions: Mapping[str, ModelVersion] = {}

    def __repr__(self) -> str:
        return f"<TablePublisher at revision {self._table.revision}, {len(self._table.endpoints)} endpoints>"

    @property
    def table(self) -> RoutingTable:
        """The table that was pushed last."""
        return self._table

    async def refresh(self) -> None:
        """Push what is stored now; when this returns, gateways have been sent everything stored before the call.

        Raises:
            StoreUnavailableError: nothing was pushed.
        """
        self._asked += 1
        await self._serve(self._asked)

    async def refresh_together(self) -> None:
        """Do the same for callers by the hundred: a pause after the last push, as long as it took, gathers some.

        Raises:
            StoreUnavailableError: nothing was pushed.
        """
        self._asked += 1
        ticket = self._asked
        pause_s = self._rests_until_s - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        await self._serve(ticket)

    async def _serve(self, ticket: int) -> None:
        async with self._turn:
            if self._served >= ticket:
                return  # somebody read the store after this call began
            served, began_s = self._asked, asyncio.get_running_loop().time()
            table, draining = await self._build()
            table = _with_same_parts(table, self._table)
            if self._table.revision == 0 or table != self._table:
                self._table = msgspec.structs.replace(table, revision=self._table.revision + 1)
                await self._feed.publish(self._table)
            self._draining = {one: self._draining.get(one, self._table.revision) for one in draining}
            self._served = served
            ended_s = asyncio.get_running_loop().time()
            self._rests_until_s = ended_s + min(ended_s - began_s, REST_MAX_S)

    def known_to_drain(self, reports: Collection[Report]) -> frozenset[str]:
        """Return the draining replicas of which each gateway of ``reports`` knows it, and sends nothing new there."""
        seen = min(
            (report.revision if report.epoch == self._epoch else 0 for report in reports), default=self._table.revision
        )
        return frozenset(replica_id for replica_id, since in self._draining.items() if since <= seen)

    async def _build(self) -> tuple[RoutingTable, frozenset[str]]:
        """Return the table of what is stored, and the replicas that drain."""
        tenants = await self._store.tenants()
        keys = [key for key in await self._store.keys() if key.revoked_at is None]
        is_repriced = False
        if self._terms is not None:
            tenants, keys = await self._terms.tenants(tenants), await self._terms.keys(keys)
            listed = (await self._terms.current()).prices
            self._listed, is_repriced = listed, listed is not self._listed
        endpoints = await self._store.endpoints()
        versions = {version.id: version for version in await self._store.versions()}
        replicas: dict[str, list[Replica]] = defaultdict(list)
        stored = await self._store.replicas()
        for replica in stored:
            if replica.state in _ROUTED:
                replicas[replica.endpoint_id].append(replica)
        for endpoint_id, seats in seats_of(stored).items():
            replicas[endpoint_id] += [seat for seat in seats if seat.state in _ROUTED]
        serving = {replica.id: replica.version_id for replica in stored if replica.guests}
        by_id = {endpoint.id: endpoint for endpoint in endpoints}
        before = self._versions
        news = {one for one, version in versions.items() if before.get(one) is not version} | before.keys() - versions
        self._versions = versions
        if is_repriced:
            news |= versions.keys()
        table = RoutingTable(
            epoch=self._epoch,
            revision=self._table.revision,
            tenants=tuple(tenants),
            keys=tuple(keys),
            endpoints=tuple(
                self._made(endpoint, versions, rows, news, _bases(endpoint, rows, serving, by_id))
                for endpoint in endpoints
                if not endpoint.is_deleted and not endpoint.pool
                for rows in (replicas.get(endpoint.id, _NONE),)
            ),
        )
        if len(self._routes) > len(table.endpoints):
            kept = {route.id for route in table.endpoints}
            self._routes = {one: made for one, made in self._routes.items() if one in kept}
        known = (replica for rows in (stored, *replicas.values()) for replica in rows)
        return table, frozenset(replica.id for replica in known if replica.state in _DRAINING)

    def _made(
        self,
        endpoint: Endpoint,
        versions: Mapping[str, ModelVersion],
        replicas: Sequence[Replica],
        news: Set[str],
        bases: tuple[str, ...],
    ) -> EndpointRoute:
        """Return the route of an endpoint; the same object as in the last table when it is made of the same ones.

        ``news`` are the versions that are other objects than in the last table, ``bases`` those that guests sit on.
        """
        last = self._routes.get(endpoint.id)
        # Equal is what is meant by the same; for what is identical, Python finds that out without a look inside.
        is_same = last is not None and last.endpoint is endpoint and last.replicas == replicas and last.bases == bases
        if last is not None and is_same and news.isdisjoint(last.version_ids):
            return last.route
        route = self._route(endpoint, versions, replicas, bases)
        if last is not None and last.route == route:
            route = last.route
        version_ids = {one.version_id for one in endpoint.releases} | {one.version_id for one in replicas} | {*bases}
        self._routes[endpoint.id] = _Made(endpoint, replicas, frozenset(version_ids), route, bases)
        return route

    def _route(
        self,
        endpoint: Endpoint,
        versions: Mapping[str, ModelVersion],
        replicas: Sequence[Replica],
        bases: tuple[str, ...],
    ) -> EndpointRoute:
        answering = [version for one in _answering(endpoint) if (version := versions.get(one.version_id))]
        hosting = [versions[one] for one in bases if one in versions]
        # What an adapter can do, and how much fits beside it, is what the base that it sits on can.
        is_adapter = any(version.base_id for version in answering)
        routes, extras, context_length = self._capabilities(hosting if is_adapter else answering)
        falling_back = [
            version for one in endpoint.releases if one.fallback and (version := versions.get(one.version_id))
        ]
        fallback_routes, fallback_extras, _ = self._capabilities(falling_back)
        beside = min(map(self._kv_tokens, hosting), default=0)
        kv_tokens = {
            replica.version_id: beside if bases else self._kv_tokens(versions.get(replica.version_id))
            for replica in replicas
        }
        return EndpointRoute(
            id=endpoint.id,
            tenant_id=endpoint.tenant_id,
            name=endpoint.name,
            is_shared=endpoint.is_shared,
            created_at=endpoint.created_at,
            releases=self._with_remote(
                _releases(endpoint, replicas, kv_tokens, self._release_prices(endpoint, versions)), versions
            ),
            routes=routes,
            engine_extras=extras,
            context_length=context_length,
            price=price_of(self._prices, endpoint.name),
            progress=endpoint.progress,
            failure=endpoint.failure,
            serving=endpoint.serving,
            fallback_routes=fallback_routes,
            fallback_extras=fallback_extras,
            tariffs=self._tariffs(endpoint, versions, replicas),
        )

    def _tariffs(
        self, endpoint: Endpoint, versions: Mapping[str, ModelVersion], replicas: Sequence[Replica]
    ) -> tuple[Tariff, ...]:
        """Return all its prices where some are stored; those of versions that were replaced and still answer, too."""
        if not self._listed:
            return ()
        ids = dict.fromkeys([*(one.version_id for one in endpoint.releases), *(one.version_id for one in replicas)])
        labels: dict[str, list[str]] = {}
        for version_id in ids:
            if (version := versions.get(version_id)) is not None:
                labels.setdefault(version.version, []).append(version_id)
        owner = "" if endpoint.is_shared else endpoint.tenant_id
        return tariffs(self._listed, self._configured, name=endpoint.name, versions=labels, owner=owner)

    def _release_prices(self, endpoint: Endpoint, versions: Mapping[str, ModelVersion]) -> Mapping[str, Price]:
        """Return the prices of the versions that have one of their own."""
        found = {
            release.version_id: release_price(self._prices, endpoint.name, version.version)
            for release in endpoint.releases
            if (version := versions.get(release.version_id)) is not None
        }
        return {version_id: price for version_id, price in found.items() if price is not None}

    def _with_remote(
        self, releases: tuple[ReleaseRoute, ...], versions: Mapping[str, ModelVersion]
    ) -> tuple[ReleaseRoute, ...]:
        """Return the releases, those marked that run at somebody else's."""

        def is_remote(version_id: str) -> bool:
            version = versions.get(version_id)
            engine = self._engines.get(version.framework) if version is not None else None
            return engine is not None and engine.is_remote

        return tuple(
            msgspec.structs.replace(one, is_remote=True) if is_remote(one.version_id) else one for one in releases
        )

    def _kv_tokens(self, version: ModelVersion | None) -> int:
        engine = self._engines.get(version.framework) if version is not None else None
        if version is None or engine is None:
            return 0
        try:
            return engine.settings(
                version.options, artifact_bytes=version.artifact.size_bytes, facts=version.facts
            ).kv_tokens
        except ValueError:
            return 0

    def _capabilities(self, versions: Sequence[ModelVersion]) -> tuple[frozenset[str], frozenset[str], int]:
        """Return what every release can do: a caller must not notice which of them answers."""
        routes: list[frozenset[str]] = []
        extras: list[frozenset[str]] = []
        lengths: list[int] = []
        for version in versions:
            if (engine := self._engines.get(version.framework)) is None:
                continue
            routes.append(engine.routes_of(version.options, version.facts))
            extras.append(engine.extras_of(version.facts))
            try:
                settings = engine.settings(
                    version.options, artifact_bytes=version.artifact.size_bytes, facts=version.facts
                )
            except ValueError:
                continue  # the reconciler reports it; there is no replica to ask anyway
            lengths.append(settings.context_length)
        if not routes:
            return frozenset(), frozenset(), 0
        return frozenset.intersection(*routes), frozenset.intersection(*extras), min(lengths, default=0)


def _bases(
    endpoint: Endpoint, seats: Sequence[Replica], serving: Mapping[str, str], by_id: Mapping[str, Endpoint]
) -> tuple[str, ...]:
    """Return the versions on whose replicas a guest sits; where it sits nowhere, those that its host answers with."""
    if not endpoint.host_id:
        return ()
    if on := {version_id for seat in seats if (version_id := serving.get(replica_of(seat.id)))}:
        return tuple(sorted(on))
    host = by_id.get(endpoint.host_id)
    return tuple(release.version_id for release in _answering(host)) if host is not None else ()


def _answering(endpoint: Endpoint) -> list[Release]:
    """Return the releases that answer callers: what a shadow, or a candidate without traffic, can do is nobody's
    business."""
    weighted = [release for release in endpoint.releases if release.weight]
    return weighted or [release for release in endpoint.releases if not release.shadow and not release.fallback]


def _with_same_parts(table: RoutingTable, last: RoutingTable) -> RoutingTable:
    """Return ``table`` with the collections of ``last`` where they are equal: the feed sees at once what is news."""
    return msgspec.structs.replace(
        table,
        tenants=last.tenants if table.tenants == last.tenants else table.tenants,
        keys=last.keys if table.keys == last.keys else table.keys,
        endpoints=last.endpoints if table.endpoints == last.endpoints else table.endpoints,
    )


def _releases(
    endpoint: Endpoint, replicas: Sequence[Replica], kv_tokens: Mapping[str, int], prices: Mapping[str, Price]
) -> tuple[ReleaseRoute, ...]:
    """Return the releases, and behind them versions that were replaced but still serve or drain.

    While no replica of the releases with traffic is ready, those that had it before keep it.
    """
    by_version: dict[str, list[Replica]] = defaultdict(list)
    for replica in replicas:
        by_version[replica.version_id].append(replica)

    def route(version_id: str, weight: int, shadow: int = 0, fallback: int = 0) -> ReleaseRoute:
        of_it = _replica_routes(by_version[version_id], kv_tokens.get(version_id, 0))
        return ReleaseRoute(version_id, weight, of_it, shadow, fallback, prices.get(version_id))

    is_served = any(_is_ready(by_version[release.version_id]) for release in endpoint.releases if release.weight)

    def kept(version_id: str) -> int:
        return 100 if not is_served and _is_ready(by_version[version_id]) else 0

    routes = [
        # A shadow was never meant to answer anybody, and a fallback answers without a weight.
        route(
            one.version_id,
            one.weight or (0 if one.shadow or one.fallback else kept(one.version_id)),
            one.shadow,
            one.fallback,
        )
        for one in endpoint.releases
    ]
    replaced = sorted(by_version.keys() - {release.version_id for release in endpoint.releases})
    routes += [route(one, kept(one)) for one in replaced]
    return tuple(routes)


def _is_ready(replicas: Sequence[Replica]) -> bool:
    return any(replica.state is ReplicaState.READY for replica in replicas)


def _replica_routes(replicas: Sequence[Replica], kv_tokens: int) -> tuple[ReplicaRoute, ...]:
    return tuple(
        ReplicaRoute(
            id=replica.id,
            host=replica.host,
            port=replica.port,
            secret=replica.secret,
            slots=replica.slots,
            is_draining=replica.state in _DRAINING,
            kv_tokens=kv_tokens,
            model_name=replica.model_name,
            seat_of=on if (on := replica_of(replica.id)) != replica.id else "",
        )
        for replica in replicas
    )
