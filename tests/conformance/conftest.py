"""What the suites of the engine contract share: a file's fixture ``running`` is talked to as ``replica``."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from tests.support.replicas import Replica, Running


@pytest.fixture
async def replica(running: Running) -> AsyncIterator[Replica]:
    """Talk to the running engine."""
    # llama.cpp closes a connection some time after a stream; the next request must not race with that.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Replica(running.engine, running.options, session, running.url, running.saw_loading)


@pytest.fixture
def a_chat_model(replica: Replica) -> None:
    """Skip the test where no chats are served."""
    if "/v1/chat/completions" not in replica.engine.routes_for(replica.options):
        pytest.skip("it serves no chats")
