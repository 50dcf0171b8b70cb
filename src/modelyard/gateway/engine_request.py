"""The request that an engine gets: written from scratch, from what was decoded and what the gateway knows.

No header of the client and no field that nobody listed can reach an engine
(``reference/security.md`` S3, S25).
"""

import hashlib
import hmac
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from modelyard.gateway import aliases
from modelyard.gateway.openai.call import INCLUDE_USAGE, Call, drop_extras
from modelyard.policy.dispatch import ReplicaLoad

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange
    from modelyard.gateway.flow import Gateway

_encode = msgspec.json.Encoder().encode
_MODEL = "{model}"
"""Where the engine's name of the model stands in a path."""


def head_of(
    gateway: "Gateway",
    replica: ReplicaLoad,
    route: str,
    *,
    request_id: str,
    length: int,
    content_type: bytes = b"application/json",
) -> bytes:
    """Return the head of the request to ``replica`` for a body of ``length`` bytes."""
    heads = gateway.engine_heads
    key = (replica.route.id, route)
    head = heads.get(key)
    if head is None:
        target = replica.route
        head = heads[key] = (b"POST %b HTTP/1.1\r\nhost: %b:%d\r\nauthorization: Bearer %b\r\nx-request-id: ") % (
            route.encode(),
            target.host.encode(),
            target.port,
            target.secret.encode(),
        )
    return b"%b%b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (
        head, request_id.encode(), content_type, length,
    )  # fmt: skip


def body_of(exchange: "Exchange") -> bytes:
    """Return the body; streams are always asked for their usage, whatever the client asked."""
    call = exchange.call
    name = exchange.endpoint.route.name
    if call.payload is not None or call.payload_for is not None:
        return _payload_of(call, name)
    request = call.request
    if call.model != name:
        # Called by its id; an engine knows the name only.
        request.model = name  # type: ignore[attr-defined]  # every request without a payload has one
    extras = exchange.endpoint.route.engine_extras
    if call.is_stream:
        if hasattr(request, "stream_options"):
            request.stream_options = INCLUDE_USAGE
    elif getattr(request, "stream_options", None) is not None:
        request.stream_options = None  # type: ignore[attr-defined]  # it has them
    if dropped := drop_extras(request, extras):
        call.ignored += tuple(dropped)
    if call.ignored:
        exchange.gateway.metrics.ignored_fields += len(call.ignored)
    body = _encode(request)
    if "cache_salt" in extras:
        body = b'%b,"cache_salt":"%b"}' % (body[:-1], exchange.gateway.salt_of(exchange.key.record.tenant_id))
    elif "cache_prompt" in extras and exchange.endpoint.route.is_shared:
        # No salt keeps the tenants of this engine apart; only not caching at all does.
        body = b'%b,"cache_prompt":false}' % body[:-1]
    return body


def _payload_of(call: Call, name: str) -> bytes:
    """Return the body of a call that is not encoded from its request."""
    return (call.payload or b"") if call.payload_for is None else call.payload_for(name)


def path_at(exchange: "Exchange", replica: ReplicaLoad) -> str:
    """Return where ``replica`` is called: under the name that it calls the model by, where that is in the path."""
    route = exchange.call.engine_route or exchange.route
    if _MODEL not in route:
        return route
    return route.replace(_MODEL, quote(replica.route.model_name or exchange.endpoint.route.name, safe=""))


def body_at(exchange: "Exchange", body: bytes, replica: ReplicaLoad) -> bytes:
    """Return ``body`` as ``replica`` wants it, which may call the model by another name."""
    alias, payload_for = replica.route.model_name, exchange.call.payload_for
    if alias and payload_for is not None:
        return payload_for(alias)  # not JSON, or without a name in it
    return aliases.for_engine(body, exchange.endpoint.route.name, alias)


def unsalted(body: bytes) -> bytes:
    """Return what of an engine's body is the same for every tenant that asks the same."""
    # The quotation marks of a caller's own text are escaped, so this is the gateway's.
    return body.rpartition(b',"cache_salt":')[0] or body


def cache_salt(salt_key: bytes, tenant_id: str) -> bytes:
    """Return what keeps the tenant's prompts apart from all others' in an engine's cache (S19)."""
    return hmac.digest(salt_key, tenant_id.encode(), hashlib.sha256).hex()[:32].encode()
