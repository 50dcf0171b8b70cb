"""What samples come to, under the names of ``vllm bench serve``; and what to doubt.

``ttft``: to the first piece of the answer; in an open loop from when the request was due. ``itl``: between two pieces
of one answer, all of all answers. ``tpot``: of one answer, from its first token to its last, a token after the first.
``e2el``: to the end of the answer. Throughputs are over the whole run, as vLLM's; ``steady`` leaves out the tail when
nothing was sent any more.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from modelyard.loadtest.client import Sample
from modelyard.loadtest.driver import Measured

PERCENTILES = (50, 90, 95, 99)
BEYOND_MIN = 5
"""So many samples beyond a percentile make it more than a guess: 500 for the 99th."""
CPU_SHARE_MAX = 0.8
WAKE_MS_MAX = 25.0
"""Of one wake in a hundred: a busy scheduler's turn is no bottleneck, and an idle client has some of 10 ms."""
LAG_MS_MAX = 10.0
"""Of one send in a hundred."""
STEADY_SHARE_MIN = 0.5
_Z_95 = 1.96

Figures = dict[str, Any]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ``ordered``, between its neighbours where it falls between two."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def interval(ordered: Sequence[float], percent: float) -> tuple[float, float]:
    """Return where the true percentile is with 95 %, by the order of the samples alone."""
    share, count = percent / 100, len(ordered)
    spread = _Z_95 * math.sqrt(count * share * (1 - share))
    least = max(0, math.floor(count * share - spread))
    most = min(count - 1, math.ceil(count * share + spread))
    return ordered[least], ordered[most]


def is_enough(count: int, percent: float) -> bool:
    """Say whether ``count`` samples tell a percentile."""
    return count * (1 - percent / 100) >= BEYOND_MIN - 1e-9


def spread_of(name: str, seconds: Iterable[float]) -> Figures:
    """Return the figures of one latency in milliseconds, none without samples."""
    ordered = sorted(1000 * one for one in seconds)
    if not ordered:
        return {}
    mean = sum(ordered) / len(ordered)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in ordered) / len(ordered))
    figures: Figures = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": deviation,
    }
    figures |= {f"p{percent}_{name}_ms": percentile(ordered, percent) for percent in PERCENTILES}
    figures[f"samples_{name}"] = len(ordered)
    figures[f"ci95_median_{name}_ms"] = list(interval(ordered, 50))
    figures[f"ci95_p99_{name}_ms"] = list(interval(ordered, 99))
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}


def figures_of(measured: Measured) -> Figures:
    """Return everything that a level came to."""
    level, samples = measured.level, measured.samples
    good = [one for one in samples if not one.error]
    wall_s = max(measured.ended_s - measured.begun_s, 1e-9)
    inputs, outputs = sum(one.input_tokens for one in good), sum(one.output_tokens for one in good)
    figures: Figures = {
        "level": level.name,
        "max_concurrency": level.concurrency or None,
        "request_rate": level.rate or None,
        "arrivals": level.arrivals if level.rate else None,
        "duration": round(wall_s, 4),
        "completed": len(good),
        "failed": len(samples) - len(good),
        "unfinished": measured.in_flight if measured.is_stopped else 0,
        "errors": dict(Counter(one.error for one in samples if one.error).most_common()),
        "error_details": _details(samples),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / wall_s,
        "output_throughput": outputs / wall_s,
        "total_token_throughput": (inputs + outputs) / wall_s,
        "steady": _steady(measured, good),
        "max_concurrent_requests": measured.in_flight_max,
        "is_stopped": measured.is_stopped,
        "tokens_counted": all(one.is_counted for one in good),
        "client": _client(measured, wall_s),
    }
    figures |= spread_of("ttft", (one.first_s - one.due_s for one in good if one.first_s))
    figures |= spread_of("itl", (gap for one in good for gap in one.gaps_s))
    figures |= spread_of("tpot", _times_per_token(good))
    figures |= spread_of("e2el", (one.last_s - one.due_s for one in good))
    figures["warnings"] = warnings_of(figures)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}


def warnings_of(figures: Figures) -> list[str]:
    """Return what makes the figures doubtful, each with what to do."""
    found = []
    count = figures["completed"]
    if not count:
        return ["no request succeeded; see the errors"]
    unsure = [f"p{percent}" for percent in PERCENTILES if not is_enough(count, percent)]
    if unsure:
        needed = round(BEYOND_MIN / (1 - int(unsure[0][1:]) / 100))
        found.append(
            f"{count} requests are too few samples for {', '.join(unsure)} ({unsure[0]} takes {needed}); measure longer"
        )
    client = figures["client"]
    if client["cpu_share"] > CPU_SHARE_MAX or client["p99_lag_ms"] > WAKE_MS_MAX:
        found.append(
            f"this client may be the bottleneck (CPU {client['cpu_share']:.0%} of a core, woke up to "
            f"{client['p99_lag_ms']:.0f} ms late): measure from another machine, or with less load"
        )
    if figures["request_rate"] and client["p99_send_lag_ms"] > LAG_MS_MAX:
        found.append("requests were sent late; latencies count from when they were due, so the waits are in them")
    if figures["steady"] is None and not figures["is_stopped"]:
        found.append("most of the run was its tail, when nothing was sent any more; measure longer")
    if figures["failed"]:
        found.append(f"{figures['failed']} requests failed; latencies are of the others")
    if not figures["tokens_counted"]:
        found.append("the server reports no usage: tokens are pieces of the stream")
    return found


def _times_per_token(good: Iterable[Sample]) -> Iterable[float]:
    for one in good:
        if one.first_s and one.output_tokens > 1:
            yield (one.last_s - one.first_s) / (one.output_tokens - 1)


def _steady(measured: Measured, good: Sequence[Sample]) -> Figures | None:
    """Return the throughput until the last request was sent, None where that is the lesser part of the run."""
    wall_s, steady_s = measured.ended_s - measured.begun_s, measured.issued_s - measured.begun_s
    if steady_s <= 0 or steady_s < STEADY_SHARE_MIN * wall_s:
        return None
    outputs = sum(one.output_tokens * _share_until(one, measured.issued_s) for one in good)
    ended = sum(one.last_s <= measured.issued_s for one in good)
    return {
        "duration": round(steady_s, 4),
        "request_throughput": round(ended / steady_s, 4),
        "output_throughput": round(outputs / steady_s, 4),
    }


def _share_until(sample: Sample, until_s: float) -> float:
    """Return the part of an answer that was there at a time."""
    if sample.last_s <= until_s:
        return 1.0
    if not sample.first_s or sample.first_s > until_s:
        return 0.0
    at_s, pieces = sample.first_s, 1
    for gap_s in sample.gaps_s:
        at_s += gap_s
        if at_s > until_s:
            break
        pieces += 1
    return pieces / sample.pieces


def _client(measured: Measured, wall_s: float) -> Figures:
    sends = array("d", sorted(one.sent_s - one.due_s for one in measured.samples if one.sent_s))
    lags = sorted(measured.lags_s)
    return {
        "cpu_share": round(measured.cpu_s / wall_s, 4),
        "p99_lag_ms": round(1000 * percentile(lags, 99), 3) if lags else 0.0,
        "p99_send_lag_ms": round(1000 * percentile(sends, 99), 3) if sends else 0.0,
    }


def _details(samples: Iterable[Sample]) -> dict[str, str]:
    """Return what a request of each kind of error was told."""
    found: dict[str, str] = {}
    for one in samples:
        if one.error and one.detail:
            found.setdefault(one.error, one.detail)
    return found
