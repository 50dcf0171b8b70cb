"""What engines say that refuse a guest, and what of it its owner is told."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from modelyard.control.engine_calls import EngineCallError, EngineCalls
from modelyard.domain.fleet import Replica, ReplicaState, without_others
from modelyard.engines import EngineCall

SGLANG = (
    '{"success":false,"error_message":"LoRA adapter mine@0123456789ab cannot be loaded.",'
    '"loaded_adapters":{"globex.legal@ba9876543210":"/data/artifacts/globex"}}'
)


@pytest.fixture
async def calls() -> AsyncIterator[EngineCalls]:
    made = EngineCalls()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (SGLANG, "the engine refused it (400): LoRA adapter mine@0123456789ab cannot be loaded."),
        ('{"error": {"message": "It says \\"no\\", and why", "code": 400}}', 'It says "no", and why'),
        ('{"message":"no"}', "(400): no"),
        ('{"detail":"no"}', "(400): no"),
        ('{"loaded_adapters":{"a":"/b"}}', "the engine refused it (400)"),
        ("plain\x00text", "(400): plain text"),
        ("", "the engine refused it (400)"),
    ],
)
async def test_of_what_an_engine_says_only_its_message_is_told(calls: EngineCalls, said: str, told: str) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=400, text=said)

    app = web.Application()
    app.router.add_post("/load", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        replica = Replica("r", "ep", "ver", 0, 0, ReplicaState.READY, 0.0, "127.0.0.1", port, "secret")
        with pytest.raises(EngineCallError) as caught:
            await calls.make(replica, EngineCall("/load", {}))
    finally:
        await runner.cleanup()
    assert str(caught.value).endswith(told)
    assert caught.value.status == 400


def test_who_else_sits_on_a_replica_is_not_told() -> None:
    text = "mine@0123456789ab does not fit beside 'globex.legal@ba9876543210', initech@00112233aabb."
    told = without_others(text, "mine@0123456789ab")
    assert told == "mine@0123456789ab does not fit beside 'another guest', another guest."
