"""F9: 200 clients that read a byte a second: bounded memory, nobody else waits, and in the end they are closed."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually_async
from tests.support.wire import request_bytes
from tests.support.yard import Yard

SETTINGS = {"gateway.write_stall_timeout_s": 4, "gateway.total_timeout_s": 90}
CLIENTS = 200
GROWTH_KIB_MAX = 20 * 1024


class SlowClient:
    """Asks for a stream of a megabyte and reads a byte a second, through the smallest window there is."""

    def __init__(self, yard: Yard, number: int) -> None:
        self.exchange = Exchange(f"slow {number}", "/v1/chat/completions", asks_stream=True)
        self._peer = socket.socket()
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._peer.setblocking(False)
        body = chat("sim", "[[sim: tokens=500]] go on", stream=True, logprobs=True, top_logprobs=20)
        headers = [("Authorization", f"Bearer {yard.admin_key}"), ("Content-Type", "application/json")]
        path = self.exchange.path
        self._request = request_bytes("POST", path, body=json.dumps(body).encode(), headers=headers)
        self._address = ("127.0.0.1", yard.port)

    async def read_slowly(self, until: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._peer, self._address)
        await loop.sock_sendall(self._peer, self._request)
        while not until.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await until.wait()
            with contextlib.suppress(ConnectionError):
                self._take(await loop.sock_recv(self._peer, 1))

    async def read_the_rest(self) -> None:
        loop = asyncio.get_running_loop()
        with self._peer, contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(self._peer, 65_536):
                self._take(data)
        self.exchange.reader.end()
        self.exchange.outcome = self.exchange.judge()

    def _take(self, data: bytes) -> None:
        self.exchange.received += data
        self.exchange.reader.feed(data)


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def test_slow_readers_are_bounded_and_closed_and_others_do_not_notice(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": 256, "ttft_ms": 1, "itl_ms": 20})
    (gateway,) = yard.plane_pids("gateway")
    enough = asyncio.Event()
    async with Load(yard.port, yard.admin_key) as load:
        for _ in range(20):
            await load.send(chat("sim", "hello", max_tokens=2))
        before_kib = resident_kib(gateway)
        clients = [SlowClient(yard, number) for number in range(CLIENTS)]
        reading = [asyncio.create_task(client.read_slowly(enough)) for client in clients]
        # Not all at one moment: on a slow machine the first are closed before the last have begun.
        await eventually_async(lambda: all(client.exchange.received for client in clients), 60, "all stream")
        highest_kib = 0
        while in_flight(yard) > 0:
            quick = await load.send(chat("sim", "hello", max_tokens=2))
            assert quick.outcome is Outcome.COMPLETE, quick
            highest_kib = max(highest_kib, resident_kib(gateway))
        enough.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*reading)
            await asyncio.gather(*(client.read_the_rest() for client in clients))
        exchanges = [*load.exchanges, *(client.exchange for client in clients)]
        check_ledger(yard, exchanges)
    assert {client.exchange.outcome for client in clients} == {Outcome.ABRUPT}
    slowest_s = max(exchange.duration_s for exchange in load.exchanges)
    print(f"grew by {highest_kib - before_kib} KiB, slowest of {len(load.exchanges)} others {slowest_s:.3f} s")
    assert highest_kib - before_kib < GROWTH_KIB_MAX
    assert '"level":"error"' not in (yard.data / "logs" / "gateway-0.log").read_text()


def in_flight(yard: Yard) -> float:
    return sum(yard.gauges().values())
