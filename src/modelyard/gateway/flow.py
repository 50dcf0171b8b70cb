"""The life of a request (``DESIGN.md`` section 5), in one sitting.

``begin`` is called with a whole request and takes the steps in order:
authenticate, decode, find the endpoint, limit, then a replica or a place in
line. From ``dispatch`` on an ``Exchange`` (``exchange.py``) forwards, relays
and meters. Each refusal is an ``ApiError``; whatever was taken before it is
given back. One owner, one event loop, no locks: a decision never waits between
reading and changing.
"""

import hashlib
import hmac
import ipaddress
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from modelyard import errors
from modelyard.clock import Clock
from modelyard.config import GatewayConfig
from modelyard.domain.endpoints import Sticky
from modelyard.domain.routing_table import Tidings
from modelyard.domain.tenants import Scope
from modelyard.domain.usage import MICRO_PER_UNIT
from modelyard.domain.why import Ask, Told
from modelyard.errors import ApiError
from modelyard.gateway import (
    answers,
    callers,
    engine_request,
    inference_protocol,
    making_way,
    preferences,
    recovery,
    side_requests,
    waiting,
    worst_case,
)
from modelyard.gateway.accounts import KeyState
from modelyard.gateway.catalog import QUIET_S, Catalog, EndpointState
from modelyard.gateway.control_proxy import ControlProxy
from modelyard.gateway.detached import KeptRequests
from modelyard.gateway.exchange import Exchange
from modelyard.gateway.failover import CONTINUES, PREFILL
from modelyard.gateway.links import LinkFetcher
from modelyard.gateway.memory import RequestMemory
from modelyard.gateway.openai import Call
from modelyard.gateway.routes import COUNTS, body_of_error, decoder_of, spoken_on
from modelyard.gateway.server import ClientConnection, Request
from modelyard.gateway.siblings import Siblings
from modelyard.gateway.side_requests import SideRequest
from modelyard.gateway.streamed_body import StreamedExchange
from modelyard.gateway.upstream import UpstreamPool
from modelyard.ids import KEY_LENGTH, RequestIds
from modelyard.metering.journal import Journal
from modelyard.observe.metrics import GatewayMetrics
from modelyard.policy.dispatch import ReplicaLoad, Verdict
from modelyard.policy.job import BANDS, NEVER_S, Job
from modelyard.policy.overload import OverloadState, sheds
from modelyard.policy.prefixes import chain
from modelyard.policy.queueing import BATCH_BAND
from modelyard.policy.routing import stable_hash
from modelyard.policy.suspects import Suspects

if TYPE_CHECKING:
    from modelyard.gateway.presence import ControllerPresence

_log = logging.getLogger(__name__)

# To be had without a look into the enumeration, which costs as much as three attributes.
_INFERENCE, _NOT_STICKY = Scope.INFERENCE, Sticky.NONE
_BANDS = {plan: band for band, plan in enumerate(BANDS)}
_TIERS = {"flex": 2, "default": 1, "scale": 1}
"""Bands of OpenAI's service tiers; those not named here get what the tenant's plan gives."""


