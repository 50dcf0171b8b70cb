"""S34 and S15: a canary prompt, answer and key through every path; afterwards no file of the platform has them."""

import contextlib
from pathlib import Path

from tests.support.load import Load, Outcome, chat
from tests.support.refusals import post
from tests.support.waiting import eventually
from tests.support.wire import exchange, request_bytes
from tests.support.yard import Yard

CANARY = "zebrafink"
"""A word that stands in no source file; the engine echoes it, so it is in the answers as well."""
FAULTS = [
    "",
    "[[sim: http_error=500]]",
    "[[sim: http_error=400]]",
    "[[sim: garbage=invalid_json]]",
    "[[sim: garbage=error_200]]",
    "[[sim: error_after=2 error_form=flat]]",
    "[[sim: cut_after=2]]",
    "[[sim: crash_after=2]]",
]


def files_with(folder: Path, needle: str) -> list[str]:
    """Return every file under ``folder`` whose bytes contain the text."""
    found = []
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a draft that has its name by now
            if file.is_file() and needle.encode() in file.read_bytes():
                found.append(str(file.relative_to(folder)))
    return sorted(found)


async def test_prompts_answers_and_keys_are_in_no_file(yard: Yard, model: str) -> None:
    key = yard.new_key(name="canary")
    secret = key.split("_")[2]
    async with Load(yard.port, key) as load:
        # Alone, because one of the faults takes the engine down with all that it was answering.
        for stream in (False, True):
            load.start(chat(model, CANARY, stream=stream))
        await load.finish()
        for fault in FAULTS:
            for stream in (False, True):
                load.start(chat(model, f"{fault} {' '.join([CANARY] * 4)}", stream=stream))
        load.start({"model": model, "messages": CANARY})
        load.start(chat(CANARY, CANARY))
        load.start(chat(model, CANARY, **{CANARY: 1}))
        load.start(chat(model, CANARY), key=f"{key}x")
        await load.finish()
    assert {exchange.outcome for exchange in load.exchanges} >= {Outcome.COMPLETE, Outcome.REFUSED, Outcome.ERROR_EVENT}
    exchange(yard.port, request_bytes("GET", f"/v1/models?api_key={key}"))
    exchange(yard.port, request_bytes("GET", f"/{CANARY}?q={CANARY}", headers=[("Authorization", f"Bearer {key}")]))
    eventually(yard.is_booked, 30, "everything is settled")

    assert files_with(yard.folder, CANARY) == []
    assert files_with(yard.folder, secret) == []
    admin_secret = yard.admin_key.split("_")[2]
    assert files_with(yard.folder, admin_secret) in (["data/secrets/admin-key"], ["data/secrets/admin-key", "up.log"])
    metrics = yard.call("GET", "/metrics").body.decode()
    assert CANARY not in metrics
    assert secret not in metrics


def test_secrets_are_private_files_and_not_in_the_environment_of_engines(yard: Yard, model: str) -> None:
    for name in ("admin-key", "pepper", "internal-token"):
        assert (yard.data / "secrets" / name).stat().st_mode & 0o777 == 0o600
    assert yard.data.stat().st_mode & 0o077 == 0
    token = (yard.data / "secrets" / "internal-token").read_text().strip()
    yard.wait_ready(model)  # one of the faults took it down
    for engine in yard.engines(model):
        environment = Path(f"/proc/{engine.pid}/environ").read_bytes()
        assert b"MODELYARD" not in environment
        assert token.encode() not in environment
        assert yard.admin_key.encode() not in environment
        command = Path(f"/proc/{engine.pid}/cmdline").read_bytes()
        assert token.encode() not in command, "a command line is readable for everyone"
    assert post(yard, "/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 1}).status == 200


def test_only_the_public_port_and_engines_listen_and_only_on_loopback(yard: Yard, model: str) -> None:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    ports = {yard.port, *(engine.port for engine in yard.engines())}
    ours = [address for address in listening if int(address.split(":")[1], 16) in ports]
    assert ours
    assert all(address.startswith("0100007F:") for address in ours), ours
