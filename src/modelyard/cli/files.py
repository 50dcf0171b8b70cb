"""``modelyard files``: files of the platform, as batches read and write them."""

import os
import secrets
import stat
import sys
import time
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import click

from modelyard.cli.bars import ByteBar, size_text
from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import Platform, connected, segment
from modelyard.cli.nouns import DURATION, NounGroup
from modelyard.cli.output import Item, age, formats, listing, moment, owners, remark, show_json, show_list, show_pairs
from modelyard.domain.files import BATCH_FILE_ENDING, FILES_PATH, UPLOADABLE, FilePurpose

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

TRIES_MAX = 5
PAUSE_S = 0.5
BLOCK_BYTES = 1024 * 1024
PAGE = 1000

_READABLE = ("text/", "application/json")
_EXAMPLE = """\b
Example:
  modelyard files upload requests.jsonl
  modelyard files
  modelyard files get file-3kf8x2ma… -o answers.jsonl
  modelyard files rm file-3kf8x2ma…"""


@click.group("files", cls=NounGroup, epilog=_EXAMPLE, short_help="Upload, list, fetch and remove files.")
def command() -> None:
    """Upload, list, show, fetch and remove files; without a verb: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard files list --purpose batch_output")
@click.option("--purpose", type=click.Choice([one.value for one in FilePurpose]), help="Only those of this purpose.")
@connected
@listing
def list_files(*, purpose: str | None, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List the files that you may see, the newest first."""
    files = platform.all(FILES_PATH, limit=PAGE, purpose=purpose)
    columns: dict[str, Callable[[Item], object]] = {
        "ID": lambda file: file["id"],
        **owners(files, "modelyard", "tenant_id"),
        "NAME": lambda file: file["filename"],
        "PURPOSE": lambda file: file["purpose"],
        "SIZE": lambda file: size_text(file["bytes"]),
        "EXPIRES": lambda file: moment(file["expires_at"]) if "expires_at" in file else "never",
        "AGE": lambda file: age(file["created_at"]),
    }
    show_list(
        files, columns, is_json=is_json, is_quiet=is_quiet, empty="No files. Send one: modelyard files upload FILE"
    )


@command.command("upload", epilog="\b\nExample:\n  modelyard files upload requests.jsonl --expires 7d -q")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--purpose",
    type=click.Choice([one.value for one in UPLOADABLE]),
    help="What it is for. [default: batch for a .jsonl file, else user_data]",
)
@click.option("--expires", "expires_s", type=DURATION, help="When it ends, from now: 1h to 30d.")
@connected
@formats("Print only the file's id.")
def upload(
    path: Path, *, purpose: str | None, expires_s: float | None, platform: Platform, is_json: bool, is_quiet: bool
) -> None:
    """Send the file at PATH, while it is read."""
    file = send_file(platform, path.expanduser().absolute(), purpose=purpose, expires_s=expires_s)
    _show(file, is_json=is_json, is_quiet=is_quiet)


