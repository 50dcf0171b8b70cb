"""The settings of batches. A part of ``config``, which see."""

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0, le=31_536_000)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Window = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,5}[smhd]$")]
Lease = Annotated[float, msgspec.Meta(ge=1, le=3600)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Batches: their workers, and what they cost."""

    workers: Count = 1
    """Processes that work on batches; they share all of them. 0: batches wait until there is one elsewhere."""
    concurrency: PositiveInt = 64
    """Lines that one process has with the gateway at once, most of them in its line: enough to fill what is idle."""
    price_factor: Share = 0.5
    """What a line of a batch costs, as a share of the same request in real time; prices may set a ``batch_factor``."""
    shard_lines: Annotated[int, msgspec.Meta(ge=1, le=50_000)] = 500
    """Lines of a batch that one process works on under one lease."""
    lease_s: Lease = 30.0
    """Time without a sign of a process after which others take over what it worked on."""
    retries_max: Count = 3
    """Times that a line is tried again after an engine failed it; limits and full lines are waited for without end."""
    open_max: PositiveInt = 1_000
    """Batches of one tenant that are not over; the next one is refused with 429."""
    completion_windows: tuple[Window, ...] = ("24h",)
    """Windows that a batch may ask for, like ``1h``; OpenAI has the one."""
    output_ttl_s: Positive = 2_592_000.0
    """Time that output and error files are kept where a batch does not say; OpenAI keeps them thirty days."""
