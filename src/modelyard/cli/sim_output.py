"""What ``modelyard sim`` prints: variants side by side, JSON, pictures, and how far a long run is.

Whoever has ``Results`` calls ``show``: a scenario of a file, and the replay of the own ledger.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.output import ProgressLine, clean, remark, show_json, show_pairs, show_table

if TYPE_CHECKING:
    from modelyard.sim.results import Figure, Results, Tried

_QUIET_S = 1.0
"""A run that takes no longer says nothing of its progress."""
_PIPE_S = 5.0
_TERMINAL_S = 0.2


class Asked(msgspec.Struct, frozen=True):
    """In which forms results are wanted."""

    is_json: bool = False
    is_quiet: bool = False
    html: Path | None = None
    pictures: Path | None = None

    def check(self) -> None:
        """Refuse what could not be written, before a long run.

        Raises:
            Failure: a folder is missing, or pictures cannot be drawn here.
        """
        if self.html is not None and not self.html.absolute().parent.is_dir():
            raise Failure(f"Cannot write {self.html}: there is no such folder.", Exit.USAGE)
        if self.html is not None and self.html.is_dir():
            raise Failure(f"Cannot write {self.html}: it is a folder. Name a file in it.", Exit.USAGE)
        if self.pictures is not None and self.pictures.exists() and not self.pictures.is_dir():
            raise Failure(f"Cannot write pictures to {self.pictures}: it is a file. Name a folder.", Exit.USAGE)
        for place in filter(None, (self.html, self.pictures)):
            if not os.access(_nearest(place), os.W_OK):
                raise Failure(f"Cannot write {place}: {_nearest(place)} does not allow it.", Exit.USAGE)
        if self.html is not None or self.pictures is not None:
            from modelyard.cli.sim_pictures import check

            check()


def _nearest(place: Path) -> Path:
    """Return what there is of a path: itself, or the nearest folder that it will be in."""
    return next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that ``Asked`` is made of."""
    for option in (
        click.option("--quiet", "-q", "is_quiet", is_flag=True, help="Print only variant, figure and mean, with tabs."),
        click.option("--json", "is_json", is_flag=True, help="Print JSON: all figures, and what happened over time."),
        click.option(
            "--pictures", type=click.Path(path_type=Path), metavar="FOLDER", help="Write pictures there (SVG)."
        ),
        click.option(
            "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write one page with table and pictures."
        ),
    ):
        command = option(command)
    return command


def show(results: "Results", asked: Asked) -> None:
    """Print ``results``, and write what else was asked for."""
    if asked.is_json:
        show_json(results)
    elif asked.is_quiet:
        for tried in results.tried:
            for figure in results.figures:
                if (mean := tried.mean(figure.key)) is not None:
                    print(f"{clean(tried.name)}\t{figure.key}\t{mean:.6g}")
    else:
        _show_table(results)
    write(results, asked)


def write(results: "Results", asked: Asked) -> None:
    """Write the page and the pictures that were asked for."""
    if asked.html is not None or asked.pictures is not None:
        try:
            _draw(results, asked)
        except OSError as error:
            raise Failure(f"Cannot write {error.filename}: {error.strerror}.") from error


def _draw(results: "Results", asked: Asked) -> None:
    from modelyard.cli.sim_pictures import draw, page

    pictures = draw(results)
    if asked.pictures is not None:
        asked.pictures.mkdir(parents=True, exist_ok=True)
        for name, svg in pictures.items():
            (asked.pictures / f"{name}.svg").write_text(svg, "utf-8")
        remark(f"{len(pictures)} pictures are in {asked.pictures}.")
    if asked.html is not None:
        asked.html.write_text(page(results, pictures, *cells(results)), "utf-8")
        remark(f"The page is {asked.html}.")


def _show_table(results: "Results") -> None:
    seeds = results.seeds
    show_pairs(
        {
            "Scenario": results.title,
            "Seeds": f"{', '.join(map(str, seeds))}: mean, and from the least to the most" if len(seeds) > 1 else "",
        }
    )
    print()
    headings, rows = cells(results)
    show_table(list(map(clean, headings)), rows)
    for note in results.notes:
        remark(note)


