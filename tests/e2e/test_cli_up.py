"""``modelyard up``: one owner a data directory, planes that come back, and nothing left behind."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import processes
from tests.support.waiting import eventually
from tests.support.yard import STOP_S, Yard


def modelyard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelyard", *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False)


def chat(yard: Yard, text: str = "hi") -> int:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}]}
    return yard.call("POST", "/v1/chat/completions", body).status


def test_the_first_start_prints_the_key_once_and_a_curl_that_works(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard:
        first = eventually(lambda: "Stop it with" in yard.output.read_text() and yard.output.read_text(), 30, "welcome")
        key_file = yard.data / "secrets" / "admin-key"
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert yard.admin_key in first
        assert f"{yard.url}/v1" in first
        assert f"{yard.url}/console" in first
        curl = next(line.strip() for line in first.splitlines() if line.strip().startswith("curl "))
        done = subprocess.run(["bash", "-c", f"{curl} -sS --fail"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert '"object"' in done.stdout
    yard.output.unlink()
    with yard:
        second = eventually(
            lambda: "Stop it with" in yard.output.read_text() and yard.output.read_text(), 30, "welcome"
        )
        assert yard.admin_key not in second
        assert str(key_file) in second
        assert yard.call("GET", "/v1/models").status == 200


def test_secrets_are_private(yard: Yard) -> None:
    for path in (yard.data / "secrets").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((yard.data / "secrets").stat().st_mode) == 0o700


def test_a_second_up_on_the_same_directory_names_the_first(yard: Yard) -> None:
    assert yard.process is not None
    done = modelyard("up", "--port", "0", "--data-dir", str(yard.data))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"process {yard.process.pid}" in done.stderr
    assert yard.url in done.stderr
    assert "modelyard down" in done.stderr
    assert yard.call("GET", "/readyz", key="").status == 200


@pytest.mark.parametrize("plane", ["gateway", "control"])
def test_a_killed_plane_comes_back_on_the_same_port(yard: Yard, plane: str) -> None:
    if "sim" not in {endpoint["name"] for endpoint in yard.get("/v1/endpoints")["data"]}:
        yard.deploy()
    (before,) = yard.plane_pids(plane)
    yard.kill(before)
    # What was killed may be there for a moment yet.
    eventually(lambda: yard.plane_pids(plane) not in ([], [before]), 40, "another one comes")
    eventually(lambda: chat(yard) == 200, 40, "answers again")
    eventually(lambda: yard.call("GET", "/v1/endpoints").status == 200, 40, "management answers again")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    yard = Yard(tmp_path)
    with yard:
        yard.deploy()
        assert yard.process is not None
        yard.signal(yard.process.pid, number)
        assert yard.process.wait(STOP_S) == 0
        assert not (yard.data / "run" / "up.json").exists()
        assert not processes.touching(yard.data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_after_a_clean_stop_do_not_change_its_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    with Yard(tmp_path) as yard:
        process = yard.process
        assert process is not None
        yard.signal(process.pid, number)
        eventually(
            lambda: "Stopped." in yard.output.read_text() or process.poll() is not None, STOP_S, "it has stopped"
        )
        while process.poll() is None:  # without a pause: the interpreter needs only milliseconds to end
            process.send_signal(number)
        assert process.returncode == 0


def test_down_stops_it_and_waits(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard:
        yard.deploy()
        done = modelyard("down", "--data-dir", str(yard.data))
        assert done.returncode == 0, done.stderr
        assert yard.process is not None
        assert yard.process.wait(20) == 0
        assert not processes.touching(yard.data)
    again = modelyard("down", "--data-dir", str(yard.data))
    assert again.returncode == 0
    assert "Nothing runs" in again.stderr


def test_a_killed_supervisor_leaves_no_plane_and_the_next_up_adopts_its_engines(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard:
        yard.deploy()
        (engine,) = yard.engines("sim")
        assert yard.process is not None
        planes = [*yard.plane_pids("gateway"), *yard.plane_pids("control")]
        yard.process.kill()
        yard.process.wait(20)
        eventually(lambda: not any(map(processes.is_alive, planes)), 40, "planes end by themselves")
        assert processes.is_alive(engine.pid)
        (yard.data / "run" / "up.json").unlink()  # the killed one's note; the yard waits for the next one's
        yard.start()
        yard.wait_ready("sim")
        assert [found.pid for found in yard.engines("sim")] == [engine.pid]
        assert chat(yard) == 200


def test_down_after_a_killed_supervisor_stops_the_engines(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with yard:
        yard.deploy()
        assert yard.process is not None
        yard.process.kill()
        yard.process.wait(20)
        yard.process = None  # its end was no regular one
        done = modelyard("down", "--data-dir", str(yard.data))
        assert done.returncode == 0, done.stderr
        assert not processes.touching(yard.data)


def test_ctrl_c_in_a_terminal_reaches_the_planes_in_order(tmp_path: Path) -> None:
    """The whole foreground process group gets SIGINT; planes must not take it for themselves."""
    yard = Yard(tmp_path)
    with yard:
        yard.deploy()
        assert yard.process is not None
        os.killpg(yard.process.pid, signal.SIGINT)
        assert yard.process.wait(STOP_S) == 0
        assert not processes.touching(yard.data)


def test_two_workers_share_one_port(tmp_path: Path) -> None:
    with Yard(tmp_path, {"gateway.workers": 2}) as yard:
        yard.deploy()
        assert len(yard.plane_pids("gateway")) == 2
        victim = yard.plane_pids("gateway")[0]
        yard.kill(victim)

        def are_two_again() -> bool:
            pids = yard.plane_pids("gateway")
            return len(pids) == 2 and victim not in pids

        eventually(are_two_again, 40, "another second worker")
        for turn in range(10):
            assert chat(yard, f"turn {turn}") == 200


def test_simulate_deploys_a_model_once(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "modelyard", "up", "--simulate", "--port", "0", "--data-dir", str(data)]
    for _ in range(2):
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith(b"Stop it with"):
                        break
                done = modelyard("run", "sim", "hello there", "--data-dir", str(data))
                assert done.returncode == 0, done.stderr
                assert done.stdout.strip()
                names = modelyard("endpoints", "--data-dir", str(data))
                assert names.stdout.count("\nsim ") == 1
            finally:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
        assert process.returncode == 0
