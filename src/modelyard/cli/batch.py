"""``modelyard batch``: submit a file of requests, follow it, fetch the answers."""

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import msgspec

from modelyard.cli.bars import bar_text, is_terminal, time_text
from modelyard.cli.exits import Exit, Failure
from modelyard.cli.files import PAUSE_S, TRIES_MAX, send_file, write_download
from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import (
    Item,
    ProgressLine,
    age,
    formats,
    listing,
    moment,
    owners,
    remark,
    show_json,
    show_list,
    show_pairs,
    show_table,
)
from modelyard.clock import SystemClock
from modelyard.domain.batches import ENDPOINTS
from modelyard.domain.files import FILES_PATH, ID_PREFIX

BATCHES_PATH = "/v1/batches"
LOOK_S = 0.25
CHECK_S_MAX = 5.0
"""Longest wait for the check of a file, after which its forecast is known; a larger one is told of later."""
AWAY_S_MAX = 60.0
"""Longest time that a platform may be away while its batch is waited for: it may restart meanwhile."""
ERRORS_SHOWN = 20
OVER = ("completed", "failed", "expired", "cancelled")
_STEP_PERCENT = 10
_EXAMPLE = """\b
Example:
  modelyard batch submit requests.jsonl --wait
  modelyard batch
  modelyard batch batch_7hq2m4xkd9…
  modelyard batch cancel batch_7hq2m4xkd9…"""


class _FirstLine(msgspec.Struct):
    url: str = ""


@click.group("batch", cls=NounGroup, epilog=_EXAMPLE, short_help="Submit, list, show and cancel batches.")
def command() -> None:
    """Submit a file of requests, list, show and cancel batches; without a verb: list."""


@command.command(
    "submit",
    epilog="\b\nExample:\n  modelyard batch submit requests.jsonl --wait\n"
    "  modelyard batch submit file-3kf8x2ma… --endpoint /v1/embeddings -q",
)
@click.argument("file")
@click.option("--endpoint", help="What its lines ask for. [default: the url of its first line]")
@click.option("--window", default="24h", show_default=True, help="How long it may take.")
@click.option("--metadata", "pairs", multiple=True, metavar="KEY=VALUE", help="Kept with it; may be given again.")
@click.option("--wait", "is_waiting", is_flag=True, help="Follow it to its end, and fetch its answers.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Folder for the answers, with --wait. [default: the one of FILE]",
)
@connected
@formats("Print only the batch's id.")
def submit(  # noqa: PLR0913 - a command line
    file: str,
    *,
    endpoint: str | None,
    window: str,
    pairs: tuple[str, ...],
    is_waiting: bool,
    output: Path | None,
    platform: Platform,
    is_json: bool,
    is_quiet: bool,
) -> None:
    """Make a batch of FILE, one JSON request a line, or of the id of a file that was uploaded."""
    path = _path_of(file)
    folder = _folder_for(output, path, is_waiting=is_waiting)
    order: Item = {"endpoint": endpoint or _endpoint_of(path), "completion_window": window}
    if pairs:
        order["metadata"] = dict(_pairs(pairs))
    order["input_file_id"] = file if path is None else send_file(platform, path, purpose="batch")["id"]
    batch = make(platform, order, is_ours=path is not None)
    if not is_waiting:
        batch = batch if is_quiet else _checked(platform, batch)
        _show(batch, is_json=is_json, is_quiet=is_quiet)
        if batch["status"] == "failed":
            raise click.exceptions.Exit(Exit.FAILURE)
        if not is_json and not is_quiet:
            remark(f"Follow it with: modelyard batch {batch['id']}")
        return
    try:
        batch = follow(platform, batch["id"])
    except KeyboardInterrupt:
        remark(f"It goes on without you. Look again with: modelyard batch {batch['id']}")
        raise
    stem = batch["id"] if path is None else path.stem
    written = list(_fetch(platform, batch, folder, stem))
    _show(batch, is_json=is_json, is_quiet=is_quiet)
    for place in written:
        remark(f"Wrote {place}.")
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise click.exceptions.Exit(Exit.FAILURE)


