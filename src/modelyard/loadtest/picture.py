"""A picture of a sweep: percentiles of two latencies against the load, as SVG that reads on light and dark pages."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from modelyard.loadtest.statistics import Figures

_WIDTH, _HEIGHT = 860, 380
_LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT, _BETWEEN = 70, 64, 320, 240, 430
_LOG_FROM = 40.0
"""The axis is logarithmic where the highest is so many times the lowest."""
_SERIES = (("p50", "a"), ("p90", "b"), ("p99", "c"))
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-size: 15px; font-weight: 600 }
.small { font-size: 11px; fill: #57606a } .grid { stroke: #d0d7de; stroke-width: 1 }
.line { fill: none; stroke-width: 2 } .background { fill: #ffffff }
.a { stroke: #0969da; fill: #0969da } .b { stroke: #bc4c00; fill: #bc4c00 } .c { stroke: #8250df; fill: #8250df }
path.a, path.b, path.c { fill: none } text.a, text.b, text.c { stroke: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #3d444d } .background { fill: #0d1117 }
.a { stroke: #58a6ff; fill: #58a6ff } .b { stroke: #f0883e; fill: #f0883e } .c { stroke: #bc8cff; fill: #bc8cff }
path.a, path.b, path.c { fill: none } }
"""


def draw(levels: Sequence[Figures], title: str) -> str:
    """Return the picture of ``levels``: time to the first token and between tokens; without a stream, to the end."""
    able = [level for level in levels if level["completed"]]
    names = [("ttft", "Time to first token"), ("itl", "Time between tokens")]
    if not any(f"p50_{names[0][0]}_ms" in level for level in able):
        names = [("e2el", "Time to the answer")]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="background" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="20" y="28">{escape(title)}</text>',
    ]
    for at, (name, heading) in enumerate(names):
        parts += _panel(able, name, heading, left=_LEFT + at * _BETWEEN)
    return "\n".join([*parts, "</svg>", ""])


def _panel(levels: Sequence[Figures], name: str, heading: str, *, left: int) -> list[str]:
    parts = [f'<text x="{left}" y="{_TOP - 12}">{heading}, ms</text>']
    shown = [level for level in levels if f"p50_{name}_ms" in level]
    if not shown:
        return [*parts, f'<text class="small" x="{left}" y="{_TOP + 20}">no samples</text>']
    values = [level[f"{percent}_{name}_ms"] for level in shown for percent, _ in _SERIES]
    axis = Axis.over(min(values), max(values))
    for mark in axis.marks():
        y = _y(axis, mark)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}h{_PLOT_WIDTH}"/>')
        parts.append(f'<text class="small" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    places = _places(shown, left)
    for level, x in zip(shown, places, strict=True):
        load = level["max_concurrency"] or level["request_rate"]
        parts.append(
            f'<text class="small" x="{x:.1f}" y="{_TOP + _PLOT_HEIGHT + 18}" text-anchor="middle">{load:g}</text>'
        )
    unit = "requests at once" if shown[0]["max_concurrency"] else "requests a second"
    middle = left + _PLOT_WIDTH / 2
    parts.append(f'<text class="small" x="{middle}" y="{_TOP + _PLOT_HEIGHT + 38}" text-anchor="middle">{unit}</text>')
    for at, (percent, style) in enumerate(_SERIES):
        points = [(x, _y(axis, level[f"{percent}_{name}_ms"])) for level, x in zip(shown, places, strict=True)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="line {style}" d="M{path}"/>')
        parts += [f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        parts.append(f'<text class="{style}" x="{left + 200 + 40 * at}" y="{_TOP - 12}">{percent}</text>')
    return parts


class Axis:
    """The vertical axis: from 0, or logarithmic over decades."""

    def __init__(self, least: float, most: float, *, is_log: bool) -> None:
        self.least, self.most, self.is_log = least, most, is_log

    @classmethod
    def over(cls, least: float, most: float) -> "Axis":
        """Return the axis for values from ``least`` to ``most``."""
        if least > 0 and most / least > _LOG_FROM:
            return cls(10.0 ** math.floor(math.log10(least)), 10.0 ** math.ceil(math.log10(most)), is_log=True)
        step = _step(most)
        return cls(0.0, step * max(1, math.ceil(most / step - 1e-9)), is_log=False)

    def share(self, value: float) -> float:
        """Return how far up a value is, 0 to 1."""
        if self.is_log:
            return math.log(max(value, self.least) / self.least) / math.log(self.most / self.least)
        return value / self.most

    def marks(self) -> list[float]:
        """Return the values that have a line."""
        if self.is_log:
            decades = round(math.log10(self.most / self.least))
            return [self.least * 10**decade for decade in range(decades + 1)]
        step = _step(self.most)
        return [step * number for number in range(round(self.most / step) + 1)]


def _step(most: float) -> float:
    """Return a round distance between marks, for about five of them."""
    if most <= 0:
        return 1.0
    rough = most / 5
    size = 10.0 ** math.floor(math.log10(rough))
    return next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough - 1e-12)


def _y(axis: Axis, value: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - axis.share(value))


def _places(levels: Sequence[Figures], left: int) -> list[float]:
    """Return the place of each level: the same distance between all, since sweeps double."""
    if len(levels) == 1:
        return [left + _PLOT_WIDTH / 2]
    return [left + 16 + at * (_PLOT_WIDTH - 32) / (len(levels) - 1) for at in range(len(levels))]
