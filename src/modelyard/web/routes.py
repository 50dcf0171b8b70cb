"""How a route is declared: one value from which the server and the documentation are made.

A ``Route`` without a scope cannot be written, so nothing is open by accident;
the few public pages are plain handlers on an explicit list (``web/app.py``).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from modelyard.domain.tenants import Identity, Scope
from modelyard.web.gathering import Flaw

B = TypeVar("B")
Q = TypeVar("Q")
A = TypeVar("A")

JSON = "application/json"


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No body, or no query parameters."""


@dataclass(frozen=True, slots=True)
class Call(Generic[B, Q]):
    """One request, decoded and allowed."""

    identity: Identity
    body: B
    query: Q
    request: Request
    flaws: Sequence[Flaw] = ()
    """What does not fit of the body, on a route that ``gathers``."""

    def path(self, name: str) -> str:
        """Return the path parameter ``name``."""
        return str(self.request.path_params[name])


@dataclass(frozen=True, slots=True)
class Route(Generic[B, Q, A]):
    """A route of the API.

    ``handler`` returns the answer, which becomes JSON with ``status``, or a
    response of its own. ``path`` may hold ``{name}`` and ``{name:path}``; the
    second one also matches slashes.
    """

    method: str
    path: str
    scope: Scope
    summary: str
    handler: Callable[[Call[B, Q]], Awaitable[A | Response]]
    body: type[B]
    query: type[Q]
    answer: type[A]
    status: int = 200
    example: Any = None
    media_type: str = JSON
    form: type[msgspec.Struct] | None = None
    """What a multipart form has, where ``handler`` reads the body itself; for the documentation."""
    gathers: bool = False
    """A body with fields that do not fit goes to the handler, which refuses it together with what else is wrong."""


AnyRoute = Route[Any, Any, Any]
