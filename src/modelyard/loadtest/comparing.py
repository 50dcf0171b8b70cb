"""Two runs beside one another: of each level that both have, the ratio of the second to the first."""

from collections.abc import Mapping
from typing import Any

from modelyard.loadtest.statistics import is_enough

COMPARED = (
    ("request_throughput", "requests/s", True),
    ("output_throughput", "output tokens/s", True),
    ("median_ttft_ms", "TTFT p50 ms", False),
    ("p99_ttft_ms", "TTFT p99 ms", False),
    ("median_itl_ms", "ITL p50 ms", False),
    ("p99_itl_ms", "ITL p99 ms", False),
    ("median_tpot_ms", "TPOT p50 ms", False),
    ("median_e2el_ms", "E2E p50 ms", False),
    ("p99_e2el_ms", "E2E p99 ms", False),
)
"""Figure, what people call it, and whether more of it is better."""
_SAME_WITHIN = 0.02


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each figure of each level in both.

    ``overlaps``: their intervals do, so chance may be all. ``is_enough``: both have the samples that a percentile
    takes; null where that is not known, or the figure is none.
    """
    of_level = {level["level"]: level for level in second["levels"]}
    rows: list[dict[str, Any]] = []
    for before in first["levels"]:
        after = of_level.get(before["level"])
        for name, title, is_more_better in COMPARED if after else ():
            one, other = before.get(name), after.get(name) if after else None
            if not one or other is None:
                continue
            rows.append(
                {
                    "level": before["level"],
                    "figure": name,
                    "title": title,
                    "first": one,
                    "second": other,
                    "ratio": round(other / one, 4),
                    "verdict": _verdict(other / one, is_more_better=is_more_better),
                    "overlaps": _overlaps(before.get(f"ci95_{name}"), after.get(f"ci95_{name}") if after else None),
                    "is_enough": _are_enough(name, before, after) if after else None,
                }
            )
    return rows


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return what was not asked alike, so that the runs do not compare."""
    one, other = first.get("workload", {}), second.get("workload", {})
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name) and name != "seed")


def _verdict(ratio: float, *, is_more_better: bool) -> str:
    if abs(ratio - 1) <= _SAME_WITHIN:
        return "same"
    return "better" if (ratio > 1) == is_more_better else "worse"


def _are_enough(figure: str, *levels: Mapping[str, Any]) -> bool | None:
    what, _, rest = figure.partition("_")
    counted = f"samples_{rest.removesuffix('_ms')}"
    if not figure.endswith("_ms") or not all(level.get(counted) for level in levels):
        return None
    percent = 50 if what == "median" else float(what[1:])
    # Gaps of one answer are alike: however many there are, they are no more than a few answers.
    return all(is_enough(level[counted], percent) and is_enough(_answers(level, counted), 50) for level in levels)


def _answers(level: Mapping[str, Any], counted: str) -> int:
    return int(level.get("completed") or level[counted])


def _overlaps(one: Any, other: Any) -> bool | None:
    if not (one and other):
        return None
    return bool(one[0] <= other[1] and other[0] <= one[1])
