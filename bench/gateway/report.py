"""The one table of ``bench.gateway``, and its figures as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

REFERENCE = "nginx"


@dataclass(slots=True)
class Figures:
    """Everything measured of one peer: a list of rounds per cell, and the figures taken once."""

    name: str
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)

    def cpu_us(self, cell: str) -> float | None:
        """Return the median CPU per unit of a cell."""
        found = [one["cpu_us"] for one in self.rounds.get(cell, ()) if one["cpu_us"]]
        return median(found) if found else None

    def ratio(self, cell: str, reference: "Figures") -> float | None:
        """Return the median over rounds of this peer's CPU per unit to the reference's in the same round."""
        pairs = zip(self.rounds.get(cell, ()), reference.rounds.get(cell, ()), strict=False)
        found = [mine["cpu_us"] / other["cpu_us"] for mine, other in pairs if mine["cpu_us"] and other["cpu_us"]]
        return median(found) if found else None

    def middle(self, cell: str, figure: str) -> float | None:
        """Return the median of one of the load generator's own figures."""
        found = [one[figure] for one in self.rounds.get(cell, ())]
        return median(found) if found else None

    def failed(self) -> int:
        """Return all answers that were not what was asked for."""
        return sum(one["failed"] for rounds in self.rounds.values() for one in rounds)


def as_json(figures: Sequence[Figures]) -> dict[str, Any]:
    """Return every figure of every round, and the medians and ratios of the table."""
    reference = next((one for one in figures if one.name == REFERENCE), None)
    return {
        one.name: {
            "cpu_us": {cell: one.cpu_us(cell) for cell in one.rounds},
            "ratio_to_nginx": {cell: one.ratio(cell, reference) for cell in one.rounds} if reference else {},
            "once": one.once,
            "failed": one.failed(),
            "rounds": one.rounds,
        }
        for one in figures
    }


def table(figures: Sequence[Figures]) -> str:
    """Return the table."""
    head = (
        *("gateway", "JSON µs", "× nginx", "chunk µs", "× nginx", "284 KB µs", "× nginx", "1k/s µs", "× nginx"),
        *("1k/s p50 / p99 ms", "relay p50 / p99 ms", "KB / idle stream", "KB / stalled client"),
        *("cancelled: before 1st byte", "in stream", "failed"),
    )
    reference = next((one for one in figures if one.name == REFERENCE), None)
    rows = [_row(one, reference) for one in figures]
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    lines = [_line(head, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _row(one: Figures, reference: Figures | None) -> tuple[str, ...]:
    cells: list[str] = [one.name]
    for cell in ("json", "chunk", "big", "rate"):
        cells += [_number(one.cpu_us(cell), 1), _number(one.ratio(cell, reference) if reference else None, 2)]
    cells += [_pair(one, "rate", "p50", "p99"), _pair(one, "chunk", "relay_p50", "relay_p99")]
    cells += [_number(one.once.get("idle_stream_kb"), 1), _number(one.once.get("stalled_client_kb"), 0)]
    cells += [_percent(one.once.get("cancelled_before")), _percent(one.once.get("cancelled_in")), str(one.failed())]
    return tuple(cells)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _pair(one: Figures, cell: str, low: str, high: str) -> str:
    found = [one.middle(cell, low), one.middle(cell, high)]
    return " / ".join("–" if value is None else f"{value / 1000:.2f}" for value in found)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if not at else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *rest])} |"
