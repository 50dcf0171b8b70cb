"""Files from the command line: sent with a bar, listed, shown, fetched whole or not at all, removed."""

import contextlib
import json
import os
import socket
import threading
from pathlib import Path

import pytest
from tests.e2e.test_cli_commands import out, run, terminal
from tests.support.files import FILES
from tests.support.waiting import eventually
from tests.support.yard import Yard

from modelyard.cli.files import send_file
from modelyard.cli.http import Platform

MB = 1_000_000
SETTINGS = {"control.batch_file_bytes_max": 20 * MB}


def upload(yard: Yard, file: Path, *more: str) -> str:
    done = run(yard, "files", "upload", str(file), "-q", *more)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_file_goes_there_and_comes_back(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / 'my "requests" größe.jsonl'
    file.write_bytes(os.urandom(5 * MB))
    done = run(yard, "files", "upload", str(file), "--expires", "7d", "--json")
    assert done.returncode == 0, done.stderr
    assert f"uploading {file.name}  100 %  5.0 MB/5.0 MB" in done.stderr
    made = json.loads(done.stdout)
    assert (made["purpose"], made["bytes"]) == ("batch", 5 * MB)
    assert made["expires_at"] - made["created_at"] == 7 * 86_400
    shown = out(yard, "files", "show", made["id"])
    assert f"ID       {made['id']}" in shown
    assert "Size     5.0 MB" in shown
    listed = out(yard, "files")
    assert listed.splitlines()[0].split() == ["ID", "NAME", "PURPOSE", "SIZE", "EXPIRES", "AGE"]
    assert made["id"] in listed
    assert made["id"] in out(yard, "files", "list", "--purpose", "batch", "-q").split()
    assert made["id"] not in out(yard, "files", "list", "--purpose", "vision", "-q").split()

    place = tmp_path / "fetched"
    place.mkdir()
    fetched = run(yard, "files", "get", made["id"], "-o", str(place))
    assert (fetched.returncode, "100 %" in fetched.stderr) == (0, True), fetched.stderr
    (only,) = place.iterdir()
    assert only.name == made["filename"]
    assert only.read_bytes() == file.read_bytes()

    other = upload(yard, file, "--purpose", "user_data")
    gone = run(yard, "files", "rm", made["id"], other)
    assert gone.stderr == f"Deleted {made['id']}.\nDeleted {other}.\n"
    missing = run(yard, "files", "rm", other)
    assert (missing.returncode, len(missing.stderr.splitlines())) == (3, 1)


def test_a_text_is_printed_as_it_is(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("line\n€")
    assert out(yard, "files", "get", upload(yard, file)) == "line\n€"


def test_a_terminal_gets_no_bytes_that_it_cannot_show(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"\x1b]0;gotcha\x07")
    file_id = upload(yard, file)
    with terminal(yard, "files", "get", file_id) as (process, _, screen):
        assert process.wait(30) == 2
        eventually(lambda: "-o FILE" in screen(), 20, "it says what to do")
        assert "gotcha" not in screen()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("upload", "/nowhere/at.all"), 3, "No such file"),
        (("upload", "/"), 3, "Is a directory"),
        (("upload", "README.md", "--purpose", "batch"), 2, "must end in .jsonl"),
        (("upload", "README.md", "--expires", "5m"), 2, "3600"),
        (("show", "file-none"), 3, "No such file 'file-none'"),
        (("get", "../../etc"), 3, "Invalid URL"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(yard: Yard, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = run(yard, "files", *arguments)
    assert (done.returncode, len([line for line in done.stderr.splitlines() if "uploading" not in line])) == (code, 1)
    assert said in done.stderr


def test_a_file_that_is_too_large_is_told_and_not_sent_again(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "large.jsonl"
    file.write_bytes(bytes(21 * MB))
    done = run(yard, "files", "upload", str(file))
    assert (done.returncode, done.stderr.count("uploading large.jsonl  100 %")) == (1, 1)
    assert "control.batch_file_bytes_max" in done.stderr


def test_a_write_that_fails_leaves_no_half_file(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"x")
    file_id = upload(yard, file)
    done = run(yard, "files", "get", file_id, "-o", str(tmp_path / "none" / "a.txt"))
    assert (done.returncode, "No such file or directory" in done.stderr) == (1, True)
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


class Cutter:
    """A line to the platform whose first connection loses the answer."""

    def __init__(self, yard: Yard) -> None:
        self._target = ("127.0.0.1", yard.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake who accepts
        self._listener.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with client, socket.create_connection(self._target) as platform:
                threading.Thread(target=pump, args=(client, platform), daemon=True).start()
                if self.connections == 1:
                    platform.recv(1)  # it has answered, and so stored the file
                    client.shutdown(socket.SHUT_RDWR)  # closing alone would not end what still reads it
                    continue
                pump(platform, client)


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_a_file_whose_answer_was_lost_is_sent_again_and_stored_once(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "once.jsonl"
    file.write_bytes(b"{}\n")
    cutter = Cutter(yard)
    try:
        made = send_file(Platform(cutter.url, yard.admin_key), file)
    finally:
        cutter.close()
    assert cutter.connections == 2
    named = [one["id"] for one in yard.get(FILES)["data"] if one["filename"] == "once.jsonl"]
    assert named == [made["id"]]