@command.command("show", epilog="\b\nExample:\n  modelyard files show file-3kf8x2ma…")
@click.argument("file_id")
@connected
@formats("Print only the file's id.")
def show(file_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show what is known of a file."""
    _show(platform.get(f"{FILES_PATH}/{segment(file_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("get", epilog="\b\nExample:\n  modelyard files get file-3kf8x2ma… -o answers.jsonl")
@click.argument("file_id")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File or folder to write to. [default: stdout]")
@connected
def get(file_id: str, *, output: Path | None, platform: Platform) -> None:
    """Fetch the content of a file."""
    path = f"{FILES_PATH}/{segment(file_id)}"
    place = None if output is None or str(output) == "-" else output.expanduser().absolute()
    if place is not None and place.is_dir():
        place /= _plain(platform.get(path)["filename"])
    with platform.download(f"{path}/content") as response:
        if place is None:
            _print(response, platform)
        else:
            write_download(response, place, platform)
            remark(f"Wrote {place}.")


@command.command("rm", epilog="\b\nExample:\n  modelyard files rm file-3kf8x2ma… file-8bq2m4xw…")
@click.argument("file_ids", nargs=-1, required=True, metavar="FILE_ID…")
@connected
def remove(file_ids: tuple[str, ...], *, platform: Platform) -> None:
    """Delete files for good."""
    for file_id in file_ids:
        platform.delete(f"{FILES_PATH}/{segment(file_id)}")
        remark(f"Deleted {file_id}.")


def send_file(platform: Platform, path: Path, *, purpose: str | None = None, expires_s: float | None = None) -> Item:
    """Send a file, again where the line or the platform was lost for a while; return what the platform made of it.

    One idempotency key goes with all tries, so that it is stored once.

    Raises:
        Failure: the file cannot be read, or the platform refuses it or stays away.
    """
    texts = {"purpose": purpose or (FilePurpose.BATCH if path.suffix.lower() == BATCH_FILE_ENDING else "user_data")}
    if expires_s is not None:
        texts |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(int(expires_s))}
    key, pause_s = secrets.token_hex(16), PAUSE_S
    for left in reversed(range(TRIES_MAX)):
        try:
            return _send_once(platform, path, texts, key)
        except Failure as error:
            is_busy = isinstance(error, Refused) and error.code == "idempotency_key_in_use"  # with the try before
            if not left or not (is_busy or error.exit_code is Exit.UNAVAILABLE):
                raise
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("the last try returns or raises")


def _send_once(platform: Platform, path: Path, texts: dict[str, str], key: str) -> Item:
    try:
        mode = path.stat().st_mode  # before it is opened: a pipe waits there
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise Failure(f"{path} is no regular file, so its size is not known. Save it to one first.", Exit.USAGE)
        reader = path.open("rb", buffering=0)
    except OSError as error:
        raise Failure(f"Cannot read {path}: {error.strerror}. Check the path.", Exit.NOT_FOUND) from error
    with reader:
        size = os.fstat(reader.fileno()).st_size
        bar = ByteBar(f"uploading {path.name}", size)
        form = _Form(reader, size, path.name, texts, bar.add)
        headers = {"content-type": form.content_type, "idempotency-key": key}
        try:
            made: Item = platform.send("POST", FILES_PATH, cast("IO[bytes]", form), form.whole, headers)
        finally:
            bar.close()
    return made


class _Form(RawIOBase):
    """A form with a file as something to be read once; ``whole`` is its length."""

    def __init__(self, reader: RawIOBase, size: int, name: str, texts: dict[str, str], sent: Callable[[int], None]):
        super().__init__()
        boundary = secrets.token_hex(16)
        quoted = name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
        fields = [f'--{boundary}\r\ncontent-disposition: form-data; name="{key}"\r\n\r\n{text}\r\n'
                  for key, text in texts.items()]  # fmt: skip
        fields.append(f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{quoted}"\r\n\r\n')
        self._before = "".join(fields).encode("utf-8", "replace")
        self._after = f"\r\n--{boundary}--\r\n".encode()
        self._reader = reader
        self._left = size
        self._tell = sent
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self.whole = len(self._before) + size + len(self._after)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        if self._before:
            block, self._before = self._before, b""
            return block
        if self._left:
            block = self._reader.read(min(self._left, BLOCK_BYTES if size < 0 else size)) or b""
            if not block:
                raise Failure("The file became shorter while it was sent. Start again.")
            self._left -= len(block)
            self._tell(len(block))
            return block
        block, self._after = self._after, b""
        return block


def _print(response: "BaseHTTPResponse", platform: Platform) -> None:
    kind = response.headers.get("content-type", "")
    if sys.stdout.isatty() and not kind.startswith(_READABLE):
        raise Failure("This file is no text for a terminal. Write it to a file: -o FILE.", Exit.USAGE)
    _copy(response, sys.stdout.buffer.write, platform, lambda _: None)
    sys.stdout.buffer.flush()


def write_download(response: "BaseHTTPResponse", place: Path, platform: Platform) -> None:
    """Write to a draft beside the place, which becomes the file once it is whole."""
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    bar = ByteBar(f"fetching {place.name}", int(response.headers.get("content-length", 0)))
    try:
        with draft.open("xb") as writer:
            _copy(response, writer.write, platform, bar.add)
        draft.replace(place)
    except OSError as error:
        raise Failure(f"Cannot write {place}: {error.strerror}. Check the path and the disk.") from error
    finally:
        bar.close()
        draft.unlink(missing_ok=True)


def _copy(
    response: "BaseHTTPResponse", write: Callable[[bytes], object], platform: Platform, sent: Callable[[int], None]
) -> None:
    import urllib3

    try:
        for block in response.stream(BLOCK_BYTES):
            write(block)
            sent(len(block))
    except urllib3.exceptions.HTTPError as error:
        raise platform.unreachable(error) from error


def _plain(name: str) -> str:
    """Return a name that the platform told as one that stays in its folder."""
    plain = name.replace("\\", "/").rpartition("/")[2].replace("\0", "")
    return plain if plain.strip(".") else "file"


def _show(file: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(file)
    elif is_quiet:
        print(file["id"])
    else:
        expires = moment(file["expires_at"]) if "expires_at" in file else "never"
        about = {
            "ID": file["id"],
            "Name": file["filename"],
            "Purpose": file["purpose"],
            "Size": size_text(file["bytes"]),
        }
        show_pairs(about | {"Created": moment(file["created_at"]), "Expires": expires})
