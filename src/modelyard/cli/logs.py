"""``modelyard logs``: what an engine said, what happened to an endpoint, what the planes wrote."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path

import click
import msgspec

from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import PAGE, Platform, close_names, data_directory, find_platform, segment
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, clean, moment
from modelyard.clock import SystemClock
from modelyard.config import DataDirectory

_POLL_S = 0.5
_TAIL_DEFAULT = 200
_TAIL_MAX = 10_000
_MATCH_LINES = 20
"""Lines that must agree to find the place where a lost stream stopped."""


@click.command(
    "logs",
    epilog="\b\nExample:\n  modelyard logs demo -f\n  modelyard logs demo --source events\n"
    "  modelyard logs --source control --tail 50\n  modelyard logs --source gateway --since 2h",
    short_help="Show the logs of an endpoint or of the platform.",
)
@click.argument("name", required=False)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on with what comes; Ctrl-C ends it.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option("--since", "since_s", type=DURATION, help="Only the last 90s, 2h or 7d; engines give no times.")
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
    since_s: float | None,
    source: str | None,
    replica: str | None,
    **where: str | None,
) -> None:
    """Show the log of the endpoint NAME, or of the platform's own processes."""
    source = source or ("engine" if name else "control")
    if since_s is not None and source == "engine":
        raise click.UsageError("--since needs times, and engines give none. Use --source events, gateway or control.")
    since = None if since_s is None else SystemClock.unix_s() - since_s
    if source in {"gateway", "control"}:
        files = _plane_files(data_directory(where["data_dir"]), source)
        _show(_plane_lines(files, is_following=is_following, tail=tail, since=since), tail=None)
        return
    if name is None:
        raise click.UsageError(f"--source {source} needs the NAME of an endpoint.")
    platform = find_platform(**where)
    try:
        if source == "events":
            events = _events(platform, name, is_following=is_following, since=since or 0.0)
            _show(events, tail=None if is_following else tail)
        elif is_following:
            _follow(platform, name, tail=tail, replica=replica)
        else:
            text = platform.text(f"/v1/endpoints/{segment(name)}/logs", replica=replica, tail=tail)
            _show(text.splitlines(), tail=None)
    except Refused as error:
        if error.exit_code is Exit.NOT_FOUND:
            names = [endpoint["name"] for endpoint in platform.all("/v1/endpoints", limit=PAGE)]
            raise error.with_hint(close_names(name, names)) from error
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


class _Line(msgspec.Struct):
    """What matters of a line of a plane."""

    time: str


@contextmanager
def suppress_unavailable() -> Iterator[None]:
    """Let a platform that is away for a moment pass."""
    try:
        yield
    except Failure as error:
        if error.exit_code is not Exit.UNAVAILABLE:
            raise


def _events(platform: Platform, name: str, *, is_following: bool, since: float) -> Iterator[str]:
    shown: list[Item] = []
    while True:
        events = platform.get(f"/v1/endpoints/{segment(name)}/events")["data"]
        for event in events:
            if event not in shown and event["at"] >= since:
                replica = f" [{event['replica_id']}]" if event.get("replica_id") else ""
                yield f"{moment(event['at'])}  {event['kind']}{replica}  {event['reason']}"
        shown = events
        if not is_following:
            return
        time.sleep(_POLL_S)


def _plane_files(data: DataDirectory, source: str) -> list[Path]:
    files = sorted(data.logs.glob(f"{source}*.log"))
    if not files:
        raise Failure(f"There is no {source} log in {data.logs}. Check --data-dir.", Exit.NOT_FOUND)
    return files


def _plane_lines(files: Sequence[Path], *, is_following: bool, tail: int | None, since: float | None) -> Iterator[str]:
    """Yield the lines of a plane's log files of this machine: JSON, one a line."""
    offsets: dict[Path, int] = {}
    for file in files:
        content = file.read_bytes()
        offsets[file] = len(content)
        lines = content.decode("utf-8", "replace").splitlines()
        if since is not None:
            lines = _newer(lines, since)
        yield from lines if tail is None else deque(lines, maxlen=tail)
    while is_following:
        time.sleep(_POLL_S)
        for file in files:
            yield from _grown(file, offsets)


def _newer(lines: Sequence[str], since: float) -> list[str]:
    """Return the lines from the first one on that was written at ``since`` (unix seconds) or later."""
    for at, line in enumerate(lines):
        try:
            # Planes write the time of this machine's zone, as the reader of the logs has it.
            written = datetime.fromisoformat(msgspec.json.decode(line, type=_Line).time).timestamp()
        except ValueError:  # a DecodeError is one: no line of ours
            continue
        if written >= since:
            return list(lines[at:])
    return []


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
