"""Rollouts: a canary, its promotion, and the way back."""

from collections.abc import Awaitable, Callable, Mapping

from modelyard.control.api.access import find_endpoint, missing
from modelyard.control.api.endpoint_views import EndpointView
from modelyard.control.api.endpoints import find_living, whole_view
from modelyard.control.api.faults import Fault, refusal
from modelyard.control.api.hosting import draft_of, stranding
from modelyard.control.api.rollout_spec import EXAMPLE, CanaryRequest, canary_faults, with_asked
from modelyard.control.api.rollout_views import RolloutView, rollout_view
from modelyard.control.api.versions import Findings, examine, make_version
from modelyard.control.context import Context
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint
from modelyard.domain.rollouts import Rollout, RolloutState
from modelyard.domain.tenants import Scope
from modelyard.errors import conflict
from modelyard.policy.releases import RELEASES_MAX
from modelyard.policy.rollouts import (
    NotPossibleError,
    begun,
    check_free,
    moved_to,
    paused,
    promoted,
    resumed,
    rolled_back,
    rolling,
    stable_of,
)
from modelyard.stores import AlreadyExistsError, Event, StoreUnavailableError
from modelyard.web.routes import AnyRoute, Call, Empty, Route

Change = Callable[[Endpoint, float, Mapping[str, str]], tuple[Endpoint, str, str]]
"""From an endpoint, the time and the names of versions to the endpoint after, and an event's kind and reason."""


