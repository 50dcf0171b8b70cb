"""The picture: valid, with a line for each percentile, and readable marks."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from modelyard.loadtest.comparing import compare, differences
from modelyard.loadtest.picture import Axis, draw

NAME = "{http://www.w3.org/2000/svg}"


def level(concurrency: int, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "level": f"{concurrency} at once",
        "max_concurrency": concurrency,
        "request_rate": None,
        "completed": 9,
    }
    for name in ("ttft", "itl"):
        figures |= {f"p{percent}_{name}_ms": scale * percent for percent in (50, 90, 95, 99)}
        figures |= {f"median_{name}_ms": scale * 50, f"ci95_median_{name}_ms": [scale * 45, scale * 55]}
    return figures | {"request_throughput": 2.0 / scale, "output_throughput": 200.0 / scale} | more


def test_each_percentile_has_a_line_through_all_loads() -> None:
    root = ET.fromstring(draw([level(1), level(4, 2.0), level(16, 3.0)], 'a <model> & "more"'))
    lines = [path.get("d") or "" for path in root.iter(f"{NAME}path") if "line" in (path.get("class") or "")]
    assert len(lines) == 6
    assert all(line.count("L") == 2 for line in lines)
    texts = [text.text for text in root.iter(f"{NAME}text")]
    assert 'a <model> & "more"' in texts
    assert {"1", "4", "16", "requests at once", "p50", "p90", "p99"} <= set(texts)
    assert "prefers-color-scheme: dark" in draw([level(1)], "x")


def test_all_points_are_within_the_picture() -> None:
    root = ET.fromstring(draw([level(1, 0.001), level(2, 100.0)], "x"))
    for circle in root.iter(f"{NAME}circle"):
        assert 64 <= float(circle.get("cy") or 0) <= 304
        assert 70 <= float(circle.get("cx") or 0) <= 820


def test_whole_answers_have_the_time_to_their_end_and_a_failed_run_has_no_lines() -> None:
    whole = {"level": "1", "max_concurrency": None, "request_rate": 2.5, "completed": 3}
    whole |= {f"p{percent}_e2el_ms": percent for percent in (50, 90, 99)}
    text = draw([whole], "x")
    assert "Time to the answer" in text
    assert "requests a second" in text
    assert "no samples" in draw([level(1, completed=0)], "x")


@pytest.mark.parametrize("most", [0.0, 0.3, 1.0, 7.0, 99.0, 100.0, 12_345.0])
def test_marks_are_round_and_enclose_the_values(most: float) -> None:
    axis = Axis.over(0.0, most)
    assert axis.marks()[0] == 0
    assert axis.marks()[-1] >= most
    assert 2 <= len(axis.marks()) <= 7
    assert 0 <= axis.share(most) <= 1


def test_values_far_apart_are_on_a_logarithmic_axis() -> None:
    axis = Axis.over(2.0, 900.0)
    assert axis.marks() == [1.0, 10.0, 100.0, 1000.0]
    assert axis.share(10.0) == pytest.approx(1 / 3)


def test_two_runs_are_compared_by_ratio_and_chance_is_told() -> None:
    first = {"levels": [level(1), level(4)], "workload": {"input_tokens": "256", "seed": 0}}
    second = {"levels": [level(4, 1.1), level(8)], "workload": {"input_tokens": "512", "seed": 1}}
    rows = {row["figure"]: row for row in compare(first, second)}
    assert {row["level"] for row in rows.values()} == {"4 at once"}
    assert (rows["median_ttft_ms"]["ratio"], rows["median_ttft_ms"]["verdict"]) == (1.1, "worse")
    assert rows["median_ttft_ms"]["overlaps"]
    assert rows["request_throughput"]["verdict"] == "worse"
    assert rows["request_throughput"]["overlaps"] is None
    assert {row["verdict"] for row in compare(first, first)} == {"same"}
    assert differences(first, second) == ["input_tokens"]
