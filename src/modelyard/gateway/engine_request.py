"""The request that an engine gets: written from scratch, from what was decoded and what the gateway knows.

No header of the client and no field that nobody listed can reach an engine
(``reference/security.md`` S3, S25).
"""

import hashlib
import hmac
from typing import TYPE_CHECKING

import msgspec

from modelyard.gateway.openai.call import INCLUDE_USAGE, drop_extras
from modelyard.policy.dispatch import ReplicaLoad

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange

_encode = msgspec.json.Encoder().encode


def head_of(exchange: "Exchange", replica: ReplicaLoad, length: int) -> bytes:
    """Return the head of the request to ``replica`` for a body of ``length`` bytes."""
    heads = exchange.gateway.engine_heads
    key = (replica.route.id, exchange.route)
    head = heads.get(key)
    if head is None:
        route = replica.route
        head = heads[key] = (
            b"POST %b HTTP/1.1\r\nhost: %b:%d\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\nx-request-id: "
        ) % (exchange.route.encode(), route.host.encode(), route.port, route.secret.encode())
    return b"%b%b\r\ncontent-length: %d\r\n\r\n" % (head, exchange.request_id.encode(), length)


def body_of(exchange: "Exchange") -> bytes:
    """Return the body; streams are always asked for their usage, whatever the client asked."""
    call = exchange.call
    request = call.request
    extras = exchange.endpoint.route.engine_extras
    if call.is_stream:
        request.stream_options = INCLUDE_USAGE  # type: ignore[attr-defined]  # streams have it
    elif hasattr(request, "stream_options"):
        request.stream_options = None
    call.ignored += tuple(drop_extras(request, extras))
    if call.ignored:
        exchange.gateway.metrics.ignored_fields += len(call.ignored)
    body = _encode(request)
    if "cache_salt" in extras:
        body = b'%b,"cache_salt":"%b"}' % (body[:-1], _cache_salt(exchange))
    return body


def _cache_salt(exchange: "Exchange") -> bytes:
    """Return what keeps the tenant's prompts apart from all others' in the engine's cache (S19)."""
    tenant_id = exchange.key.record.tenant_id.encode()
    return hmac.digest(exchange.gateway.salt_key, tenant_id, hashlib.sha256).hex()[:32].encode()
