"""Pictures of a simulation by matplotlib, and one page that holds all of it; only what asks for them loads it.

A picture has a line for each variant, of its first seed. Figures are drawn without ``pyplot``, which would keep them,
and look for a screen.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.cli.exits import Failure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from modelyard.sim.results import Column, Results

_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#9a6700", "#57606a", "#0550ae")
_GREY = "#57606a"
_SIZE = (7.0, 2.9)
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollars
    "svg.hashsalt": "modelyard",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#d0d7de",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
}
_TAG = re.compile(r"<[^>]*>")
_ATTRIBUTE = re.compile(r'"[^"]*"')
_INDENT = re.compile(r"\n +")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")


class Panel:
    """One picture: its title, and series by name with what they are; the first solid, then dashed, then dotted."""

    def __init__(self, title: str, lines: dict[str, str], *, is_share: bool = False) -> None:
        self.title = title
        self.lines = lines
        self.is_share = is_share


_LINE_STYLES = (("-", "solid"), ("--", "dashed"), (":", "dotted"))
_REPLICAS = Panel("Replicas", {"replicas": "ready", "loading": "loading"})
_WAITS = Panel("First token, s", {"ttft_p99_s": "p99", "ttft_p50_s": "p50"})
_COST = Panel("Cost, $ an hour", {"usd_per_hour": ""})
PANELS: dict[str, dict[str, Panel]] = {
    "request": {
        "utilisation": Panel("Utilisation, %", {"busy": "computing", "kv": "KV cache held"}, is_share=True),
        "replicas": _REPLICAS,
        "waits": _WAITS,
        "cost": _COST,
        "traffic": Panel("Requests a second", {"requests_s": ""}),
    },
    "fleet": {
        "utilisation": Panel("Utilisation, %", {"total_busy": "with batches", "online_busy": "online"}, is_share=True),
        "replicas": _REPLICAS,
        "waits": _WAITS,
        "cost": _COST,
        "late": Panel("Requests that wait for more than 5 s, %", {"late": ""}, is_share=True),
        "traffic": Panel("Requests a second", {"rate": ""}),
    },
}
_OVERVIEW = ("utilisation", "replicas", "waits", "cost")
KIND = "gpus."
"""Series of accelerators by kind begin so."""


def check() -> None:
    """Say now that pictures cannot be drawn.

    Raises:
        Failure: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise Failure("Pictures need matplotlib: pip install 'modelyard[sim]'.") from error


def draw(results: "Results") -> dict[str, str]:
    """Return all pictures as SVG by name; ``overview`` has the most important ones."""
    drawings = {
        name: _drawing(results, panel)
        for name, panel in PANELS[results.level].items()
        if any(_has(tried.runs[0].series, panel) for tried in results.tried)
    }
    shown = [drawing for name, drawing in drawings.items() if name in _OVERVIEW]
    found = {"overview": _svg(shown, columns=2), **{name: _svg([one], columns=1) for name, one in drawings.items()}}
    if any(series.startswith(KIND) for series in results.tried[0].runs[0].series):
        kinds = [_kinds(results, number) for number in range(len(results.tried))]
        found["kinds"] = _svg(kinds, columns=min(2, len(kinds)))
    return found


def _has(series: "dict[str, Column]", panel: Panel) -> bool:
    return any(any(series.get(name, ())) for name in panel.lines)


