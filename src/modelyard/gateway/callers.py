"""Requests that another plane makes for whoever owns them: lines of batches.

They come on a unix socket in the data directory that only this user can open,
with the internal token, and name the key that they are made for; no secret of
a key is kept anywhere for it. From there on they are requests like all others:
the same permissions, limits, budget and line, in the last band, and for the
price of a batch. On the public port the same headers mean nothing.
"""

import contextlib
import hmac
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from modelyard import errors
from modelyard.domain.batches import CALLER_HEADER, Caller
from modelyard.domain.tenants import INTERNAL_TOKEN_HEADER, Scope
from modelyard.errors import StartupError
from modelyard.gateway.accounts import KeyState
from modelyard.gateway.head import Request
from modelyard.gateway.routes import decoder_of
from modelyard.gateway.server import ClientConnection

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway

BACKLOG = 256
MODELS_PATH = "/v1/models/"
_TOKEN = INTERNAL_TOKEN_HEADER.encode()
_CALLER = CALLER_HEADER.encode()
_caller = msgspec.json.Decoder(Caller).decode


class CallerConnection(ClientConnection):
    """A connection of a plane that speaks for others."""

    __slots__ = ("_token",)

    def __init__(self, gateway: "Gateway", token: bytes) -> None:
        super().__init__(gateway)
        self._token = token

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Tell beside the answer how long the request waited, and how often it made way: its plane paces itself."""
        exchange = self.current
        queued_s = getattr(exchange, "queued_s", 0.0)
        gave_way = getattr(exchange, "gave_way", 0)
        told = b"x-modelyard-queued-ms: %d\r\nx-modelyard-gave-way: %d\r\n" % (queued_s * 1000, gave_way)
        super().respond(status, headers + told, body)

    def _check_head(self, request: Request) -> None:
        super()._check_head(request)
        if request.header(_TOKEN) is None or not hmac.compare_digest(request.header(_TOKEN) or b"", self._token):
            raise errors.invalid_api_key()
        is_model = request.method == b"GET" and request.path.startswith(MODELS_PATH)
        if not is_model and decoder_of(request.path) is None:
            raise errors.unknown_url(request.method.decode("latin-1"), request.path)
        try:
            request.caller = _caller(request.header(_CALLER) or b"")
        except (msgspec.MsgspecError, ValueError):
            raise errors.invalid_api_key() from None


def key_of(gateway: "Gateway", caller: Caller, now_unix_s: float) -> KeyState:
    """Return the key that another plane asks for, if it may still ask for anything.

    Raises:
        ApiError: 401 where it may not any more, 403 for a suspended tenant, 503 when that cannot be judged now.
    """
    state = gateway.catalog.accounts.by_id(caller.key_id)
    if state is None and not gateway.presence.is_authoritative:
        raise errors.auth_unavailable()
    record = None if state is None else state.record
    is_over = record is None or gateway.catalog.accounts.is_over(record, now_unix_s)
    if state is None or record is None or record.revoked_at is not None or is_over:
        raise errors.batch_key_gone()
    if state.tenant.record.is_suspended:
        raise errors.tenant_suspended()
    if not state.may_infer:
        raise errors.permission_denied(Scope.INFERENCE)
    return state


def listen(path: Path) -> socket.socket:
    """Return a listening socket at ``path``, mode 0600; what a killed worker left there is replaced.

    Raises:
        StartupError: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before we listen
        listener.listen(BACKLOG)
        listener.settimeout(0)
    except OSError as error:
        listener.close()
        raise StartupError(f"Cannot listen on {path}: {error}. Choose a shorter or writable --data-dir.") from error
    return listener


def close(path: Path, listener: socket.socket) -> None:
    """Take the name away, so that nobody tries it any more."""
    listener.close()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
