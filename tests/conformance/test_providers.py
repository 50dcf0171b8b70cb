"""The engine contract for an external provider: the real process of a replica, before a provider that is an engine.

The tests are those of ``test_engines.py``, but for what only an engine that computes can keep (its own queue, its
context, going on in the middle of an answer).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance import test_engines as contract
from tests.support.replicas import MODEL, SECRET, Replica, Running, chat, started
from tests.support.waiting import eventually_async

from modelyard.clock import SystemClock
from modelyard.engines import LaunchSpec, Options
from modelyard.engines.providers.engines import OpenAIProviderEngine
from modelyard.engines.providers.keys import ProviderKeys
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet import StartOrder
from modelyard.fleet.local import LocalFleet, stop_all

KEY = "the-provider-key"
THEIRS = "their-model"
VARIABLE = "MODELYARD_PROVIDER_TEST"

test_it_loads_answers_and_counts = contract.test_it_loads_answers_and_counts
test_a_chat_stream_has_role_text_finish_and_usage_in_order = (
    contract.test_a_chat_stream_has_role_text_finish_and_usage_in_order
)
test_completions_stream_text_and_usage = contract.test_completions_stream_text_and_usage
test_a_repeated_prompt_is_read_from_the_cache = contract.test_a_repeated_prompt_is_read_from_the_cache
test_nothing_but_readiness_is_served_without_the_secret = (
    contract.test_nothing_but_readiness_is_served_without_the_secret
)
test_a_prompt_over_the_context_is_refused_with_an_error_object = (
    contract.test_a_prompt_over_the_context_is_refused_with_an_error_object
)
test_a_bad_request_is_refused_with_an_error_object = contract.test_a_bad_request_is_refused_with_an_error_object
test_embeddings_have_equal_vectors_for_equal_texts = contract.test_embeddings_have_equal_vectors_for_equal_texts
test_a_schema_is_followed = contract.test_a_schema_is_followed


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    theirs, ours = (tmp_path_factory.mktemp(name) / "replicas" for name in ("theirs", "ours"))
    fleet = LocalFleet(ours, SystemClock())
    try:
        port = asyncio.run(start_provider(LocalFleet(theirs, SystemClock())))
        engine = OpenAIProviderEngine(ProviderKeys({VARIABLE: KEY}), private_networks=["127.0.0.0/8"])
        options: Options = {
            "url": f"http://127.0.0.1:{port}/v1",
            "model": THEIRS,
            "key_env": VARIABLE,
            "routes": "chat,completions,embeddings",
            "slots": 2,
        }
        yield asyncio.run(started(fleet, engine, options, None))
        asyncio.run(fleet.stop("r-1", grace_s=5))
        assert asyncio.run(fleet.observe())[0].exit_reason == "stopped"
    finally:
        stop_all(ours, 0.0)
        stop_all(theirs, 0.0)


async def start_provider(fleet: LocalFleet) -> int:
    """Start a simulated engine in the provider's place, and do not wait until it has loaded."""
    address = await fleet.reserve("r-theirs")
    engine, options = SimulatedEngine(), {"slots": 4, "load_s": 1.0, "context_length": 4096, "itl_ms": 10}
    spec = LaunchSpec(
        "r-theirs", THEIRS, None, address.host, address.port, KEY, 4, 4096, 1, options, Path(address.work_dir)
    )
    await fleet.start(StartOrder("r-theirs", "ep", address.host, address.port, KEY, engine.command(spec)))
    return address.port


async def test_a_client_that_leaves_is_forgotten_here_and_at_the_provider(replica: Replica) -> None:
    body = chat("Tell me a very long story", stream=True, max_tokens=400, ignore_eos=True)
    headers = {"authorization": f"Bearer {SECRET}"}
    async with replica.session.post(replica.url + "/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readline()
        assert (await replica.load()).waiting == 1
        response.close()

    async def is_free() -> bool:
        return (await replica.load()).waiting == 0

    await eventually_async(is_free, 20, "nothing is under way")


async def test_it_is_known_under_our_name_alone(replica: Replica) -> None:
    status, body = await replica.call("/v1/models")
    assert (status, [one["id"] for one in body["data"]]) == (200, [MODEL])
    assert THEIRS not in str(body)
