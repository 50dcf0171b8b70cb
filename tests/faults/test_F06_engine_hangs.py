"""F6: an engine stops answering with its sockets open (SIGSTOP)."""

import signal

from tests.support.ledger import check_ledger
from tests.support.load import Exchange, Load, Outcome, chat
from tests.support.waiting import eventually
from tests.support.yard import Yard

SETTINGS = {
    "gateway.first_token_timeout_s": 2.0,
    "gateway.token_timeout_s": 2.0,
    "control.hang_timeout_s": 6.0,
}
OPTIONS = {"slots": 8, "ttft_ms": 1, "itl_ms": 2}
SEEN: list[Exchange] = []


async def test_before_the_first_token_requests_go_elsewhere_or_time_out(yard: Yard) -> None:
    yard.deploy("pair", options=OPTIONS, replicas=2)
    hung = yard.engines("pair")[0]
    async with Load(yard.port, yard.admin_key) as load:
        yard.signal(hung.pid, signal.SIGSTOP)
        for number in range(8):
            load.start(chat("pair", f"hello {number}", stream=number % 2 == 0))
        await load.finish()
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    for exchange in load.exchanges:
        if exchange.outcome is not Outcome.COMPLETE:
            assert (exchange.status, exchange.error["code"]) == (504, "engine_first_token_timeout"), exchange
        else:
            assert rows[exchange.request_id or ""].replica_id != hung.replica_id
    attempts = [yard.row_of(exchange.request_id)["attempts"] for exchange in load.exchanges]
    assert max(attempts) > 1 or any(exchange.status == 504 for exchange in load.exchanges), "the fault met nobody"


async def test_a_single_hung_replica_gives_504_and_is_replaced(yard: Yard) -> None:
    yard.deploy("single", options=OPTIONS)
    hung = yard.engines("single")[0]
    async with Load(yard.port, yard.admin_key) as load:
        yard.signal(hung.pid, signal.SIGSTOP)
        stream, plain = (load.start(chat("single", "hello", stream=stream)) for stream in (True, False))
        await load.finish()
        SEEN.extend(load.exchanges)
        assert (stream.status, stream.error["code"]) == (504, "engine_first_token_timeout"), stream
        # How long a plain answer may take nobody knows, so it may end only when the hung engine is killed.
        assert (plain.status, plain.error["code"]) in ((504, "engine_total_timeout"), (503, "engine_unavailable")), (
            plain
        )
        eventually(lambda: hung.pid not in {engine.pid for engine in yard.engines()}, 30, "the hung engine is killed")
        before = len(load.exchanges)
        again = await load.until_served("single")
        assert again.outcome is Outcome.COMPLETE
        SEEN.extend(load.exchanges[before:])
        check_ledger(yard, SEEN)


async def test_in_mid_stream_the_client_gets_an_error_event(yard: Yard) -> None:
    yard.deploy("mid", options=OPTIONS)
    async with Load(yard.port, yard.admin_key) as load:
        stream = load.start(chat("mid", "[[sim: tokens=300 slow=20]] on and on", stream=True))
        await load.delivered(stream, 5)
        yard.signal(yard.engines("mid")[0].pid, signal.SIGSTOP)
        await load.finish()
        assert stream.outcome is Outcome.ERROR_EVENT, f"{stream!r} {bytes(stream.received)[-300:]!r}"
        assert stream.error["code"] == "engine_token_timeout"
        SEEN.extend(load.exchanges)
        rows = check_ledger(yard, SEEN)
    row = rows[stream.request_id or ""]
    assert row.status in ("error", "timeout")
    assert row.completion_tokens == stream.delivered