class Rollouts:
    """The routes of rollouts; they come before endpoints', whose names may hold slashes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        one, manage = "/v1/endpoints/{endpoint:path}", Scope.MANAGE
        begin = "Begin or move a canary"

        def act(verb: str, summary: str, handler: Callable[[Call[Empty, Empty]], Awaitable[EndpointView]]) -> AnyRoute:
            return Route("POST", f"{one}/{verb}", manage, summary, handler, Empty, Empty, EndpointView)

        return [
            Route(
                "POST", f"{one}/canary", manage, begin, self.canary, CanaryRequest, Empty, EndpointView, 202, EXAMPLE
            ),
            act("promote", "Give the candidate all traffic", self.promote),
            act("rollback", "Give the previous version all traffic again", self.roll_back),
            act("pause", "Keep a rollout at its step", self.pause),
            act("resume", "Let a paused rollout go on", self.resume),
            Route("GET", f"{one}/rollout", manage, "How far a rollout is", self.get, Empty, Empty, RolloutView),
        ]

    async def get(self, call: Call[Empty, Empty]) -> RolloutView:
        """Return the rollout that is under way, or the last one."""
        store = self._context.store
        endpoint = await find_endpoint(store, call.identity, call.path("endpoint"))
        versions = {version.id: version for version in await store.versions(tenant_id=endpoint.tenant_id)}
        view = rollout_view(endpoint, versions)
        if view is None:
            raise missing("rollout of endpoint", endpoint.name)
        return view

    async def canary(self, call: Call[CanaryRequest, Empty]) -> EndpointView:
        """Begin a canary of a new or known version, or move the one that runs to another share."""
        context, body = self._context, call.body
        findings = await examine(context, call.identity, body) if body.framework else None
        faults = [*canary_faults(body), *(findings.faults if findings else ())]
        async with context.changing:
            endpoint = await find_living(context, call)
            versions = {one.id: one for one in await context.store.versions(tenant_id=endpoint.tenant_id)}
            known = None if findings else _known_version(endpoint, body, versions, faults)
            faults += await self._stranding(endpoint, body, findings, known)
            if faults:
                raise refusal("This canary cannot begin.", faults)
            rollout = endpoint.rollout
            if rollout is not None and rollout.is_open and known is not None and known.id == rollout.candidate_id:
                after = await self._move(endpoint, rollout, body)
            else:
                after = await self._begin(endpoint, body, findings, known, versions)
            await self._announce()
        return await whole_view(context, call.request, after)

    async def promote(self, call: Call[Empty, Empty]) -> EndpointView:
        """Give the candidate all traffic, as soon as its replicas for that are ready; the judge has no more say."""
        key = call.identity.key_id

        def change(endpoint: Endpoint, now: float, names: Mapping[str, str]) -> tuple[Endpoint, str, str]:
            after = promoted(endpoint, now)
            return after, "rollout_step", f"{_candidate(after, names)} may have 100 %: promoted with key {key}"

        return await self._change(call, change)

    async def roll_back(self, call: Call[Empty, Empty]) -> EndpointView:
        """Give the version before all traffic again: at once while it is kept, else replica by replica."""
        key = call.identity.key_id

        def change(endpoint: Endpoint, now: float, names: Mapping[str, str]) -> tuple[Endpoint, str, str]:
            rollout = endpoint.rollout
            stable = {one.version_id for one in endpoint.releases}
            if rollout and rollout.state is RolloutState.PROMOTED and rollout.stable_id not in stable:
                after = rolling(endpoint, rollout.stable_id, now)
                reason = f"{_candidate(after, names)} takes over again replica by replica, since it was not kept"
                return after, "rollout_began", f"{reason}: asked for with key {key}"
            after = rolled_back(endpoint, f"asked for with key {key}", now)
            assert after.rollout is not None, "a rollback is remembered"
            back = names.get(after.rollout.stable_id, "")
            return after, "rollout_rolled_back", f"from {_candidate(after, names)} to {back}: {after.rollout.reason}"

        return await self._change(call, change)

    async def pause(self, call: Call[Empty, Empty]) -> EndpointView:
        """Keep a rollout at its step: nobody judges it."""
        key = call.identity.key_id

        def change(endpoint: Endpoint, _: float, names: Mapping[str, str]) -> tuple[Endpoint, str, str]:
            after = paused(endpoint, f"asked for with key {key}")
            return after, "rollout_paused", f"the rollout of {_candidate(after, names)}, with key {key}"

        return await self._change(call, change)

    async def resume(self, call: Call[Empty, Empty]) -> EndpointView:
        """Let a paused rollout go on; its step begins anew."""
        key = call.identity.key_id

        def change(endpoint: Endpoint, now: float, names: Mapping[str, str]) -> tuple[Endpoint, str, str]:
            after = resumed(endpoint, now)
            return after, "rollout_resumed", f"the rollout of {_candidate(after, names)}, with key {key}"

        return await self._change(call, change)

    async def _change(self, call: Call[Empty, Empty], change: Change) -> EndpointView:
        context = self._context
        async with context.changing:
            endpoint = await find_living(context, call)
            names = {one.id: one.version for one in await context.store.versions(tenant_id=endpoint.tenant_id)}
            now = context.clock.unix_s()
            try:
                after, kind, reason = change(endpoint, now, names)
            except NotPossibleError as error:
                raise conflict(f"Endpoint '{endpoint.name}': {error}.") from None
            await context.store.put_endpoint(after, events=(Event(now, endpoint.id, kind, reason),))
            await self._announce()
        return await whole_view(context, call.request, after)

    async def _stranding(
        self, endpoint: Endpoint, body: CanaryRequest, findings: Findings | None, known: ModelVersion | None
    ) -> list[Fault]:
        """Return why the guests of a host would have no place once its candidate has taken over."""
        engine = findings.engine if findings else self._context.engines.get(known.framework if known else "")
        if engine is None or endpoint.host_id:
            return []
        if findings is not None:
            return await stranding(self._context, endpoint, engine, draft_of(endpoint, engine, findings, body.options))
        return await stranding(self._context, endpoint, engine, known) if known is not None else []

    async def _move(self, endpoint: Endpoint, rollout: Rollout, body: CanaryRequest) -> Endpoint:
        context, now = self._context, self._context.clock.unix_s()
        try:
            after = moved_to(endpoint, with_asked(rollout, body), now)
        except NotPossibleError as error:
            raise conflict(f"The canary cannot be moved: {error}.") from None
        reason = f"the candidate may have {body.weight} %: asked for"
        await context.store.put_endpoint(after, events=(Event(now, endpoint.id, "rollout_step", reason),))
        return after

    async def _begin(
        self,
        endpoint: Endpoint,
        body: CanaryRequest,
        findings: Findings | None,
        known: ModelVersion | None,
        versions: Mapping[str, ModelVersion],
    ) -> Endpoint:
        context, now = self._context, self._context.clock.unix_s()
        names = {version_id: version.version for version_id, version in versions.items()}
        try:
            check_free(endpoint, names)
            stable = stable_of(endpoint, names)
        except NotPossibleError as error:
            raise conflict(f"A canary of '{endpoint.name}' cannot begin: {error}.", param="version") from None
        if len(endpoint.releases) >= RELEASES_MAX:
            raise conflict(f"The endpoint has {RELEASES_MAX} releases, the most; delete one first.")
        main = versions.get(stable.version_id)
        version = known
        if findings is not None:
            gpus = (main.gpu_type, main.gpu_count) if main else ("cpu", 1)
            version = await make_version(
                context, body, findings, tenant_id=endpoint.tenant_id, name=endpoint.name, gpus=gpus
            )
        assert version is not None, "a request without any version is a fault"
        if version.id == stable.version_id:
            raise conflict(f"Version '{version.version}' has all traffic already.", param="version")
        keep_s = float(context.config.control.keep_previous_s)
        rollout = with_asked(Rollout(stable.version_id, version.id, now, asked_at=now, keep_s=keep_s), body)
        after = begun(endpoint, rollout)
        steps = ", ".join(f"{step} %" for step in rollout.steps)
        reason = f"{version.version} beside {names.get(stable.version_id, '')}, {rollout.mode}: {steps}"
        events = (Event(now, endpoint.id, "rollout_began", reason),)
        try:
            if findings is not None:
                await context.store.add_release(version, after, events=events)
            else:
                await context.store.put_endpoint(after, events=events)
        except AlreadyExistsError as error:
            raise conflict(f"{error}. Choose another version.", param="version") from None
        return after

    async def _announce(self) -> None:
        self._context.wake()
        try:
            await self._context.refresh()
        except StoreUnavailableError:
            # It is stored, and to ask again would be refused: the woken pass tells the gateways.
            return


def _known_version(
    endpoint: Endpoint, body: CanaryRequest, versions: Mapping[str, ModelVersion], faults: list[Fault]
) -> ModelVersion | None:
    """Return the version that exists and is meant; without a name, the candidate of the canary that runs."""
    rollout = endpoint.rollout
    if body.version is None:
        if rollout is not None and rollout.is_open:
            return versions.get(rollout.candidate_id)
        faults.append(Fault("version", "name a version of the model, or give 'framework' for a new one"))
        return None
    mine = [one for one in versions.values() if one.name == endpoint.name]
    for one in mine:
        if body.version in (one.id, one.version):
            return one
    have = ", ".join(f"'{one.version}'" for one in mine[-10:])
    faults.append(Fault("version", f"there is no '{body.version[:64]}' of '{endpoint.name}'; there are {have}"))
    return None


def _candidate(endpoint: Endpoint, names: Mapping[str, str]) -> str:
    assert endpoint.rollout is not None, "only rollouts are told of"
    return names.get(endpoint.rollout.candidate_id, endpoint.rollout.candidate_id)
