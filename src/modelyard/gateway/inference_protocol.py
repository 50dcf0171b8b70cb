"""What clients of the Open Inference Protocol ask beside ``infer``: does the server live, is a model ready.

``/v2/health/live`` and ``/v2/health/ready`` need no key, as ``/healthz`` and
``/readyz`` do; a model is told of to whoever may call it. A model that is not
loaded is not ready, though a request for it would be held until it is. What
goes in and comes out of a model is known to its engine only, so there is no
``/v2/models/{model}``.
"""

from typing import TYPE_CHECKING
from urllib.parse import unquote

from modelyard import errors
from modelyard.domain.tenants import Scope
from modelyard.gateway.answers import json_headers
from modelyard.gateway.openai.tensors import PREFIX

if TYPE_CHECKING:
    from modelyard.gateway.flow import Gateway
    from modelyard.gateway.server import ClientConnection, Request

LIVE, READY = "/v2/health/live", "/v2/health/ready"
_SUFFIX = "/ready"


def is_question(request: "Request") -> bool:
    """Say whether this is asked here."""
    path = request.path
    if request.method not in (b"GET", b"HEAD"):
        return False
    return path in (LIVE, READY) or (path.startswith(PREFIX) and path.endswith(_SUFFIX))


def answer_question(gateway: "Gateway", client: "ClientConnection", request: "Request", request_id: str) -> None:
    """Answer it.

    Raises:
        ApiError: 404 for a model that the key may not call.
    """
    headers = json_headers(request, request_id)
    if request.path == LIVE:
        client.respond(200, headers, b'{"live":true}')
    elif request.path == READY:
        is_ready = gateway.is_ready()
        client.respond(200 if is_ready else 503, headers, b'{"ready":true}' if is_ready else b'{"ready":false}')
    else:
        key = gateway.authenticate(request, Scope.INFERENCE)
        name = unquote(request.path[len(PREFIX) : -len(_SUFFIX)])
        endpoint = gateway.catalog.endpoint(key, name)
        if endpoint is None:
            raise errors.model_not_found(name)
        is_ready = not endpoint.dispatcher.is_cold
        client.respond(200 if is_ready else 503, headers, b'{"ready":true}' if is_ready else b'{"ready":false}')
