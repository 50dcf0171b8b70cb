"""What an endpoint is asked for without the lines of batches, which have a day and make way for everybody.

An endpoint that counts them as demand (``batch_scales``, the default) gets replicas for them, and its replicas look
busy for as long as there are any: a batch that fills what is idle then opens the gate of utilisation, and starts more
of what it was to fill. Without, they run on what the others need anyhow. One replica stays awake for them.
"""

import msgspec

from modelyard.policy.scaling import Seen


def without_batches(seen: Seen, *, queued: int, running: int) -> Seen:
    """Return ``seen`` without ``queued`` and ``running`` lines of batches, which it counts.

    What engines and rates tell is of all requests; their share of those that run is taken off. How long answers take
    stays: gateways count none of the time that lines wait (``gateway/memory.py``).
    """
    if queued <= 0 and running <= 0:
        return seen
    in_flight = max(seen.in_flight - running, 0)
    share = in_flight / seen.in_flight if seen.in_flight else 1.0
    left = max(seen.queued - queued, 0)
    if not left and not in_flight:
        in_flight = 1
    return msgspec.structs.replace(
        seen,
        queued=left,
        in_flight=in_flight,
        utilization=_part(seen.utilization, share),
        kv_use=_part(seen.kv_use, share),
        requests_s=_part(seen.requests_s, share),
        tokens_s=_part(seen.tokens_s, share),
        # A wait that is predicted for one more is that of a line; without one there is none.
        wait_s=seen.wait_s if left else 0.0,
    )


def _part(value: float | None, share: float) -> float | None:
    return None if value is None else value * share
