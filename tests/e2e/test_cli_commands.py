"""The commands against a running platform: data on stdout, remarks on stderr, exit codes that scripts can use."""

import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet
import pytest
from tests.support.waiting import eventually
from tests.support.yard import Yard


def run(
    yard: Yard, *arguments: str, stdin: str | None = None, key: str | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelyard", *arguments]
    command += ["--url", yard.url, "--key", key] if key else ["--data-dir", str(yard.data)]
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, **given)


def out(yard: Yard, *arguments: str, stdin: str | None = None) -> str:
    done = run(yard, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout, "no colours in a pipe"
    return done.stdout


@pytest.fixture(scope="module")
def served(yard: Yard) -> Yard:
    done = run(yard, "deploy", "--name", "sim", "--engine", "simulated", "--wait")
    assert done.returncode == 0, done.stderr
    assert "ready" in done.stdout
    return yard


# --- run ---


def test_a_pipe_gets_the_answer_and_nothing_else(served: Yard) -> None:
    done = run(served, "run", "sim", stdin="hi there\n")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "hi there" in done.stdout  # the simulated engine echoes
    assert done.stdout.endswith("\n")
    assert not done.stdout.endswith("\n\n")


def test_prompt_and_pipe_are_asked_together(served: Yard) -> None:
    answer = out(served, "run", "sim", "summarise", "this:", stdin="the notes")
    assert "summarise this:" in answer
    assert "the notes" in answer


def test_run_without_a_question_is_a_usage_error(served: Yard) -> None:
    done = run(served, "run", "sim")
    assert done.returncode == 2
    assert "no question" in done.stderr


def test_an_unknown_model_is_guessed_and_exits_3(served: Yard) -> None:
    done = run(served, "run", "simm", "hi")
    assert done.returncode == 3
    assert "Did you mean 'sim'?" in done.stderr
    assert "request id req_" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_conversation_on_a_terminal(served: Yard) -> None:
    with terminal(served, "run", "sim") as (process, say, seen):
        eventually(lambda: ">>> " in seen(), 40, "a prompt")
        say("hello terminal")
        eventually(lambda: seen().count("hello terminal") >= 2 and seen().rstrip().endswith(">>>"), 30, "an echo")
        say("/set temperature x")
        eventually(lambda: "is no number" in seen(), 20, "a complaint")
        say("/clear")
        eventually(lambda: "Forgotten" in seen(), 20, "cleared")
        say("/bye")
        assert process.wait(30) == 0


def test_ctrl_c_stops_the_answer_and_twice_leaves(served: Yard) -> None:
    served.deploy("slow", options={"itl_ms": 500})
    with terminal(served, "run", "slow") as (process, say, seen):
        eventually(lambda: ">>> " in seen(), 40, "a prompt")
        # Counted from before: the terminal's own echo of the question (73 characters) may come at any moment.
        before = len(seen())
        say("one two three four five six seven eight nine ten eleven twelve thirteen")
        eventually(lambda: len(seen()) > before + 80, 30, "the answer begins")
        os.kill(process.pid, signal.SIGINT)
        eventually(lambda: "(stopped)" in seen(), 20, "it stops")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 130


def test_ctrl_c_of_a_single_question_exits_130(served: Yard) -> None:
    command = [sys.executable, "-m", "modelyard", "run", "slow", "a b c d e f g h i j k l m n o p q r s t u v w"]
    command += ["--data-dir", str(served.data)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in stderr


def test_a_cold_model_shows_its_loading_on_stderr(served: Yard) -> None:
    deployed = run(
        served, "deploy", "--name", "cold", "--engine", "simulated", "--scale", "0..1", "--option", "load_s=8"
    )
    assert deployed.returncode == 0, deployed.stderr
    done = run(served, "run", "cold", "wake up")
    assert done.returncode == 0, done.stderr
    assert "wake up" in done.stdout
    assert "loading" in done.stderr
    assert "loading" not in done.stdout


# --- listings ---


def test_every_listing_has_a_table_json_and_ids(served: Yard) -> None:
    out(served, "run", "sim", "something to list")
    for listing, needle in (("models", "sim"), ("endpoints", "sim"), ("keys", "admin")):
        table = out(served, listing)
        assert table.splitlines()[0].isupper()
        assert needle in table
        items = json.loads(out(served, listing, "--json"))
        ids = out(served, listing, "--quiet").split()
        assert ids == [item["id"] for item in items]


def test_a_model_is_inspected_by_name_and_by_id(served: Yard) -> None:
    shown = json.loads(out(served, "models", "inspect", "sim", "--json"))
    assert (shown["name"], shown["framework"]) == ("sim", "simulated")
    assert shown["facts"] == {}, "the simulated engine loads no file"
    assert json.loads(out(served, "models", "inspect", shown["id"], "--json")) == shown
    assert f"ID                   {shown['id']}" in out(served, "models", "inspect", "sim")
    assert run(served, "models", "inspect", "simm").returncode == 3


def test_one_endpoint_shows_stage_replicas_and_events(served: Yard) -> None:
    text = out(served, "endpoints", "sim")
    assert "running" in text
    assert "REPLICA" in text
    assert "EVENT" in text
    shown = json.loads(out(served, "endpoints", "sim", "--json"))
    assert shown["name"] == "sim"
    assert shown["events"]
    assert out(served, "endpoints", "sim", "--quiet").strip() == shown["id"]


def test_an_endpoint_is_removed_by_name_and_then_unknown(served: Yard) -> None:
    assert run(served, "deploy", "--name", "gone", "--engine", "simulated").returncode == 0
    assert run(served, "endpoints", "rm", "gone").returncode == 0
    eventually(lambda: run(served, "endpoints", "gone").returncode == 3, 40, "it is forgotten")
    done = run(served, "endpoints", "rm", "siim")
    assert done.returncode == 3
    assert "Did you mean 'sim'?" in done.stderr


def test_status_is_well(served: Yard) -> None:
    assert "well" in out(served, "status")
    assert json.loads(out(served, "status", "--json"))["gateways"]


def test_nodes_show_this_machine(served: Yard) -> None:
    heading, local = out(served, "nodes").splitlines()
    assert heading.split() == ["NODE", "POOL", "ACCELERATORS", "USED", "FREE", "BY", "CACHED", "PRICE/H", "STATE"]
    assert local.startswith("local  default  1 x cpu ")
    assert out(served, "nodes", "--quiet").split() == ["local"]
    [shown] = json.loads(out(served, "nodes", "--json"))
    assert shown["accelerators"][0]["memory_bytes"] > 0


def test_a_dry_run_changes_nothing(served: Yard) -> None:
    order = ("deploy", "--name", "dry", "--engine", "simulated", "--scale", "0..4")
    assert json.loads(out(served, *order, "--print"))["hardware"] == {"min_replicas": 0, "max_replicas": 4}
    plan = out(served, *order, "--dry-run")
    assert "Fits          yes" in plan
    assert "REPLICA  NODE" in plan
    shown = json.loads(out(served, *order, "--dry-run", "--json"))
    assert [place["node"] for place in shown["replicas"]] == ["local"] * 4
    assert "dry" not in out(served, "endpoints")


# --- keys and usage ---


def test_a_key_lives_its_life(served: Yard) -> None:
    made = json.loads(out(served, "keys", "create", "ci", "--model", "sim", "--rpm", "1000", "--json"))
    assert made["limits"]["requests_per_minute"] == 1000
    assert run(served, "run", "sim", "hi", key=made["key"]).returncode == 0
    assert run(served, "keys", key=made["key"]).returncode == 4
    rotated = out(served, "keys", "rotate", made["id"], "--overlap", "0s", "--quiet").strip()
    assert run(served, "run", "sim", "hi", key=rotated).returncode == 0
    assert run(served, "run", "sim", "hi", key=made["key"]).returncode == 4
    assert run(served, "keys", "revoke", made["id"]).returncode == 0
    assert run(served, "run", "sim", "hi", key=rotated).returncode == 4
    assert "revoked" in out(served, "keys")


def test_a_key_for_an_endpoint_that_is_not_there_is_made_with_a_warning(served: Yard) -> None:
    assert "Warning" not in run(served, "keys", "create", "known", "--model", "sim").stderr
    early = run(served, "keys", "create", "early", "--model", "smi", "--quiet")
    assert early.returncode == 0, "it may be deployed later"
    assert "Warning: there is no endpoint 'smi' yet. Did you mean 'sim'?" in early.stderr


def test_over_the_limit_exits_5(served: Yard) -> None:
    key = out(served, "keys", "create", "tight", "--rpm", "1", "--quiet").strip()
    codes = [run(served, "run", "sim", "hi", key=key).returncode for _ in range(2)]
    assert codes == [0, 5]


def book_one(served: Yard) -> None:
    """Ask something, and wait for its row: those of all that ended before it are there then, too."""
    key = json.loads(out(served, "keys", "create", "counted", "--json"))
    assert run(served, "run", "sim", "count me", key=key["key"]).returncode == 0
    wanted = f"SELECT 1 FROM inference_requests WHERE api_key_id = '{key['id']}'"
    eventually(lambda: served.query(wanted) and served.is_booked(), 30, "all is booked")


def test_usage_agrees_with_the_ledger_in_every_format(served: Yard) -> None:
    book_one(served)
    report = json.loads(out(served, "usage", "--by", "model,day", "--since", "1h", "--json"))
    rows = served.rows()
    assert report["total"]["requests"] == len(rows)
    assert report["total"]["cost_nanousd"] == sum(row.cost_nanousd for row in rows) > 0
    table = out(served, "usage", "--by", "model,day", "--since", "1h")
    assert table.splitlines()[0].split()[:2] == ["MODEL", "DAY"]
    sheet = list(csv.DictReader(io.StringIO(out(served, "usage", "--by", "model", "--since", "1h", "--csv"))))
    assert sum(int(line["cost_nanousd"]) for line in sheet) == report["total"]["cost_nanousd"]
    assert [line["units_seconds"] for line in sheet] == ["0"] * len(sheet)
    monthly = json.loads(
        out(served, "usage", "show", "--by", "month", "--since", "1h", "--tz", "Asia/Kolkata", "--json")
    )
    assert (monthly["tz"], monthly["total"]["requests"]) == ("Asia/Kolkata", len(rows))
    assert run(served, "usage", "--tz", "Mars/Phobos").returncode == 2


def test_an_export_is_the_ledger_and_there_only_when_it_is_whole(served: Yard, tmp_path: Path) -> None:
    book_one(served)
    rows = {row.request_id: row for row in served.rows()}
    sheet = list(csv.DictReader(io.StringIO(out(served, "usage", "export", "--since", "1h"))))
    assert {line["request_id"]: int(line["cost_nanousd"]) for line in sheet} == {
        rid: row.cost_nanousd for rid, row in rows.items()
    }
    file = tmp_path / "all.jsonl"
    assert run(served, "usage", "export", "--since", "1h", "-o", str(file)).returncode == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [line["request_id"] for line in sheet]
    columns = tmp_path / "sums.parquet"
    assert run(served, "usage", "export", "--by", "model,day", "--since", "1h", "-o", str(columns)).returncode == 0
    table = pyarrow.parquet.read_table(columns).to_pylist()
    assert sum(line["cost_nanousd"] for line in table) == sum(row.cost_nanousd for row in rows.values())
    refused = run(served, "usage", "export", "--tz", "Mars/Phobos", "-o", str(tmp_path / "none.csv"))
    assert refused.returncode == 2
    assert "time zone" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "sums.parquet"]


# --- logs ---


def test_logs_of_every_source(served: Yard) -> None:
    assert out(served, "logs", "sim", "--tail", "5").count("\n") <= 5
    assert "deployed" in out(served, "logs", "sim", "--source", "events")
    assert json.loads(out(served, "logs", "--source", "control", "--tail", "1"))["plane"] == "control"
    assert out(served, "logs", "--source", "gateway")
    whole = out(served, "logs", "--source", "control")
    assert out(served, "logs", "--source", "control", "--since", "1d").startswith(whole)
    assert "deployed" in out(served, "logs", "sim", "--source", "events", "--since", "1d")
    assert out(served, "logs", "sim", "--source", "events", "--since", "0s") == ""
    assert run(served, "logs", "siim").returncode == 3


def test_followed_logs_survive_a_restart_of_the_controller(served: Yard) -> None:
    served.deploy("talker")
    command = [sys.executable, "-m", "modelyard", "logs", "talker", "-f", "--data-dir", str(served.data)]
    (engine,) = served.engines("talker")
    log = next(file for file in engine.folder.iterdir() if file.name.endswith(".log"))
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        lines: list[bytes] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or []))
        reader.start()
        try:
            write(log, "marker one")
            eventually(lambda: any(b"marker one" in line for line in lines), 30, "the first line")
            served.kill(served.plane_pids("control")[0])
            write(log, "marker two")
            eventually(lambda: any(b"marker two" in line for line in lines), 40, "the second line")
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            finally:
                process.kill()
            reader.join(10)
    text = b"".join(lines)
    assert (text.count(b"marker one"), text.count(b"marker two")) == (1, 1)


