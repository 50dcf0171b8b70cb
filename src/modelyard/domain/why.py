"""Why a request went the way it went: what a gateway remembers of it, and how the controller asks.

Numbers only, never a prompt or an answer. ``policy/stories.py`` makes words of it.
"""

import msgspec

Fact = str | int | float
REQUEST_ID_LENGTH_MAX = 80


class Bound(msgspec.Struct, frozen=True):
    """A limit that a request was checked against, as it stands now. ``kind``: ``requests_per_minute`` and so on."""

    whose: str
    kind: str
    limit: int


class Considered(msgspec.Struct, frozen=True):
    """A replica that could have had the request, with the seconds that it would have added there.

    ``others_s``: what it takes from those who run there and come after. All None: it had no room, or was to be left
    alone.
    """

    replica_id: str
    running: int
    slots: int
    is_chosen: bool
    cached_tokens: int = 0
    wait_s: float | None = None
    prefill_s: float | None = None
    others_s: float | None = None
    total_s: float | None = None


class Move(msgspec.Struct, frozen=True):
    """An attempt that failed. ``at_s``: seconds after the arrival."""

    replica_id: str
    version_id: str
    at_s: float
    reason: str


class Line(msgspec.Struct, frozen=True):
    """The waiting line as the request found it."""

    ahead: int
    """Requests before it."""
    predicted_s: float | None
    is_cold: bool
    """Whether it waited for a replica to load, rather than for one that was busy."""


class RequestStory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is remembered of one request. What is not known is empty or None."""

    request_id: str
    tenant_id: str
    """Empty: no good key was shown, so it is nobody's."""
    key_id: str
    source: str
    """The gateway that remembers it, or ``ledger``."""
    arrived_at: float
    route: str
    model: str
    endpoint_id: str
    status: int
    """The HTTP status that was answered; 499: the client left."""
    code: str
    message: str = ""
    retry_after_s: float | None = None
    facts: dict[str, Fact] = {}
    """The numbers behind a refusal."""
    bounds: tuple[Bound, ...] = ()
    reserved_tokens: int = 0
    was_sent: bool = False
    waited_s: float = 0.0
    line: Line | None = None
    version_id: str = ""
    replica_id: str = ""
    fallback: str = ""
    """Why a release answered that is there for what the others have no room for; "": one with weight did."""
    beside: int | None = None
    """Requests of this gateway that ran on the replica beside it."""
    considered: tuple[Considered, ...] = ()
    moves: tuple[Move, ...] = ()
    attempts: int = 0
    ttft_s: float | None = None
    latency_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    units: float = 0.0
    cost_nanousd: int = 0
    currency: str = "USD"
    """What amounts are in."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """The controller asks a gateway what it remembers of a request; ``number`` comes back with the answer."""

    number: int
    request_id: str


class Told(msgspec.Struct, frozen=True, tag="told"):
    """A gateway's answer; None: it does not know the request."""

    number: int
    story: RequestStory | None = None