@command.command("list", epilog="\b\nExample:\n  modelyard batch list --last 100 --json")
@click.option("--last", type=click.IntRange(1, PAGE), default=20, show_default=True, help="How many of the newest.")
@connected
@listing
def list_batches(*, platform: Platform, last: int, is_json: bool, is_quiet: bool) -> None:
    """List the newest batches."""
    batches = platform.get(BATCHES_PATH, limit=last)["data"]
    columns = {
        "ID": lambda batch: batch["id"],
        **owners(batches, "modelyard", "tenant_id"),
        "STATUS": lambda batch: batch["status"],
        "MODEL": lambda batch: batch["model"],
        "DONE": lambda batch: _counts_text(batch["request_counts"]),
        "FAILED": lambda batch: batch["request_counts"]["failed"],
        "AGE": lambda batch: age(batch["created_at"]),
    }
    empty = "No batches. Make one: modelyard batch submit FILE"
    show_list(batches, columns, is_json=is_json, is_quiet=is_quiet, empty=empty)


@command.command("show", epilog="\b\nExample:\n  modelyard batch show batch_7hq2m4xkd9… --json")
@click.argument("batch_id")
@connected
@formats("Print only its status.")
def show(batch_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show a batch: how far it is, when it will be done, what is wrong with its file."""
    batch = platform.get(f"{BATCHES_PATH}/{segment(batch_id)}")
    if is_quiet:
        print(batch["status"])
    else:
        _show(batch, is_json=is_json, is_quiet=False)


@command.command("cancel", epilog="\b\nExample:\n  modelyard batch cancel batch_7hq2m4xkd9…")
@click.argument("batch_id")
@connected
@formats("Print only its status.")
def cancel(batch_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Cancel a batch; what is done stays and can be fetched."""
    batch = platform.post(f"{BATCHES_PATH}/{segment(batch_id)}/cancel", {})
    if is_quiet:
        print(batch["status"])
    else:
        _show(batch, is_json=is_json, is_quiet=False)


def make(platform: Platform, order: Item, *, is_ours: bool) -> Item:
    """Make a batch, again where the line or the platform was lost for a while, but once: all tries have one key.

    Where it is refused, the input does not stay behind if it ``is_ours``.

    Raises:
        Failure: the platform refuses it or stays away.
    """
    order = order | {"idempotency_key": secrets.token_hex(16)}
    pause_s = PAUSE_S
    for left in reversed(range(TRIES_MAX)):
        try:
            made: Item = platform.post(BATCHES_PATH, order)
        except Failure as error:
            may_be_made = error.exit_code is Exit.UNAVAILABLE
            if not may_be_made and is_ours:
                with suppress(Failure):
                    platform.delete(f"{FILES_PATH}/{segment(order['input_file_id'])}")
            if not may_be_made or not left:
                raise
        else:
            return made
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("the last try returns or raises")


def _path_of(file: str) -> Path | None:
    """Return the file that is to be sent; None for the id of one that is there already."""
    path = Path(file).expanduser().absolute()
    return None if file.startswith(ID_PREFIX) and not path.exists() else path


def _folder_for(output: Path | None, path: Path | None, *, is_waiting: bool) -> Path:
    """Return where the answers go. It is made now: in hours it would be too late to hear that it cannot be."""
    if output is None:
        return Path.cwd() if path is None else path.parent
    if not is_waiting:
        raise Failure("-o needs --wait. Fetch a file later with: modelyard files get FILE_ID -o FILE.", Exit.USAGE)
    folder = output.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"Cannot make the folder {folder}: {error.strerror}. Choose another -o.", Exit.USAGE) from error
    return folder


def _checked(platform: Platform, batch: Item) -> Item:
    """Return a batch once its file is checked, if that is soon: then it is known what it will take."""
    clock = SystemClock()
    until_s = clock.monotonic_s() + CHECK_S_MAX
    while batch["status"] == "validating" and clock.monotonic_s() < until_s:
        time.sleep(LOOK_S)
        try:
            batch = platform.get(f"{BATCHES_PATH}/{segment(batch['id'])}")
        except Failure:
            break  # it is made, which is what was asked for
    return batch


def follow(platform: Platform, batch_id: str) -> Item:
    """Show how far a batch is until it is over; return it. A platform that restarts meanwhile is waited for."""
    clock, bar = SystemClock(), _BatchBar(batch_id)
    seen_s = clock.monotonic_s()
    try:
        while True:
            try:
                batch: Item = platform.get(f"{BATCHES_PATH}/{segment(batch_id)}")
            except Failure as error:
                if error.exit_code is not Exit.UNAVAILABLE or clock.monotonic_s() - seen_s > AWAY_S_MAX:
                    raise
            else:
                seen_s = clock.monotonic_s()
                bar.show(batch, clock.unix_s())
                if batch["status"] in OVER:
                    return batch
            time.sleep(LOOK_S)
    finally:
        bar.clear()