def write(log: Path, line: str) -> None:
    with log.open("a") as writer:
        writer.write(f"{line}\n")


# --- exit codes ---


def test_wrong_keys_exit_4(served: Yard) -> None:
    for key in ("nonsense", served.admin_key[:-1] + ("0" if served.admin_key[-1] != "0" else "1")):
        done = run(served, "models", key=key)
        assert done.returncode == 4
        assert done.stderr.count("\n") == 1


def test_a_bad_option_of_an_engine_exits_2(served: Yard) -> None:
    done = run(served, "deploy", "--name", "bad", "--engine", "simulated", "--option", "colour=red")
    assert done.returncode == 2
    assert "colour" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_taken_name_exits_1(served: Yard) -> None:
    done = run(served, "deploy", "--name", "sim", "--engine", "simulated")
    assert done.returncode == 1
    assert "sim" in done.stderr


@pytest.mark.parametrize(
    ("status", "code"), [(400, 2), (401, 4), (403, 4), (404, 3), (409, 1), (429, 5), (500, 1), (502, 6), (503, 6)]
)
def test_exit_codes_follow_the_status_over_the_wire(status: int, code: int) -> None:
    with answering(status, b'{"error":{"message":"No.","type":"x","param":null,"code":"c"}}') as url:
        done = subprocess.run(
            [sys.executable, "-m", "modelyard", "models", "--url", url, "--key", "k"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == code
    assert done.stderr == "Error: No. (request id req_1)\n"


def test_something_that_is_no_modelyard_is_one_line() -> None:
    for status, body in ((200, b"<html>hello"), (500, b"<html>oops\n\nlong"), (302, b"")):
        with answering(status, body) as url:
            done = subprocess.run(
                [sys.executable, "-m", "modelyard", "endpoints", "--url", url, "--key", "k"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == 1, (status, done.stderr)
        assert done.stderr.count("\n") == 1


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("x-request-id", "req_1")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def terminal(yard: Yard, *arguments: str):
    """Run a command on a terminal of its own; gives the process, a way to type and what is on the screen."""
    leader, follower = pty.openpty()
    screen = bytearray()

    def watch() -> None:
        while True:
            try:
                piece = os.read(leader, 4096)
            except OSError:
                return
            if not piece:
                return
            screen.extend(piece)

    command = [sys.executable, "-m", "modelyard", *arguments, "--data-dir", str(yard.data)]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield process, lambda line: os.write(leader, f"{line}\n".encode()), lambda: screen.decode("utf-8", "replace")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        watcher.join(10)
        os.close(leader)
