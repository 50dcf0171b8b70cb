"""What clients of the Open Inference Protocol ask beside ``infer``: does the server live, is a model ready, what is it.

``/v2/health/live`` and ``/v2/health/ready`` need no key, as ``/healthz`` and
``/readyz`` do; a model is told of to whoever may call it. A model that is not
loaded is not ready, though a request for it would be held until it is. What
goes in and comes out of a model its engine says.
"""

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import msgspec

from modelyard import errors
from modelyard.domain.tenants import Scope
from modelyard.errors import ApiError
from modelyard.gateway.answers import error_headers, json_headers
from modelyard.gateway.openai.tensors import PREFIX, ROUTE
from modelyard.gateway.responses import ResponseHead
from modelyard.gateway.upstream import UpstreamConnection

if TYPE_CHECKING:
    from modelyard.gateway.catalog import EndpointState
    from modelyard.gateway.exchange import Exchange
    from modelyard.gateway.flow import Gateway
    from modelyard.gateway.server import ClientConnection, Request

LIVE, READY = "/v2/health/live", "/v2/health/ready"
METADATA_TIMEOUT_S = 10.0
_SUFFIX = "/ready"


def is_question(request: "Request") -> bool:
    """Say whether this is asked here."""
    path = request.path
    if request.method not in (b"GET", b"HEAD"):
        return False
    return path in (LIVE, READY) or (path.startswith(PREFIX) and len(path) > len(PREFIX))


def answer_question(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer it.

    Raises:
        ApiError: 404 for a model that the key may not call.
    """
    headers = json_headers(request, request_id)
    if request.path == LIVE:
        client.respond(200, headers, b'{"live":true}')
        return
    if request.path == READY:
        is_ready = gateway.is_ready()
        client.respond(200 if is_ready else 503, headers, b'{"ready":true}' if is_ready else b'{"ready":false}')
        return
    key = gateway.authenticate(request, Scope.INFERENCE)
    name = unquote(request.path.removeprefix(PREFIX).removesuffix(_SUFFIX))
    endpoint = gateway.catalog.endpoint(key, name)
    if endpoint is None:
        raise errors.model_not_found(name)
    if request.path.endswith(_SUFFIX):
        is_ready = not endpoint.dispatcher.is_cold
        client.respond(200 if is_ready else 503, headers, b'{"ready":true}' if is_ready else b'{"ready":false}')
    elif ROUTE not in endpoint.route.routes:
        raise errors.route_unsupported(name, request.path)
    else:
        _Metadata(gateway, client, endpoint, request_id, headers).ask()


class _Metadata:
    """What an engine is asked of a model for a client; it is neither billed nor counted against the replica."""

    __slots__ = ("_client", "_connection", "_endpoint", "_gateway", "_headers", "_is_over", "_replica", "_request_id",
                 "_timer")  # fmt: skip

    def __init__(
        self,
        gateway: "Gateway",
        client: "ClientConnection",
        endpoint: "EndpointState[Exchange]",
        request_id: str,
        headers: bytes,
    ) -> None:
        ready = [one for one in endpoint.dispatcher.replicas if not one.is_draining and not one.is_gone]
        if not ready:
            raise errors.model_not_loaded(endpoint.route.name)
        self._gateway = gateway
        self._client = client
        self._endpoint = endpoint
        self._request_id = request_id
        self._headers = headers
        self._replica = ready[0].route
        self._connection: UpstreamConnection | None = None
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<question {self._request_id} of {self._endpoint.route.name} at {self._replica.id}>"

    def ask(self) -> None:
        """Send it, on a connection that waits or a new one."""
        self._client.current = self
        self._timer = asyncio.get_running_loop().call_later(METADATA_TIMEOUT_S, self._fail)
        address = (self._replica.host, self._replica.port)
        connection = self._gateway.pool.take(address)
        if connection is None:
            self._gateway.pool.open(address, self, timeout_s=self._gateway.settings.connect_timeout_s)
        else:
            self.connected(connection)

    # --- the engine's side ---

    def connected(self, connection: UpstreamConnection) -> None:
        """Send."""
        if self._is_over:
            self._gateway.pool.put(connection)
            return
        self._connection = connection
        target = self._replica
        name = quote(target.model_name or self._endpoint.route.name, safe="")
        lines = (
            f"GET {PREFIX}{name} HTTP/1.1",
            f"host: {target.host}:{target.port}",
            f"authorization: Bearer {target.secret}",
            f"x-request-id: {self._request_id}",
        )
        connection.send(self, "\r\n".join((*lines, "", "")).encode())

    def unreachable(self, address: tuple[str, int], reason: str) -> None:
        """End."""
        self._fail()

    def wants_stream(self, head: ResponseHead) -> bool:
        """Take it whole: it is small."""
        return False

    def answer(self, head: ResponseHead, body: bytes) -> None:
        """Pass it on, under our name of the model."""
        self._connection = None
        try:
            told = msgspec.json.decode(body, type=dict[str, Any]) if head.status == 200 else {}
        except (msgspec.MsgspecError, RecursionError):
            told = {}
        if not isinstance(told.get("inputs"), list) or not isinstance(told.get("outputs"), list):
            self._fail(errors.bad_engine_response(f"status {head.status}"))
            return
        fields = ("versions", "platform", "inputs", "outputs")
        shown = {"name": self._endpoint.route.name} | {one: told[one] for one in fields if one in told}
        self._end(200, self._headers, msgspec.json.encode(shown))

    def stream(self, data: bytes) -> None:
        """Cannot happen: no stream was wanted."""

    def lost(self, *, is_clean: bool, has_answered: bool) -> None:
        """End."""
        self._connection = None
        self._fail()

    def malformed(self, reason: str) -> None:
        """End."""
        self._connection = None
        self._fail()

    # --- the client's side ---

    def client_left(self) -> None:
        """Forget it."""
        self._end(0, b"", b"")

    def client_paused(self) -> None:
        """Go on: the answer is small."""

    def client_resumed(self) -> None:
        """Go on."""

    def _fail(self, error: ApiError | None = None) -> None:
        error = error or errors.engine_unavailable(self._endpoint.route.name)
        self._end(error.status, error_headers(error, self._request_id), error.body())

    def _end(self, status: int, headers: bytes, body: bytes) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if status:
            self._client.respond(status, headers, body)
