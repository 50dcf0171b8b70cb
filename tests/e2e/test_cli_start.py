"""Starting the program: fast where nothing is to be done, one line where something is in the way."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def modelyard(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MODELYARD")}
    command = [sys.executable, "-m", "modelyard", *arguments]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=clean | environment,
        timeout=60,
        check=False,
    )


def refusal(*arguments: str, code: int = 1, **environment: str) -> str:
    done = modelyard(*arguments, **environment)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_version_and_help_load_click_and_nothing_else(argument: str) -> None:
    program = (
        "import sys; from modelyard.cli.main import main; code = main([sys.argv[1]]);"
        "print('\\n'.join(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, argument], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    loaded = set(done.stderr.split())
    assert "click" in loaded
    ours = {name for name in loaded if name.partition(".")[0] == "modelyard"}
    assert ours == {"modelyard", "modelyard.cli", "modelyard.cli.main"}
    foreign = {name.partition(".")[0] for name in loaded} & {
        "aiohttp",
        "alembic",
        "asyncio",
        "httptools",
        "jinja2",
        "msgspec",
        "rich",
        "sqlalchemy",
        "starlette",
        "urllib3",
        "uvicorn",
        "uvloop",
    }
    assert not foreign


def test_the_gateway_loads_neither_sql_nor_a_web_framework() -> None:
    program = (
        "import sys, modelyard.compose, modelyard.gateway.app, modelyard.stores.feed; print('\\n'.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert not roots & {"sqlalchemy", "alembic", "starlette", "uvicorn", "jinja2", "aiohttp", "urllib3", "click"}


def test_no_argument_shows_the_help_and_is_a_usage_error() -> None:
    done = modelyard()
    assert done.returncode == 2
    assert "Commands:" in done.stderr


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refusal("up", "--port", "0", "--data-dir", str(tmp_path / "file" / "data"))
    assert "Cannot write the data directory" in line
    assert "--data-dir" in line


def test_a_path_too_long_for_a_socket_is_one_line(tmp_path: Path) -> None:
    line = refusal("up", "--port", "0", "--data-dir", str(tmp_path / ("x" * 120)))
    assert "too long" in line
    assert "--data-dir" in line


def test_a_busy_port_names_its_owner_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        line = refusal("up", "--port", str(port), "--data-dir", str(tmp_path / "data"))
        assert f"Port {port} is taken" in line
        assert f"(pid {os.getpid()})" in line
        assert "--port" in line
        shared = refusal("up", "--workers", "2", "--port", str(port), "--data-dir", str(tmp_path / "data"))
        assert "is taken" in shared
    assert not (tmp_path / "data" / "run" / "up.json").exists()


def test_an_address_of_another_machine_is_one_line(tmp_path: Path) -> None:
    line = refusal("up", "--host", "192.0.2.1", "--port", "0", "--data-dir", str(tmp_path / "data")).splitlines()[-1]
    assert "192.0.2.1" in line


@pytest.mark.parametrize(
    ("text", "said"), [("[gateway]\nprot = 1", "Did you mean 'port'?"), ("x = [", "not valid TOML")]
)
def test_a_bad_configuration_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "modelyard.toml"
    file.write_text(text)
    assert said in refusal("up", "--config", str(file), "--data-dir", str(tmp_path / "data"))


def test_a_bad_variable_is_one_line(tmp_path: Path) -> None:
    line = refusal("up", "--data-dir", str(tmp_path / "data"), MODELYARD__GATEWAY__WORKERS="many")
    assert "MODELYARD__GATEWAY__WORKERS" in line


def test_a_damaged_secret_is_one_line(tmp_path: Path) -> None:
    secrets = tmp_path / "data" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "pepper").write_text("short")
    line = refusal("up", "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert "damaged" in line
    assert str(secrets / "pepper") in line


def test_a_damaged_database_is_one_line_and_stops_everything(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "control.sqlite").write_bytes(b"this is no database" * 1000)
    line = refusal("up", "--port", "0", "--data-dir", str(data))
    assert "control.sqlite" in line
    assert not (data / "run" / "up.json").exists()