def page(results: "Results", pictures: dict[str, str], headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return one page with the table and the pictures; it loads nothing."""
    from jinja2 import Environment

    template = (Path(__file__).parent / "sim_page.html").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Ids of clips are those of each picture alone, and would meet on one page.
    shown = [(name, _apart(svg[svg.index("<svg") :], name)) for name, svg in pictures.items() if name != "overview"]
    return environment.from_string(template).render(results=results, pictures=shown, headings=headings, rows=rows)


def _apart(svg: str, name: str) -> str:
    def within(tag: re.Match[str]) -> str:
        own = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', tag[0])
        return re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", own)

    return _TAG.sub(within, svg)


Drawing = Callable[["Axes"], None]


def _drawing(results: "Results", panel: Panel) -> Drawing:
    scale, (unit, hours) = 100.0 if panel.is_share else 1.0, _unit(results)

    def onto(axes: "Axes") -> None:
        styles: list[str] = []
        for (name, what), (style, word) in zip(panel.lines.items(), _LINE_STYLES, strict=False):
            columns = [tried.runs[0].series.get(name, []) for tried in results.tried]
            if styles and not any(map(any, columns)):
                continue
            styles.append(f"{what} ({word})")
            for place, (tried, column) in enumerate(zip(results.tried, columns, strict=True)):
                axes.plot(
                    *_corners(_floats(tried.runs[0].series["hours"], 1 / hours), _floats(column, scale)),
                    style,
                    color=_COLOURS[place % len(_COLOURS)],
                    linewidth=1.3,
                    label=_label(tried.name) if len(styles) == 1 and len(results.tried) > 1 else None,
                )
        axes.set_title(f"{panel.title}: {', '.join(styles)}" if len(styles) > 1 else panel.title)
        # A line at the very top would be cut in half by the edge.
        axes.set_ylim(0, 1.05 * max(axes.dataLim.y1, 1e-9) if axes.dataLim.y1 > 0 else 1)
        axes.set_xlabel(unit)

    return onto


def _kinds(results: "Results", place: int) -> Drawing:
    def onto(axes: "Axes") -> None:
        series = results.tried[place].runs[0].series
        names = sorted(name for name in series if name.startswith(KIND))
        axes.set_title(f"Accelerators in use: {results.tried[place].name}")
        axes.set_axisbelow(True)
        axes.stackplot(
            _floats(series["hours"], 1.0),
            *(_floats(series[name], 1.0) for name in names),
            labels=[name.removeprefix(KIND) for name in names],
            colors=_COLOURS,
        )
        axes.set_xlabel("hours")

    return onto


def _unit(results: "Results") -> tuple[str, float]:
    """Return in what time is told, and how many hours one of it is."""
    hours = results.tried[0].runs[0].series["hours"]
    return ("minutes", 1 / 60) if not hours or (hours[-1] or 0.0) < 3.0 else ("hours", 1.0)


def _label(name: str) -> str:
    """Return a name for the legend: one that begins with an underscore is none to matplotlib."""
    return f" {name}" if name.startswith("_") else name


def _corners(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """Leave out points between two of the same height: most of a line that seldom changes."""
    kept = [
        at
        for at, y in enumerate(ys)
        if at in (0, len(ys) - 1) or not ys[at - 1] == y == ys[at + 1]
    ]  # fmt: skip
    return [xs[at] for at in kept], [ys[at] for at in kept]


def _floats(column: "Column", scale: float) -> list[float]:
    return [float("nan") if value is None else value * scale for value in column]


def _svg(drawings: Sequence[Drawing], *, columns: int) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = -(-len(drawings) // columns)
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Letters that its font lacks are the reader's browser's to draw.
        warnings.filterwarnings("ignore", message="Glyph")
        width = _SIZE[0] if columns == 1 else 1.6 * _SIZE[0]
        figure = Figure(figsize=(width, _SIZE[1] * rows), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        for number, drawing in enumerate(drawings, 1):
            drawing(figure.add_subplot(rows, columns, number))
        # Lines of one name look alike in all drawings, and need telling once.
        told = {
            label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if told:
            figure.legend(told.values(), told.keys(), loc="outside lower center", ncols=min(len(told), 6))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # A tenth of a point is finer than any screen, and a third of the bytes.
    # Only in tags: a name may hold anything, and stays as it is.
    return _INDENT.sub("\n", _TAG.sub(lambda tag: _ATTRIBUTE.sub(_shorter, tag[0]), file.getvalue()))


def _shorter(attribute: re.Match[str]) -> str:
    text = _NUMBER.sub(lambda one: f"{float(one[0]):.1f}", attribute[0]).replace(" \nL ", "L").replace("\n", " ")
    # What was measured with is not what every reader has.
    return text.replace("'DejaVu Sans'", "sans-serif")