class _BatchBar:
    """How far a batch is: a bar on a terminal; in a pipe a line for each tenth of it and each change of status."""

    def __init__(self, batch_id: str) -> None:
        self._batch_id = batch_id
        self._line = ProgressLine()
        self._is_terminal = is_terminal()
        self._told: tuple[object, ...] = ()
        self._is_forecast_told = False

    def show(self, batch: Item, now: float) -> None:
        """Show it."""
        counts = batch["request_counts"]
        forecast = batch["modelyard"]["forecast"] or {}
        if forecast and not self._is_forecast_told and batch["status"] not in OVER:
            self._is_forecast_told = True
            self._line.clear()
            remark(f"Expected: {_expected(forecast)}.")
        done, total = counts["completed"] + counts["failed"], counts["total"]
        percent = 100 * done / total if total else 0.0
        news = (batch["status"], percent // _STEP_PERCENT)
        if not self._is_terminal and news == self._told:
            return
        self._told = news
        parts = [self._batch_id, batch["status"]]
        if total:
            parts += [bar_text(percent)] if self._is_terminal else []
            parts += [f"{int(percent)} %", f"{done}/{total}"]
        if counts["failed"]:
            parts.append(f"{counts['failed']} failed")
        finish_at = forecast.get("finish_at")
        if batch["status"] == "in_progress" and finish_at is not None:
            parts.append(f"ETA {time_text(finish_at - now)}")
        self._line.show("  ".join(parts))

    def clear(self) -> None:
        """Leave a clean line behind."""
        self._line.clear()


def _endpoint_of(path: Path | None) -> str:
    """Return what the first line of a file asks for."""
    if path is None:
        raise Failure("Say what its lines ask for, like --endpoint /v1/chat/completions.", Exit.USAGE)
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    except OSError as error:
        raise Failure(f"Cannot read {path}: {error.strerror}. Check the path.", Exit.NOT_FOUND) from error
    try:
        url = msgspec.json.decode(first.removeprefix(b"\xef\xbb\xbf"), type=_FirstLine).url
    except (msgspec.MsgspecError, ValueError):
        url = ""
    if url not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise Failure(f"The first line of {path.name} names no url of a batch. Give --endpoint: {known}.", Exit.USAGE)
    return url


def _pairs(given: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for text in given:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name:
            raise Failure(f"Bad --metadata '{text}': write KEY=VALUE.", Exit.USAGE)
        yield name, value


def _fetch(platform: Platform, batch: Item, folder: Path, stem: str) -> Iterator[Path]:
    for field, ending in (("output_file_id", "output"), ("error_file_id", "errors")):
        if batch[field] is not None:
            place = folder / f"{stem}.{ending}.jsonl"
            with platform.download(f"{FILES_PATH}/{segment(batch[field])}/content") as response:
                write_download(response, place, platform)
            yield place


def _counts_text(counts: Item) -> str:
    return f"{counts['completed'] + counts['failed']}/{counts['total']}"


def _show(batch: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(batch)
        return
    if is_quiet:
        print(batch["id"])
        return
    counts, forecast = batch["request_counts"], batch["modelyard"]["forecast"] or {}
    usage = batch["usage"] or {}
    is_open = batch["status"] not in OVER
    show_pairs(
        {
            "ID": batch["id"],
            "Status": batch["status"],
            "Endpoint": batch["endpoint"],
            "Model": batch["model"],
            "Lines": f"{counts['completed']} answered, {counts['failed']} failed, {counts['total']} in all",
            "Tokens": f"{usage['input_tokens']} in, {usage['output_tokens']} out" if usage.get("total_tokens") else "",
            "Created": moment(batch["created_at"]),
            "Expires": moment(batch["expires_at"]) if is_open else "",
            "Done by": moment(forecast["finish_at"]) if is_open and forecast.get("finish_at") else "",
            "Expected": _expected(forecast) if is_open and forecast else "",
            "Input": batch["input_file_id"],
            "Output": batch["output_file_id"],
            "Errors": batch["error_file_id"],
        }
    )
    errors = (batch["errors"] or {}).get("data", [])
    if errors:
        print()
        show_table(
            ("LINE", "CODE", "MESSAGE"),
            [(error["line"], error["code"], error["message"]) for error in errors[:ERRORS_SHOWN]],
        )
    if len(errors) > ERRORS_SHOWN:
        remark(f"{len(errors) - ERRORS_SHOWN} more: modelyard batch show {batch['id']} --json")


def _expected(forecast: Item) -> str:
    tokens = forecast["input_tokens"] + forecast["output_tokens"]
    return f"about ${forecast['cost_usd']:.6g} for {tokens} tokens ({forecast['basis']})"
