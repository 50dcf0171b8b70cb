"""F29: ``modelyard restart`` under load: no stream is cut, no connection refused or reset, nothing is billed twice."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.ledger import check_ledger
from tests.support.load import Load, Outcome, chat
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard

SETTINGS = {"gateway.workers": 2, "gateway.drain_timeout_s": 1}
"""A drain far shorter than the streams: a relieved worker must not be in a hurry."""
RESTARTS = int(os.environ.get("MODELYARD_TEST_RESTARTS", "3"))


def restart(yard: Yard) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelyard", "restart", "--data-dir", str(yard.data)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


@dataclass(slots=True)
class Hammer:
    """Clients that never pause, and what became of each of their requests."""

    port: int
    is_over: bool = False
    ends: Counter[str] = field(default_factory=Counter)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def knock(self) -> None:
        """A connection a request."""
        while not self.is_over:
            self.ends[await self._ask(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")] += 1

    async def stay(self, path: bytes, key: str) -> None:
        """One connection for as long as the server keeps it; it says in an answer when it was the last."""
        request = b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n" % (path, key.encode())
        while not self.is_over:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                while not self.is_over:
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                    self.ends[_end(head, await reader.readexactly(length))] += 1
                    if b"connection: close" in head.lower():
                        self.ends["told to close"] += 1
                        break
            except (OSError, EOFError) as error:
                self.ends[f"{path.decode()} {type(error).__name__}"] += 1
            finally:
                writer.transport.abort()

    async def write(self, key: str) -> None:
        """Change something at the controller, a few times a second: such a request cannot simply be sent again."""
        body = b'{"name": "passing", "scopes": ["inference"]}'
        head = b"POST /v1/keys HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer %b\r\n" % key.encode()
        while not self.is_over:
            self.ends[await self._ask(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))] += 1
            await asyncio.sleep(0.05)  # each leaves a key behind

    async def _ask(self, request: bytes) -> str:
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(request)
            answer = await reader.read()
        except OSError as error:
            return type(error).__name__
        finally:
            if writer is not None:
                writer.transport.abort()
        return _end(*answer.split(b"\r\n\r\n", 1)) if answer else "nothing"


def _end(head: bytes, body: bytes) -> str:
    """Return the status, and of an error what it says."""
    status = head[9:12].decode()
    return status if status < "400" else f"{status} {body.decode()}"


@asynccontextmanager
async def hammering(yard: Yard, *, clients: int = 4) -> AsyncIterator[Hammer]:
    hammer = Hammer(yard.port)
    for _ in range(clients):
        hammer.tasks.append(asyncio.create_task(hammer.knock()))
        hammer.tasks.append(asyncio.create_task(hammer.stay(b"/v1/models", yard.admin_key)))
    hammer.tasks.append(asyncio.create_task(hammer.stay(b"/v1/keys", yard.admin_key)))
    hammer.tasks.append(asyncio.create_task(hammer.write(yard.admin_key)))
    try:
        yield hammer
    finally:
        hammer.is_over = True
        async with asyncio.timeout(60):
            await asyncio.gather(*hammer.tasks)


async def test_no_stream_is_cut_and_no_connection_is_lost(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 128, "ttft_ms": 1, "itl_ms": 1})
    before = set(yard.plane_pids("gateway")) | set(yard.plane_pids("control"))
    async with Load(yard.port, yard.admin_key) as load:
        streams = [load.start(chat("sim", "[[sim: tokens=100 slow=60]] on", stream=True)) for _ in range(50)]
        await asyncio.gather(*(load.delivered(stream, 5) for stream in streams))
        async with hammering(yard) as hammer:
            for _ in range(RESTARTS):
                done = await asyncio.to_thread(restart, yard)
                assert done.returncode == 0, done.stderr
            later = [load.start(chat("sim", "hello", stream=number % 2 == 0)) for number in range(20)]
            await load.finish(90)
        check_ledger(yard, load.exchanges)
    assert Counter(stream.outcome for stream in streams) == {Outcome.COMPLETE: 50}
    assert {stream.delivered for stream in streams} == {100}
    assert {exchange.outcome for exchange in later} == {Outcome.COMPLETE}
    print(hammer.ends)
    assert set(hammer.ends) == {"200", "201", "told to close"}, hammer.ends
    assert hammer.ends["200"] > 100 * RESTARTS

    left = "the old processes have left"
    after = await eventually_async(lambda: _only_new(yard, before), 60, left)
    assert len(after) == 3


def _only_new(yard: Yard, before: set[int]) -> set[int]:
    now = set(yard.plane_pids("gateway")) | set(yard.plane_pids("control"))
    return now if not now & before and len(now) == 3 else set()


@pytest.mark.parametrize("plane", ["gateway", "control"])
def test_a_plane_that_is_killed_after_a_restart_comes_back(yard: Yard, plane: str) -> None:
    assert restart(yard).returncode == 0
    eventually(lambda: len(yard.plane_pids("gateway")) == 2, 30, "the old ones have left")
    for pid in yard.plane_pids(plane):
        yard.kill(pid)
    wanted = 2 if plane == "gateway" else 1
    eventually(lambda: len(yard.plane_pids(plane)) == wanted, 30, "it is started again")
    eventually(lambda: yard.call("GET", "/v1/keys").status == 200, 30, "it answers")
    eventually(lambda: len(yard.get("/v1/status")["gateways"]) == 2, 30, "the gateways follow the controller")


async def test_what_a_killed_old_worker_left_open_is_billed_by_its_marks(tmp_path: Path) -> None:
    with Yard(tmp_path) as yard:
        yard.deploy("sim", options={"slots": 128, "ttft_ms": 1, "itl_ms": 1})
        (old,) = yard.plane_pids("gateway")
        async with Load(yard.port, yard.admin_key) as load:
            streams = [load.start(chat("sim", "[[sim: tokens=900 slow=60]] on", stream=True)) for _ in range(10)]
            await asyncio.gather(*(load.delivered(stream, 20) for stream in streams))
            done = await asyncio.to_thread(restart, yard)
            assert done.returncode == 0, done.stderr
            yard.kill(old)
            await load.finish()
            assert {stream.outcome for stream in streams} == {Outcome.ABRUPT}
            await eventually_async(lambda: yard.open_requests() == 0, 40, "another worker has settled them")
            check_ledger(yard, load.exchanges)


def test_a_worker_that_does_not_come_up_ends_the_restart_and_the_old_ones_stay(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    config = folder / "modelyard.toml"
    config.write_text("[gateway]\nidle_timeout_s = 60\n")
    with Yard(folder / "yard", options=("--config", str(config))) as yard:
        old = yard.plane_pids("gateway")
        config.write_text("[gateway]\nidle_timeout_s = 'soon'\n")
        done = restart(yard)
        assert done.returncode == 1
        assert "idle_timeout_s" in done.stderr, done.stderr
        assert ". The old ones go on." in done.stderr
        assert ".." not in done.stderr
        assert yard.plane_pids("gateway") == old
        assert yard.call("GET", "/readyz", key="").status == 200
        config.write_text("[gateway]\nidle_timeout_s = 90\n")
        assert restart(yard).returncode == 0
        assert yard.plane_pids("gateway") != old


def test_restart_needs_a_running_platform(yard: Yard) -> None:
    command = [sys.executable, "-m", "modelyard", "restart", "--data-dir", str(yard.folder / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode != 0
    assert "modelyard up" in done.stderr
