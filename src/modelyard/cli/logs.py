"""``modelyard logs``: what an engine said, what happened to an endpoint, what the planes wrote."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import click

from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import PAGE, Platform, close_names, data_directory, find_platform, segment
from modelyard.cli.output import Item, clean, moment
from modelyard.config import DataDirectory

_POLL_S = 0.5
_TAIL_DEFAULT = 200
_TAIL_MAX = 10_000
_MATCH_LINES = 20
"""Lines that must agree to find the place where a lost stream stopped."""


@click.command(
    "logs",
    epilog="\b\nExample:\n  modelyard logs demo -f\n  modelyard logs demo --source events\n"
    "  modelyard logs --source control --tail 50",
    short_help="Show the logs of an endpoint or of the platform.",
)
@click.argument("name", required=False)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on with what comes; Ctrl-C ends it.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option(
    "--source",
    type=click.Choice(["engine", "events", "gateway", "control"]),
    default=None,
    help="Whose lines. [default: engine with NAME, else control]",
)
@click.option("--replica", metavar="ID", help="Only this replica of the endpoint.")
@click.option("--url", metavar="URL", help="The platform's address [env: MODELYARD_URL].")
@click.option("--key", metavar="KEY", help="API key [env: MODELYARD_API_KEY].")
@click.option("--data-dir", metavar="DIR", help="Data directory of the platform on this machine.")
def command(
    name: str | None,
    *,
    is_following: bool,
    tail: int | None,
    source: str | None,
    replica: str | None,
    url: str | None,
    key: str | None,
    data_dir: str | None,
) -> None:
    """Show the log of the endpoint NAME, or of the platform's own processes."""
    source = source or ("engine" if name else "control")
    if source in {"gateway", "control"}:
        _show(_plane_lines(data_directory(data_dir), source, is_following=is_following, tail=tail), tail=None)
        return
    if name is None:
        raise click.UsageError(f"--source {source} needs the NAME of an endpoint.")
    platform = find_platform(url=url, key=key, data_dir=data_dir)
    try:
        if source == "events":
            _show(_events(platform, name, is_following=is_following), tail=None if is_following else tail)
        elif is_following:
            _follow(platform, name, tail=tail, replica=replica)
        else:
            text = platform.text(f"/v1/endpoints/{segment(name)}/logs", replica=replica, tail=tail)
            _show(text.splitlines(), tail=None)
    except Refused as error:
        if error.exit_code is Exit.NOT_FOUND:
            names = [endpoint["name"] for endpoint in platform.all("/v1/endpoints", limit=PAGE)]
            raise Failure(f"{error}{close_names(name, names)}", Exit.NOT_FOUND) from error
        raise


def _show(lines: Iterable[str], *, tail: int | None) -> None:
    for line in deque(lines, maxlen=tail) if tail is not None else lines:
        print(clean(line), flush=True)


def _follow(platform: Platform, name: str, *, tail: int | None, replica: str | None) -> None:
    """Print the log as it grows; after a lost connection go on where it stopped."""
    path = f"/v1/endpoints/{segment(name)}/logs"
    recent: deque[str] = deque(maxlen=_MATCH_LINES)
    wanted, known = _TAIL_DEFAULT if tail is None else tail, 0
    while True:
        try:
            with platform.lines("GET", path, None, follow="true", replica=replica, tail=wanted) as events:
                for line in islice(_event_lines(events), known, None):
                    recent.append(line)
                    print(line, flush=True)
            if replica:  # it has ended; an endpoint's stream only ends with the connection
                return
        except Failure as error:
            if error.exit_code is not Exit.UNAVAILABLE:
                raise
        time.sleep(_POLL_S)
        if recent:
            with suppress_unavailable():
                lines = platform.text(path, replica=replica, tail=_TAIL_MAX).splitlines()
                wanted, known = _TAIL_MAX, _known(lines, list(recent))


def _event_lines(lines: Iterable[str]) -> Iterator[str]:
    return (clean(line[5:].removeprefix(" ")) for line in lines if line.startswith("data:"))


def _known(lines: list[str], recent: list[str]) -> int:
    """Return how many of ``lines`` were printed already: up to where ``recent`` occurs last."""
    for end in range(len(lines), len(recent) - 1, -1):
        if lines[end - len(recent) : end] == recent:
            return end
    return 0


@contextmanager
def suppress_unavailable() -> Iterator[None]:
    """Let a platform that is away for a moment pass."""
    try:
        yield
    except Failure as error:
        if error.exit_code is not Exit.UNAVAILABLE:
            raise


def _events(platform: Platform, name: str, *, is_following: bool) -> Iterator[str]:
    shown: list[Item] = []
    while True:
        events = platform.get(f"/v1/endpoints/{segment(name)}/events")["data"]
        for event in events:
            if event not in shown:
                replica = f" [{event['replica_id']}]" if event.get("replica_id") else ""
                yield f"{moment(event['at'])}  {event['kind']}{replica}  {event['reason']}"
        shown = events
        if not is_following:
            return
        time.sleep(_POLL_S)


def _plane_lines(data: DataDirectory, source: str, *, is_following: bool, tail: int | None) -> Iterator[str]:
    """Yield the lines of a plane's log files of this machine: JSON, one a line."""
    files = sorted(data.logs.glob(f"{source}*.log"))
    if not files:
        raise Failure(f"There is no {source} log in {data.logs}. Check --data-dir.", Exit.NOT_FOUND)
    offsets: dict[Path, int] = {}
    for file in files:
        content = file.read_bytes()
        offsets[file] = len(content)
        lines = content.decode("utf-8", "replace").splitlines()
        yield from lines if tail is None else deque(lines, maxlen=tail)
    while is_following:
        time.sleep(_POLL_S)
        for file in files:
            yield from _grown(file, offsets)


def _grown(file: Path, offsets: dict[Path, int]) -> list[str]:
    """Return the whole lines that were added; starts over when the file was rotated."""
    try:
        size = file.stat().st_size
        if size < offsets[file]:
            offsets[file] = 0
        if size == offsets[file]:
            return []
        with file.open("rb") as reader:
            reader.seek(offsets[file])
            whole, end, _ = reader.read().rpartition(b"\n")
    except FileNotFoundError:
        return []
    offsets[file] += len(whole) + len(end)
    return whole.decode("utf-8", "replace").splitlines()
