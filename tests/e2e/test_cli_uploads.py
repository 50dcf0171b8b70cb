"""Files from the command line to the platform: uploads that go on, deployments of them, endpoints from a file."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.test_cli_commands import out, run, terminal
from tests.support.uploading import UPLOADS, content_of, digest_of, stored
from tests.support.waiting import eventually
from tests.support.yard import Yard

MIB = 1024 * 1024
FILE = """\
name = "{name}"
engine = "simulated"

[options]
slots = {slots}

[hardware]
max_replicas = {most}
"""


def model_in(folder: Path, size: int, *, seed: int) -> Path:
    file = folder / "my model.gguf"
    file.write_bytes(content_of(size, seed=seed))
    return file


def manager_of(yard: Yard) -> str:
    """Return a key that manages and is no admin's."""
    reply = yard.call("POST", "/v1/keys", {"name": "m", "scopes": ["manage", "inference"]})
    assert reply.status in (200, 201), reply.body
    return str(reply.json()["key"])


def test_a_file_is_uploaded_once_and_listed(yard: Yard, tmp_path: Path) -> None:
    file = model_in(tmp_path, 3 * MIB, seed=21)
    done = run(yard, "models", "upload", str(file))
    assert done.returncode == 0, done.stderr
    uri = f"upload:{digest_of(file.read_bytes())}"
    assert f"Uploaded my model.gguf as {uri}." in done.stdout
    assert f"modelyard deploy {uri} --name my-model --engine llamacpp" in done.stdout, "as it stands it can be typed"
    assert "uploading my model.gguf  100 %" in done.stderr
    again = run(yard, "models", "upload", str(file), "-q")
    assert (again.stdout.strip(), "uploading" in again.stderr) == (uri, False)
    assert len(yard.get(f"{UPLOADS}?digest={uri.removeprefix('upload:')}")["data"]) == 1
    missing = run(yard, "models", "upload", str(tmp_path / "none.gguf"))
    assert (missing.returncode, "No such file" in missing.stderr) == (3, True)
    assert len(missing.stderr.splitlines()) == 1


def test_a_file_that_the_platform_has_lost_is_sent_again_at_once(yard: Yard, tmp_path: Path) -> None:
    file = model_in(tmp_path, MIB, seed=24)
    kept = stored(yard, digest_of(file.read_bytes()))
    assert run(yard, "models", "upload", str(file)).returncode == 0
    kept.rename(tmp_path / "quarantined")
    again = run(yard, "models", "upload", str(file))
    assert (again.returncode, "uploading my model.gguf  100 %" in again.stderr) == (0, True), again.stderr
    assert kept.read_bytes() == file.read_bytes()