def cells(results: "Results") -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: a figure a row, then each variant, and how far it is from the first."""
    first, *others = results.tried
    headings = ["", first.name]
    for other in others:
        headings += [other.name, "+/-"]
    rows = []
    for figure in results.figures:
        if figure.unit == "count" and not any(any(tried.values(figure.key)) for tried in results.tried):
            continue  # nobody asks how often nothing happened
        row = [f"{figure.label}{_UNITS[figure.unit]}", _cell(first, figure)]
        for other in others:
            row += [_cell(other, figure), _difference(first, other, figure)]
        rows.append(row)
    return headings, rows


_UNITS = {"s": ", s", "ms": ", ms", "share": ", %", "usd": ", $", "hours": "", "rate": " a second", "count": ""}


def _cell(tried: "Tried", figure: "Figure") -> str:
    values = tried.values(figure.key)
    if not values:
        return "-"
    mean = _number(sum(values) / len(values), figure.unit)
    least, most = _number(min(values), figure.unit), _number(max(values), figure.unit)
    return mean if least == most else f"{mean} ({least} to {most})"


def _difference(first: "Tried", other: "Tried", figure: "Figure") -> str:
    before, after = first.mean(figure.key), other.mean(figure.key)
    if before is None or after is None:
        return "-"
    if figure.unit == "share":
        return _points(100 * (after - before))
    if before == after:
        return "same"
    if not before:
        return "-"
    change = after / before - 1
    if change >= 2:
        return f"x {after / before:.3g}"
    if abs(change) >= 0.0005:
        return f"{change:+.1%}".replace("%", " %")
    # Nobody acts on less than a tenth of a percent; what the table shows alike is the same.
    alike = _number(before, figure.unit) == _number(after, figure.unit)
    return "same" if alike or abs(change) < 0.00005 else f"{change:+.2%}".replace("%", " %")


def _points(points: float) -> str:
    """Return a difference of shares, as fine as shares are shown."""
    size = abs(points)
    if size < 0.0005:
        return "same"
    return f"{points:+.{1 if size >= 10 else 2 if size >= 1 else 3}f} pt"


def _number(value: float, unit: str) -> str:
    if unit == "share":
        return _share(100 * value)
    if unit == "count":
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
    if unit == "usd":
        return f"{value:,.2f}" if value >= 0.1 or not value else f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _share(percent: float) -> str:
    if 99 <= percent < 100:
        # What matters of 99.98 % is how far it is from all, which it is not.
        return f"{min(percent, 99.999):.3f}"
    if 0 < percent < 0.1:
        return f"{percent:.2g}" if percent >= 0.0001 else "0.0001"
    return f"{percent:.{1 if percent >= 10 else 2}f}".removesuffix(".00").removesuffix(".0")


class Progress:
    """Tells on stderr how far all runs are together, once they take longer than a moment. Called as ``runs`` does."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._line = ProgressLine()
        self._begun_s = self._told_s = time.perf_counter()
        self._seen: dict[tuple[str, int], float] = {}
        self._pause_s = _TERMINAL_S if self._line.is_terminal else _PIPE_S

    def __call__(self, name: str, seed: int, share: float) -> None:
        """Take how far one run is."""
        self._seen[name, seed] = share
        now_s = time.perf_counter()
        if now_s - self._begun_s < _QUIET_S or now_s - self._told_s < self._pause_s:
            return
        self._told_s = now_s
        # Those before the latest are done, whatever they said last.
        done = (len(self._seen) - 1 + share) / self._runs
        left_s = (now_s - self._begun_s) * (1 - done) / max(done, 1e-6)
        run = f"run {len(self._seen)} of {self._runs}: " if self._runs > 1 else ""
        if share >= 1:
            self._line.show(f"{run}{name}, all has come; answers end")
        else:
            self._line.show(f"{run}{name}, {share:.0%} of its time; about {_duration(left_s)} left")

    def clear(self) -> None:
        """Leave a clean line behind."""
        self._line.clear()


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1, round(seconds))} s"
