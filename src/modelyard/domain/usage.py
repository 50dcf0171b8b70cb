"""What is metered: journal records, prices and ledger rows.

Money is whole nano-dollars (1e-9 USD): a price of 0.15 USD per million tokens
is 150 nano-dollars a token, so no rounding is ever added up. What is not
counted in tokens (seconds of sound, pictures, searches) is counted in units,
kept as whole millionths where they are added up.

Journal records are arrays: a new field goes to the end and has a default, so
that segments written before it still decode.
"""

from enum import StrEnum

import msgspec

NANO_PER_USD = 1_000_000_000
MICRO_PER_UNIT = 1_000_000


class Unit(StrEnum):
    """What is counted beside tokens; a request has at most one kind."""

    NONE = ""
    SECONDS = "seconds"
    IMAGES = "images"
    CHARACTERS = "characters"
    SEARCHES = "searches"
    PAIRS = "pairs"
    """Two texts that were compared."""
    REQUESTS = "requests"
    """Calls of models that have nothing else to count: tensors in, tensors out."""


class UsageStatus(StrEnum):
    """How a dispatched request ended; the source's ``inference_requests.status`` made exact."""

    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    CLIENT_CLOSED = "client_closed"
    INTERRUPTED = "interrupted"


class Price(msgspec.Struct, frozen=True, array_like=True):
    """Nano-dollars per one million tokens, and per one million units.

    Output is all that was generated, reasoning too. The currency is the installation's (``billing.currency``); "dollar"
    in a name stands for one of it.
    """

    input: int = 0
    cached_input: int = 0
    output: int = 0
    unit: int = 0
    request: int = 0
    """Nano-dollars of one request in which anything was counted."""
    batch_micro: int | None = None
    """What a line of a batch pays of all that, in millionths; None: what the platform says (``batch.price_factor``)."""


class Intent(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request about to be dispatched. ``at`` is unix seconds of its arrival."""

    request_id: str
    at: float
    tenant_id: str
    key_id: str
    endpoint_id: str
    model: str
    version_id: str
    route: str
    is_stream: bool
    prompt_estimate: int
    reserved_tokens: int
    price: Price
    batch_line: str = ""
    """Which line of which batch it is a run of (``batch_x/17``): the ledger charges a line once."""
    factor_micro: int = MICRO_PER_UNIT
    """Millionths of the usual price that ``price`` is, for whoever wants to show it."""


LINE_REPEATED = "batch_line_repeated"
"""The error code of a ledger row that is not charged, because another run of its line of a batch is."""


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Progress of a stream: what would be billed if nothing more were known."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The end of a request: what is billed. ``is_estimated``: counted by the gateway, not told by the engine.

    ``version_id`` and ``price`` are of the release that answered, where that is not the one of its intent.
    """

    request_id: str
    at: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    status: UsageStatus
    http_status: int
    error_code: str
    ttft_ms: float | None
    latency_ms: float
    replica_id: str
    attempts: int
    is_estimated: bool
    units: float = 0.0
    unit: Unit = Unit.NONE
    version_id: str = ""
    price: Price | None = None
    reasoning_tokens: int = 0
    """Of the completion tokens."""
    audio_input_tokens: int = 0
    """Of the prompt tokens."""
    audio_output_tokens: int = 0
    """Of the completion tokens."""


JournalRecord = Intent | Mark | Settle


class UsageRow(msgspec.Struct, frozen=True):
    """One row of the ledger: the source's ``inference_requests``, one a request id."""

    request_id: str
    tenant_id: str
    key_id: str
    endpoint_id: str
    model: str
    version_id: str
    replica_id: str
    route: str
    is_stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanousd: int
    status: UsageStatus
    http_status: int
    error_code: str
    ttft_ms: float | None
    latency_ms: float
    attempts: int
    is_estimated: bool
    created_at: float
    settled_at: float
    units: float = 0.0
    unit: Unit = Unit.NONE
    reasoning_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    batch_id: str = ""


class UsageFilter(msgspec.Struct, frozen=True):
    """Which rows; every field that is given must match, and an empty one matches all."""

    tenant_ids: tuple[str, ...] = ()
    key_ids: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    endpoint_ids: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    is_batch: bool | None = None


EVERYTHING = UsageFilter()


class Moment(msgspec.Struct, frozen=True, order=True):
    """A place in the ledger's order of time: when a request arrived, and its id."""

    at: float
    request_id: str = ""


class UsageBucket(msgspec.Struct, frozen=True, gc=False):
    """A sum over ledger rows. ``group`` maps each asked dimension to its value, as in ``{"model": "smol"}``, and
    ``units`` each kind of unit that was used to how much of it."""

    group: dict[str, str]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanousd: int
    units: dict[str, float] = {}
    reasoning_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    units_micro: dict[str, int] = {}
    """``units`` in whole millionths, which add up exactly."""