class Gateway:
    """One gateway worker. Everything it needs is given; it owns the exchanges in flight."""

    def __init__(
        self,
        *,
        settings: GatewayConfig,
        catalog: Catalog[Exchange],
        pool: UpstreamPool,
        journal: Journal,
        presence: "ControllerPresence",
        control_socket: Path,
        internal_token: str,
        pepper: bytes,
    ) -> None:
        self.settings = settings
        self.batch_factor_micro = MICRO_PER_UNIT
        self.links = LinkFetcher(None, bytes_max=0, timeout_s=0)
        self.catalog = catalog
        self.pool = pool
        self.journal = journal
        self.presence = presence
        self.clock: Clock = presence.clock
        self.metrics = GatewayMetrics()
        self.ids = RequestIds()
        self.control = ControlProxy(self, control_socket, internal_token)
        self.kept = KeptRequests(self, control_socket, internal_token)
        self.connections: set[ClientConnection] = set()
        self.exchanges: dict[Exchange, None] = {}
        self.is_draining = False
        self.engine_heads: dict[tuple[str, str], bytes] = {}
        """First part of the head of a request, by replica and route; forgotten with each table."""
        self.has_public_metrics = (
            _is_loopback(settings.host) if settings.metrics_public is None else settings.metrics_public
        )
        self.side_requests: set[SideRequest] = set()
        self.siblings: Siblings | None = None
        self.suspects = Suspects()
        self.overload = OverloadState()
        self.memory = RequestMemory(journal.source, served=settings.why_served_max, refused=settings.why_refused_max)
        self._salts: dict[str, bytes] = {}
        self._salt_key = hmac.digest(pepper, b"cache salt", hashlib.sha256)
        self._pepper = pepper

    def begin(self, client: ClientConnection, request: Request) -> None:
        """Answer ``request`` on ``client``, now or later."""
        request_id = self.ids.next()
        exchange = key = call = endpoint = None
        try:
            if (decoder := decoder_of(request.path)) is None:
                self._answer_other(client, request, request_id)
                return
            if self.is_draining or request.method != b"POST":
                self._check_call(request)
            key = self.authenticate(request, _INFERENCE)
            call = decoder(request)
            endpoint = self._find(key, call, request.path)
            prefer = preferences.NONE
            if request.preferences:
                prefer = preferences.read(request.preferences, is_stream=call.is_stream)
            exchange = self._limit(client, request, request_id, key, call, endpoint)
            if prefer is not preferences.NONE and prefer.is_kept:
                self.kept.begin(client, request, exchange, prefer)
            else:
                self.admit(exchange, prefer.wait_s)
        except ApiError as refusal:
            model, now_unix_s = call.model if call is not None else "", self.clock.unix_s()
            self.memory.turned_away(request_id, request.path, refusal, key, model, endpoint, now_unix_s)
            self.refuse(client, refusal, request_id, route=spoken_on(request))
        except Exception:  # noqa: BLE001 - boundary: one request must not end the worker; the id finds the traceback in the log
            _log.exception("a request failed", extra={"request_id": request_id})
            if exchange is None:
                self.refuse(client, errors.internal_error(request_id), request_id)
            else:
                if exchange not in self.exchanges and not exchange.is_over:
                    # It failed before it was counted; its end will count it out.
                    exchange.endpoint.in_flight += 1
                exchange.fail(errors.internal_error(request_id))

    def stream(self, client: ClientConnection, request: Request, needed: Scope) -> StreamedExchange:
        """Pass ``request`` on while its body comes; what is returned takes the body.

        Raises:
            ApiError: 401 or 403 without a good key; nobody would read the body of a request that is refused later.
        """
        self.authenticate(request, needed)
        exchange = StreamedExchange(self.control, client, request, self.ids.next())
        self.control.stream(exchange)
        return exchange

    def _check_call(self, request: Request) -> None:
        if self.is_draining:
            raise errors.shutting_down()
        if request.method != b"POST":
            raise errors.method_not_allowed(request.method.decode("latin-1"), request.path)

    def authenticate(self, request: Request, needed: Scope | None) -> KeyState:
        """Return the key of ``request``.

        Raises:
            ApiError: 401 for no good key, 403 for a missing scope, 503 when the key cannot be judged now.
        """
        now_unix_s = self.catalog.accounts.seen(self.clock.unix_s())
        if request.caller is not None:
            return callers.key_of(self, request.caller, now_unix_s)
        token = bearer_token(request)
        state, is_known = self.catalog.accounts.key(token, self._pepper, now_unix_s=now_unix_s)
        if state is None:
            if not is_known and len(token) == KEY_LENGTH and not self.presence.is_authoritative:
                raise errors.auth_unavailable()
            raise errors.invalid_api_key()
        record = state.record
        if record.revoked_at is not None or self.catalog.accounts.is_over(record, now_unix_s):
            raise errors.invalid_api_key()
        if state.tenant.record.is_suspended:
            raise errors.tenant_suspended()
        if needed is _INFERENCE:
            if not state.may_infer:
                raise errors.permission_denied(needed)
        elif needed is not None and not state.identity.may(needed):
            raise errors.permission_denied(needed)
        return state

    def _find(self, key: KeyState, call: Call, route: str) -> EndpointState[Exchange]:
        endpoint = self.catalog.endpoint(key, call.model)
        if endpoint is None:
            raise errors.model_not_found(call.model)
        if (call.engine_route or route) not in endpoint.route.routes:
            raise errors.route_unsupported(call.model, route)
        extras = endpoint.route.engine_extras
        if call.choices > 1 and call.output_tokens != 0 and "n" not in extras:
            param = "n" if getattr(call.request, "n", None) not in (None, 1) else "prompt"
            raise errors.unsupported_parameter(param, f"the engine of '{call.model}' gives one choice a request")
        if call.needs:
            able = extras if CONTINUES.isdisjoint(extras) else extras | {PREFILL}
            if (lacking := call.lacking(able)) is not None:
                raise errors.unsupported_parameter(lacking, f"the engine of '{call.model}' cannot do that")
        if call.links:
            self.links.check(call.links)
        return endpoint

    def _limit(
        self,
        client: ClientConnection,
        request: Request,
        request_id: str,
        key: KeyState,
        call: Call,
        endpoint: EndpointState[Exchange],
    ) -> Exchange:
        """Reserve the worst case of the request from its key and tenant, or refuse it."""
        if not self.journal.is_writable:
            raise errors.storage_full()
        prompt = endpoint.prompt_tokens(call.text_length)
        context_length = endpoint.route.context_length
        output, output_max = worst_case.output_tokens(call, prompt, context_length, self.settings.max_tokens_default)
        job = self._job(request, key, call, endpoint, prompt, output)
        now_s, now_unix_s = self.clock.monotonic_s(), self.clock.unix_s()
        arrived_at = self.catalog.accounts.arrival(key, endpoint.route.name, now_unix_s)
        if request.caller is None:
            prices = endpoint.sheet(key.record.tenant_id, arrived_at)
        else:
            prices = endpoint.batch_sheet(key.record.tenant_id, arrived_at, self.batch_factor_micro)
        reservation = self.catalog.accounts.reserve(
            key,
            model=endpoint.route.name,
            price=prices.most,
            prompt_tokens=prompt,
            output_tokens=output,
            output_max=output_max,
            now_s=now_s,
            now_unix_s=now_unix_s,
            prompt_max=worst_case.prompt_tokens(call, len(request.body), context_length) if key.has_quotas else 0,
            units=call.units_max,
        )
        exchange = Exchange(
            self, client, request_id, key, endpoint, call, request.path, job, reservation, prices, now_s
        )
        exchange.batch_line = "" if request.caller is None else request.caller.line
        return exchange

    def _job(
        self,
        request: Request,
        key: KeyState,
        call: Call,
        endpoint: EndpointState[Exchange],
        prompt: int,
        output: int,
    ) -> Job:
        """Return what policies may know of the request; refuse it if the gateway itself sheds its kind."""
        tenant = key.tenant.record
        band = _TIERS.get(call.tier, 0)
        own = _BANDS[tenant.plan]
        # A caller may always be patient, but urgency is the plan's to give.
        band = BATCH_BAND if request.caller is not None else own if band <= own else band
        if self.overload.level and sheds(self.overload.level, band):
            raise errors.overloaded(retry_after_s=self.overload.retry_after_s)
        job = Job(tenant.id, tenant.weight, band, prompt, output, output, len(request.body))
        job.is_seen = call.is_stream
        if output:
            job.output_tokens = endpoint.outputs.predict(tenant.id, output)
        if endpoint.dispatcher.has_fallback:
            job.fallback_s = self._fallback_s(call, endpoint, request.path)
        sticky = endpoint.route.serving.sticky
        if sticky is not _NOT_STICKY:
            group = call.user if sticky is Sticky.USER and call.user else key.record.id
            job.session = job.release_session = stable_hash(f"{tenant.id}/{group}")
        if endpoint.dispatcher.is_crowd:
            job.prefix = chain(call.prompt_bytes(), salt=hash(self.salt_of(tenant.id)))
            if call.user and not job.session:
                job.session = stable_hash(f"{tenant.id}/{call.user}")
        return job

    def _fallback_s(self, call: Call, endpoint: EndpointState[Exchange], path: str) -> float:
        """Return from when on a request may go to a fallback: never where one cannot do what it asks for."""
        route = endpoint.route
        able = route.fallback_extras
        is_able = (call.engine_route or path) in route.fallback_routes
        if not is_able or (call.choices > 1 and "n" not in able) or (call.needs and call.lacking(able) is not None):
            return NEVER_S
        return self.clock.monotonic_s() + route.serving.fallback_after_s

    def admit(self, exchange: Exchange, wait_s_max: float | None = None) -> None:
        """Give the request a replica, a place in line, or the reason why it gets neither; first what it links to.

        ``wait_s_max`` is the longest that its caller wants to stand in line, None what the settings say.
        """
        exchange.client.current = exchange
        # Not whose caller wants to wait no longer, nor what generates nothing: that is read, heard or drawn at once.
        exchange.may_make_way = wait_s_max is None and exchange.call.meter is None and exchange.job.output_max > 0
        if not exchange.may_make_way or exchange.endpoint.remote:
            exchange.job.is_seen = True
        self.exchanges[exchange] = None
        exchange.endpoint.in_flight += 1
        exchange.endpoint.arrivals += 1
        if exchange.batch_line:
            exchange.endpoint.batch_arrivals += 1
        if exchange.call.links:
            self.links.follow(exchange, lambda: self._place(exchange, wait_s_max))
        else:
            self._place(exchange, wait_s_max)

    def _place(self, exchange: Exchange, wait_s_max: float | None) -> None:
        endpoint = exchange.endpoint
        route = endpoint.route
        # Time went by where its links were followed; to go back in it would tell of a replica that reads for long.
        now_s = self.clock.monotonic_s() if exchange.call.links else exchange.arrived_s
        if now_s - endpoint.last_request_s > QUIET_S:
            # The sweep leaves quiet endpoints alone.
            endpoint.dispatcher.wake(now_s)
        endpoint.last_request_s = now_s
        is_cold = endpoint.dispatcher.is_cold_for(exchange.job)
        if endpoint.is_gone:
            # It was kept meanwhile; nobody looks after the line of an endpoint that is in no table.
            exchange.fail(errors.model_not_found(exchange.call.model))
            return
        if is_cold and route.failure:
            exchange.fail(errors.model_failed(route.name, route.failure))
            return
        if self.suspects.has_any and self._is_suspect(exchange):
            exchange.fail(errors.request_crashes_engine())
            return
        wait_s = self.settings.load_wait_s if is_cold else self.settings.queue_wait_s
        if wait_s_max is not None:
            wait_s = min(wait_s, wait_s_max)
        verdict = endpoint.dispatcher.arrive(exchange, now_s=now_s, deadline_s=now_s + wait_s)
        if endpoint.dispatcher.is_asleep:
            # Also where a fallback answers: those that it stands in for must wake.
            endpoint.wanted_until_s = now_s + self.settings.queue_wait_s
            self.presence.report_now()
        self._follow(exchange, verdict, is_cold=is_cold)

    def _follow(self, exchange: Exchange, verdict: ReplicaLoad | Verdict, *, is_cold: bool) -> None:
        """Do what the dispatcher says."""
        endpoint = exchange.endpoint
        if isinstance(verdict, ReplicaLoad):
            exchange.dispatch(verdict)
        elif verdict is Verdict.FULL:
            exchange.fail(self._full(endpoint, is_cold=is_cold))
        elif verdict is Verdict.NEVER:
            exchange.fail(waiting.never_fits(exchange))
        elif exchange in endpoint.dispatcher.line:  # else it has been delivered already
            waiting.begin(exchange, is_cold=is_cold)
            if endpoint.batch_lines and exchange.job.band < BATCH_BAND:
                making_way.make_way(exchange)
            if exchange in endpoint.dispatcher.line.light:
                making_way.trade(exchange)

    def _is_suspect(self, exchange: Exchange) -> bool:
        exchange.body = exchange.first_body = engine_request.body_of(exchange)
        return recovery.is_suspect(exchange)

    def _full(self, endpoint: EndpointState[Exchange], *, is_cold: bool) -> ApiError:
        if is_cold:
            eta_s = endpoint.route.progress.eta_s
            return errors.model_loading(endpoint.route.name, retry_after_s=eta_s if eta_s is not None else 10.0)
        return waiting.line_is_full(endpoint, self.clock.monotonic_s())

    def deliver(self, exchange: Exchange, replica: ReplicaLoad) -> bool:
        """Take a freed slot to a waiting request; say whether it was still there."""
        if exchange.is_over:
            return False
        exchange.dispatch(replica)
        return True

    def refuse(self, client: ClientConnection, refusal: ApiError, request_id: str, *, route: str = "") -> None:
        """Answer with an error, in the shape that the API of ``route`` has."""
        self.note_refusal(refusal, request_id)
        if refusal.is_of_worker:
            client.retire()
        body = body_of_error(route, refusal, request_id)
        client.respond(refusal.status, answers.error_headers(refusal, request_id, route), body)

    def salt_of(self, tenant_id: str) -> bytes:
        """Return what keeps the tenant's prompts apart from all others' in caches (S19)."""
        salt = self._salts.get(tenant_id)
        if salt is None:
            salt = self._salts[tenant_id] = engine_request.cache_salt(self._salt_key, tenant_id)
        return salt

    def tell_story(self, ask: Ask) -> Told:
        """Answer what is remembered of a request. Ids that this process did not give are none of its own."""
        story = None
        if ask.request_id.startswith(self.ids.prefix):
            story = self.memory.story(ask.request_id, self.catalog, now_s=self.clock.monotonic_s())
        return Told(ask.number, story)

    def take_tidings(self, tidings: Tidings) -> None:
        """Take over what changes too often for the table."""
        self.catalog.accounts.hear(tidings, now_unix_s=self.clock.unix_s())
        if tidings.refused:
            self.suspects.merge(tidings.refused, self.clock.monotonic_s())
        snapshots = {snapshot.replica_id: snapshot for snapshot in tidings.snapshots}
        for endpoint in self.catalog.endpoints:
            endpoint.dispatcher.observe(snapshots)
        if tidings.speeds:
            self.catalog.expect(tidings.speeds)

    def forget_heads(self) -> None:
        """Drop what was derived from the last table."""
        self.engine_heads.clear()
        self._salts.clear()

    def check_time(self, now_s: float) -> None:
        """Look at every deadline; called a few times a second, which is far cheaper than a timer a request."""
        for exchange in list(self.exchanges):
            if not exchange.is_over:
                exchange.check_time(now_s)
        for endpoint in [endpoint for endpoint in self.catalog.endpoints if not endpoint.is_quiet(now_s)]:
            dispatcher = endpoint.dispatcher
            dispatcher.relieve(now_s=now_s)
            if dispatcher.line:
                for waiter in dispatcher.line.expired(now_s):
                    # The one before it may have been all that it waited for.
                    if waiter in dispatcher.line:
                        waiting.expired(waiter)
                dispatcher.spill(now_s=now_s)
            for replica in dispatcher.probes_due(now_s):
                side_requests.probe(self, endpoint, replica)
        for request in list(self.side_requests):
            request.check_time(now_s)
        self.kept.check_time(now_s)
        self.suspects.forget_old(now_s)
        self.memory.tidy(now_s)

    def is_ready(self) -> bool:
        """Say whether it knows whom to serve, and how much."""
        return self.catalog.table is not None and self.catalog.accounts.shares.is_settled(self.clock.monotonic_s())

    def note_refusal(self, refusal: ApiError, request_id: str) -> None:
        """Count a refusal, and log it under its id so that a caller's report can be found."""
        self.metrics.refuse(refusal.code or "error")
        _log.info("refused: %s %s", refusal.status, refusal.code, extra={"request_id": request_id})

    def _answer_other(self, client: ClientConnection, request: Request, request_id: str) -> None:
        """Answer what is no inference request: health, metrics, models, or the controller's business."""
        path = request.path
        if path in ("/healthz", "/readyz", "/metrics"):
            answers.answer_probe(self, client, request, request_id)
        elif path in COUNTS:
            self._answer_count(client, request, request_id)
        elif path == "/v1/models" and request.method in (b"GET", b"HEAD"):
            answers.answer_models(self, client, request, request_id)
        elif path.startswith("/v1/models/") and request.method in (b"GET", b"HEAD"):
            answers.answer_model(self, client, request, request_id)
        elif inference_protocol.is_question(request):
            inference_protocol.answer_question(self, client, request, request_id)
        else:
            self.control.forward(client, request, request_id)

    def _answer_count(self, client: ClientConnection, request: Request, request_id: str) -> None:
        """Tell how many tokens a prompt has: an estimate, calibrated by what the model's engine told of others."""
        self._check_call(request)
        key = self.authenticate(request, Scope.INFERENCE)
        count = COUNTS[request.path]
        call = count.decode(request.body)
        endpoint = self._find(key, call, request.path)
        tokens = endpoint.prompt_tokens(count.length_of(call))
        client.respond(200, answers.json_headers(request, request_id), count.answer(tokens))


def bearer_token(request: Request) -> bytes:
    """Return the key that a request presents (``Authorization: Bearer …`` or ``x-api-key``).

    Raises:
        ApiError: 401 when there is none, or more than one.
    """
    given = request.credentials
    if len(given) != 1:
        raise errors.invalid_api_key()
    name, value = given[0]
    if name == b"x-api-key":
        return value
    if value[:7].lower() != b"bearer ":
        raise errors.invalid_api_key()
    return value[7:].strip(b" ")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
