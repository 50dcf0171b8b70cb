"""Pictures of a simulation by matplotlib, and one page that holds all of it; only what asks for them loads it.

A picture has a line for each variant, of its first seed. Figures are drawn without ``pyplot``, which would keep them,
and look for a screen.
"""

import io
import re
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
    "font.family": "sans-serif",
    "svg.fonttype": "none",
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
_NUMBER = re.compile(r"-?\d+\.\d{2,}")


class Panel:
    """One picture: a title, and series by name with how they are drawn."""

    def __init__(self, title: str, lines: dict[str, tuple[str, str]], *, is_share: bool = False) -> None:
        self.title = title
        self.lines = lines
        """Series to its label and style."""
        self.is_share = is_share


PANELS: dict[str, dict[str, Panel]] = {
    "request": {
        "utilisation": Panel(
            "Utilisation, %",
            {"busy": ("time in which they compute", "-"), "kv": ("KV cache held", "--")},
            is_share=True,
        ),
        "replicas": Panel("Replicas", {"replicas": ("ready", "-"), "loading": ("loading", ":")}),
        "waits": Panel("First token, s", {"ttft_p99_s": ("p99", "-"), "ttft_p50_s": ("p50", "--")}),
        "cost": Panel("Cost, $ an hour", {"usd_per_hour": ("", "-")}),
        "traffic": Panel("Requests a second", {"requests_s": ("", "-")}),
    },
    "fleet": {
        "utilisation": Panel(
            "Utilisation, %", {"total_busy": ("with batches", "-"), "online_busy": ("online", "--")}, is_share=True
        ),
        "replicas": Panel("Replicas", {"replicas": ("ready", "-"), "loading": ("loading", ":")}),
        "waits": Panel("Requests that wait for more than 5 s, %", {"late": ("", "-")}, is_share=True),
        "cost": Panel("Cost, $ an hour", {"usd_per_hour": ("", "-")}),
        "traffic": Panel("Requests a second", {"rate": ("", "-")}),
    },
}
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
    """Return all pictures as SVG by name; ``overview`` has the four most important ones."""
    panels = {
        name: panel
        for name, panel in PANELS[results.level].items()
        if any(series in run.series for series in panel.lines for one in results.tried for run in one.runs[:1])
    }
    found = {name: _svg([_drawing(results, panel)], columns=1) for name, panel in panels.items()}
    shown = [_drawing(results, panel) for name, panel in panels.items() if name != "traffic"]
    if any(series.startswith(KIND) for series in results.tried[0].runs[0].series):
        kinds = [_kinds(results, number) for number in range(len(results.tried))]
        found["kinds"] = _svg(kinds, columns=min(2, len(kinds)))
    return {"overview": _svg(shown, columns=2), **found}


def page(results: "Results", pictures: dict[str, str], headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return one page with the table and the pictures; it loads nothing."""
    from jinja2 import Environment

    template = (Path(__file__).parent / "sim_page.html").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Ids of clips are those of each picture alone, and would meet on one page.
    shown = [(name, _apart(svg[svg.index("<svg") :], name)) for name, svg in pictures.items() if name != "overview"]
    return environment.from_string(template).render(results=results, pictures=shown, headings=headings, rows=rows)


def _apart(svg: str, name: str) -> str:
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    return re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)


Drawing = Callable[["Axes"], None]


def _drawing(results: "Results", panel: Panel) -> Drawing:
    def onto(axes: "Axes") -> None:
        axes.set_title(panel.title)
        scale = 100.0 if panel.is_share else 1.0
        for place, tried in enumerate(results.tried):
            series = tried.runs[0].series
            for number, (name, (label, style)) in enumerate(panel.lines.items()):
                if name not in series or (number and not any(series[name])):
                    continue
                text = ", ".join(filter(None, (tried.name if len(results.tried) > 1 else "", label)))
                axes.plot(
                    _floats(series["hours"], 60.0 if _is_short(results) else 1.0),
                    _floats(series[name], scale),
                    style,
                    color=_COLOURS[place % len(_COLOURS)],
                    linewidth=1.3,
                    label=text or None,
                )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes" if _is_short(results) else "hours")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="best")

    return onto


def _kinds(results: "Results", place: int) -> Drawing:
    def onto(axes: "Axes") -> None:
        series = results.tried[place].runs[0].series
        names = sorted(name for name in series if name.startswith(KIND))
        axes.set_title(f"Accelerators in use: {results.tried[place].name}")
        axes.stackplot(
            _floats(series["hours"], 1.0),
            *(_floats(series[name], 1.0) for name in names),
            labels=[name.removeprefix(KIND) for name in names],
            colors=_COLOURS,
        )
        axes.set_xlabel("hours")
        axes.legend(loc="upper left")

    return onto


def _is_short(results: "Results") -> bool:
    hours = results.tried[0].runs[0].series["hours"]
    return not hours or (hours[-1] or 0.0) < 3.0


def _floats(column: "Column", scale: float) -> list[float]:
    return [float("nan") if value is None else value * scale for value in column]


def _svg(drawings: Sequence[Drawing], *, columns: int) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = -(-len(drawings) // columns)
    with matplotlib.rc_context(_STYLE):
        width = _SIZE[0] if columns == 1 else 1.6 * _SIZE[0]
        figure = Figure(figsize=(width, _SIZE[1] * rows), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        for number, drawing in enumerate(drawings, 1):
            drawing(figure.add_subplot(rows, columns, number))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # A tenth of a point is finer than any screen, and a third of the bytes.
    return _NUMBER.sub(lambda found: f"{float(found[0]):.1f}", file.getvalue())