def test_an_upload_goes_on_after_ctrl_c(yard: Yard, tmp_path: Path) -> None:
    file = model_in(tmp_path, 160 * MIB, seed=22)
    digest = digest_of(file.read_bytes())
    # Nice, so that on a busy machine it is not through before this one has looked.
    command = ["nice", "-n", "19", sys.executable, "-m", "modelyard", "models", "upload", str(file)]
    command += ["--parallel", "1", "--data-dir"]
    first = subprocess.Popen([*command, str(yard.data)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def some() -> bool:
        found = yard.get(f"{UPLOADS}?digest={digest}")["data"]
        return bool(found and found[0]["parts"])

    try:
        eventually(some, 60, "a part is there")
        first.send_signal(signal.SIGINT)
        _, told = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130, told
    assert "Traceback" not in told
    (before,) = yard.get(f"{UPLOADS}?digest={digest}")["data"]
    assert before["status"] == "open"
    assert 0 < len(before["parts"]) < before["part_count"]
    done = run(yard, "models", "upload", str(file), "--json")
    assert done.returncode == 0, done.stderr
    after = json.loads(done.stdout)
    assert (after["id"], after["status"]) == (before["id"], "complete")
    assert stored(yard, digest).stat().st_size == file.stat().st_size


def test_a_file_that_the_platform_may_not_read_is_uploaded_and_deployed(yard: Yard, tmp_path: Path) -> None:
    file = model_in(tmp_path, MIB, seed=23)
    key = manager_of(yard)
    done = run(yard, "deploy", str(file), "--name", "uploaded", "-q", key=key)
    assert done.returncode == 0, done.stderr
    assert "it is uploaded" in done.stderr
    (version,) = yard.get("/v1/registry/models?name=uploaded")["data"]
    assert version["artifact_path"] == f"upload:{digest_of(file.read_bytes())}"
    assert (version["artifact_digest"], version["artifact_size"]) == (digest_of(file.read_bytes()), MIB)
    bad = run(yard, "deploy", str(file), "--name", "bad", "--option", "nonsense=1", key=key)
    assert (bad.returncode, "it is uploaded" in bad.stderr) == (2, False), "it would be refused all the same"
    here = run(yard, "deploy", str(file), "--name", "here", "-q")
    assert here.returncode == 0, here.stderr
    assert yard.get("/v1/registry/models?name=here")["data"][0]["artifact_path"] == file.as_uri()
    sent = run(yard, "deploy", str(file), "--name", "sent", "--upload", "-q")
    assert sent.returncode == 0, sent.stderr
    assert yard.get("/v1/registry/models?name=sent")["data"][0]["artifact_path"].startswith("upload:")


def test_versions_are_listed_deployed_and_removed(yard: Yard) -> None:
    for _ in range(2):
        order = {"model_name": "reg", "framework": "simulated"}
        assert yard.call("POST", "/v1/registry/models", order).status == 201
    assert "MODEL" in out(yard, "models", "versions").splitlines()[0]
    table = out(yard, "models", "versions", "reg")
    assert table.splitlines()[0].split() == [
        "VERSION", "STATUS", "ENGINE", "SIZE", "DIGEST", "AFTER", "BASE", "AGE", "ID",
    ]  # fmt: skip
    assert [one["version"] for one in json.loads(out(yard, "models", "versions", "reg", "--json"))] == ["v1", "v2"]
    assert "is ready" in out(yard, "deploy", "model:reg@v1", "--name", "from-registry", "--wait")
    used = run(yard, "models", "rm", "reg@v1")
    assert (used.returncode, "endpoint 'from-registry'" in used.stderr) == (1, True)
    assert run(yard, "models", "rm", "reg@v2").returncode == 0
    gone = run(yard, "models", "rm", "reg@v2")
    assert gone.returncode == 3
    unknown = run(yard, "models", "versions", "regg")
    assert (unknown.returncode, "Did you mean 'reg'?" in unknown.stderr) == (3, True)
    assert len(out(yard, "models").splitlines()) > 1, "the list is as it was"


def test_an_endpoint_becomes_as_its_file_says(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text(FILE.format(name="filed", slots=2, most=1))
    shown = json.loads(out(yard, "deploy", "-f", str(file), "--print"))
    assert (shown["model_name"], shown["framework"], shown["options"]) == ("filed", "simulated", {"slots": 2})
    first = run(yard, "deploy", "-f", str(file), "--wait")
    assert (first.returncode, "is ready" in first.stdout) == (0, True), first.stderr
    assert "filed: " in first.stderr
    assert "'filed': unchanged." in out(yard, "deploy", "-f", str(file))
    file.write_text(FILE.format(name="filed", slots=2, most=3))
    assert "'filed': changed hardware." in out(yard, "deploy", "-f", str(file))
    assert yard.get("/v1/endpoints/filed")["max_replicas"] == 3
    file.write_text(FILE.format(name="filed", slots=4, most=3))
    assert "'filed': added v2 with all of the traffic." in out(yard, "deploy", "-f", str(file), "--wait")
    releases = yard.get("/v1/endpoints/filed")["releases"]
    assert [(one["version"], one["weight"]) for one in releases] == [("v2", 100)]
    assert "'filed': unchanged." in out(yard, "deploy", "-f", str(file))
    assert out(yard, "deploy", "-f", str(file), "-q").strip() == yard.get("/v1/endpoints/filed")["id"]


def test_faults_of_a_file_are_told_with_their_lines(yard: Yard, tmp_path: Path) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text(FILE.format(name="bad name", slots=2, most=0).replace("max_rep", "max_repp"))
    local = run(yard, "deploy", "-f", str(file))
    assert (local.returncode, len(local.stderr.splitlines())) == (2, 1)
    assert "line 1, name: use 1 to 96" in local.stderr
    assert "line 8, hardware.max_repplicas: this field does not exist here; did you mean" in local.stderr
    file.write_text(FILE.format(name="bad name", slots=2, most=0))
    remote = run(yard, "deploy", "-f", str(file))
    assert remote.returncode == 2
    assert "line 1, name: " in remote.stderr
    assert "line 8, hardware.max_replicas: " in remote.stderr
    both = run(yard, "deploy", "-f", str(file), "--scale", "2")
    assert (both.returncode, "--scale into the file" in both.stderr) == (2, True)


def test_a_terminal_sees_bars(yard: Yard, tmp_path: Path) -> None:
    file = model_in(tmp_path, 3 * MIB, seed=24)
    with terminal(yard, "models", "upload", str(file)) as (process, _, screen):
        assert process.wait(60) == 0
        eventually(lambda: "Uploaded my model.gguf" in screen(), 30, "the end")
        assert "[########################]  100 %  3.1 MB/3.1 MB" in screen()
        assert "/s  ETA 0 s" in screen()
    order = ("--name", "slow", "--engine", "simulated", "--option", "load_s=3", "--wait")
    with terminal(yard, "deploy", *order) as (process, _, screen):
        assert process.wait(60) == 0
        eventually(lambda: "'slow' is ready" in screen(), 30, "the end")
        assert "slow  [" in screen()
        assert "loading" in screen()
