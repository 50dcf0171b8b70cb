"""One metrics page of several llama.cpp processes, of which some have ended. Pure.

Counters go on when a process is replaced, as if it had not been; gauges are the
newest's, but for requests that run or wait, which add up.
"""

from collections.abc import Mapping, Sequence

from modelyard.engines.pages import read_samples

RUNNING = "llamacpp:requests_processing"
WAITING = "llamacpp:requests_deferred"
_COUNTER_ENDS = "_total"
"""llama.cpp calls a maximum (``n_tokens_max``) a counter too, so its own types are not asked."""


def counters(page: str) -> dict[str, float]:
    """Return the counters of a page."""
    return {name: value for name, value in read_samples(page).items() if name.endswith(_COUNTER_ENDS)}


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of two sets of counters."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {*one, *other}}


def joined(pages: Sequence[str], ended: Mapping[str, float], *, waiting: int, more: Mapping[str, float]) -> str:
    """Return the page of all: ``pages`` of those that live, the newest last, and the counters of the ``ended``.

    ``waiting`` are requests that no process has got yet; ``more`` are gauges of the front's own.
    """
    totals = dict(ended)
    gauges: dict[str, float] = {}
    running = deferred = 0.0
    for page in pages:
        samples = read_samples(page)
        counted = counters(page)
        totals = added(totals, counted)
        gauges = {name: value for name, value in samples.items() if name not in counted}
        running += gauges.get(RUNNING, 0.0)
        deferred += gauges.get(WAITING, 0.0)
    if pages:
        gauges |= {RUNNING: running, WAITING: deferred + waiting}
    lines = [f"# TYPE {name} counter\n{name} {value:.16g}" for name, value in sorted(totals.items())]
    lines += [f"# TYPE {name} gauge\n{name} {value:.16g}" for name, value in sorted({**gauges, **more}.items())]
    return "\n".join(lines) + "\n"
