"""A provider's replica between a gateway and a provider that does what it likes."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.certificates import make_certificate
from tests.support.providers import KEY, OURS, SECRET, THEIRS, front_of
from tests.support.waiting import eventually_async

CHAT = {"model": OURS, "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
ANSWER = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": "their-model-2026-01-01",
    "system_fingerprint": "fp_1",
    "service_tier": "default",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def says(body: Any, status: int = 200, **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return handler


def streams(*events: Any, ends: str = "[DONE]", lingers_s: float = 0.0) -> Handler:
    """Stream these chunks; ``ends`` "": the body ends without a word, "cut": the connection is lost. ``lingers_s``:
    how long the body goes on after all was said."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\r\n\r\n".encode())
        if ends == "cut":
            assert request.transport is not None
            request.transport.abort()
        elif ends:
            await response.write(f"data: {ends}\n\n".encode())
            await asyncio.sleep(lingers_s)
        return response

    return handler


def chunk(content: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


async def test_answers_come_under_our_name_with_nothing_that_tells_whose_they_are() -> None:
    async with front_of(says(ANSWER)) as front:
        status, body = await front.whole({**CHAT, "temperature": 0.5, "max_tokens": 9, "top_k": 3, "cache_salt": "s"})
        assert (status, body["model"], body["usage"]) == (200, OURS, USAGE)
        assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
        request, sent = front.provider.seen[0]
        assert sent == {**CHAT, "model": THEIRS, "temperature": 0.5, "max_tokens": 9}
        assert request.path == "/v1/chat/completions"
        assert request.headers["authorization"] == f"Bearer {KEY}"
        assert SECRET not in str(request.headers)
        assert await front.metrics() == {
            "provider:requests_running": 0,
            "provider:requests_waiting": 0,
            "provider:prompt_tokens_total": 7,
            "provider:generation_tokens_total": 2,
        }


async def test_openai_itself_is_told_the_limit_by_its_newer_name() -> None:
    async with front_of(says(ANSWER), limit_field="max_completion_tokens") as front:
        await front.whole({**CHAT, "max_tokens": 9})
        assert front.provider.seen[0][1] == {**CHAT, "model": THEIRS, "max_completion_tokens": 9}


async def test_a_stream_is_passed_on_event_by_event_and_always_tells_its_usage() -> None:
    may_go_on = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f": ping\n\ndata: {json.dumps(chunk('hel'))}\n\n".encode())
        await may_go_on.wait()
        rest = [chunk("lo", "stop"), {**chunk(), "choices": [], "usage": USAGE}]
        await response.write("".join(f"data: {json.dumps(one)}\n\n" for one in rest).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async with front_of(handler) as front, front.post({**CHAT, "stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream"
        first = json.loads((await response.content.readuntil(b"\n\n"))[6:])
        assert (first["model"], first["choices"][0]["delta"]["content"]) == (OURS, "hel")
        may_go_on.set()
        rest = await response.content.read()
        events = [json.loads(one[6:]) for one in rest.split(b"\n\n") if one.startswith(b"data: {")]
        assert [event["model"] for event in events] == [OURS, OURS]
        assert events[-1]["usage"] == USAGE
        assert rest.endswith(b"data: [DONE]\n\n")
        assert front.provider.seen[0][1]["stream_options"] == {"include_usage": True}
        assert (await front.metrics())["provider:generation_tokens_total"] == 2


@pytest.mark.parametrize(
    ("status", "told"),
    [(401, 503), (402, 503), (403, 503), (404, 503), (408, 503), (429, 429), (500, 503), (529, 503), (301, 503)],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_what_is_wrong_with_the_provider_is_another_replicas_turn(
    status: int, told: int, is_stream: bool
) -> None:
    leaky = {"error": {"message": f"Incorrect API key provided: {KEY}", "type": "x", "code": "invalid_api_key"}}
    handler = says(leaky, status, **{"retry-after": "17", "location": "http://127.0.0.1:1/"})
    async with front_of(handler) as front, front.post({**CHAT, "stream": is_stream}) as response:
        text = await response.text()
        assert (response.status, response.headers["retry-after"]) == (told, "17")
        assert "provider" in json.loads(text)["error"]["message"]
        assert KEY not in text + str(front.said)
        assert len(front.provider.seen) == 1, "what may have been computed is not asked for twice"
        assert front.said, "the log tells why"


async def test_what_is_wrong_with_the_request_goes_through_under_our_name() -> None:
    error = {"message": f"{THEIRS} has no field x", "type": "t", "param": "x", "code": "context_length_exceeded"}
    async with front_of(says({"error": error}, 400)) as front:
        status, body = await front.whole(CHAT)
        assert (status, body["error"]["message"]) == (400, f"{OURS} has no field x")
        assert (body["error"]["param"], body["error"]["code"]) == ("x", "context_length_exceeded")


@pytest.mark.parametrize("ends", ["", "cut"])
async def test_a_stream_that_breaks_off_is_cut_and_never_ends_well(ends: str) -> None:
    async with front_of(streams(chunk("half"), ends=ends)) as front, front.post({**CHAT, "stream": True}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@pytest.mark.parametrize("events", [[], ["nonsense"], [{"error": {"message": "x"}}]])
async def test_a_stream_that_never_begins_is_an_error_with_a_status(events: list[Any]) -> None:
    async with front_of(streams(*events, ends="")) as front:
        status, body = await front.whole({**CHAT, "stream": True})
        assert (status, body["error"]["type"]) == (503, "server_error")


async def test_an_error_in_the_middle_is_told_in_the_stream() -> None:
    handler = streams(chunk("half"), {"error": {"message": f"secret {KEY}"}})
    async with front_of(handler) as front, front.post({**CHAT, "stream": True}) as response:
        *_, last, end = (await response.text()).split("\n\n")
        assert (json.loads(last[6:])["error"]["type"], end) == ("server_error", "")
        assert KEY not in last + str(front.said)


@pytest.mark.parametrize("body", ["nonsense", [], {"choices": None}, {}])
async def test_an_answer_that_is_none_is_not_passed_on(body: Any) -> None:
    async with front_of(says(body)) as front:
        assert (await front.whole(CHAT))[0] == 503


async def test_a_provider_that_is_not_there_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.engines.providers.server.CHECK_PAUSE_S", 0.0)
    async with front_of(says(ANSWER), is_ready=False) as other:
        gone = other.provider.url
    async with front_of(says(ANSWER), is_ready=False, url=gone) as front:
        assert "the provider at 127.0.0.1 does not answer: it cannot be reached" in await front.server.get_ready()
    async with front_of(says(ANSWER)) as front:
        front.server._upstream.base = gone
        assert (await front.whole(CHAT))[0] == 503
        assert "cannot be reached" in front.said[-1]


async def test_a_provider_that_drops_an_idle_connection_is_asked_again() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if len(front.provider.seen) == 2:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(ANSWER)

    async with front_of(handler) as front:
        assert [(await front.whole(CHAT))[0] for _ in range(2)] == [200, 200]
        assert len(front.provider.seen) == 3


async def test_a_certificate_must_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.engines.providers.server.CHECK_PAUSE_S", 0.0)
    certificate = make_certificate(tmp_path)
    async with front_of(says(ANSWER), is_ready=False, certificate=certificate) as front:
        why = await front.server.get_ready()
        assert "its certificate is not trusted; see fetch.ca_file" in why
        assert front.provider.seen == []
    trusted = ssl.create_default_context(cafile=certificate[0])
    async with front_of(says(ANSWER), certificate=certificate, trusted=trusted) as front:
        assert (await front.whole(CHAT))[0] == 200


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_connection_serves_one_request_after_the_other(is_stream: bool) -> None:
    handler = streams(chunk("a", "stop"), lingers_s=0.05) if is_stream else says(ANSWER)
    async with front_of(handler) as front:
        for _ in range(3):
            async with front.post({**CHAT, "stream": is_stream}) as response:
                assert response.status == 200
                await response.read()
        assert len({request.transport for request, _ in front.provider.seen}) == 1


async def test_silence_is_bounded() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with front_of(handler, silence_s=0.2) as front:
        assert (await front.whole(CHAT))[0] == 503
        assert (await front.metrics())["provider:requests_waiting"] == 0


async def test_a_caller_that_leaves_ends_the_request_at_the_provider() -> None:
    has_left = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(f"data: {json.dumps(chunk('x'))}\n\n".encode())
                await asyncio.sleep(0.01)
        finally:
            has_left.set()

    async with front_of(handler) as front:
        async with front.post({**CHAT, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            assert (await front.metrics())["provider:requests_waiting"] == 1
            response.close()
        await asyncio.wait_for(has_left.wait(), 20)

        async def is_idle() -> bool:
            return (await front.metrics())["provider:requests_waiting"] == 0

        await eventually_async(is_idle, 20, "it is forgotten")


async def test_a_slow_reader_holds_the_provider_back() -> None:
    written = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = f"data: {json.dumps(chunk('x' * 60_000))}\n\n".encode()
        for _ in range(2000):
            await response.write(event)
            written += len(event)
        return response

    async with front_of(handler) as front, front.post({**CHAT, "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        last = -1

        async def is_held() -> bool:
            nonlocal last
            before, last = last, written
            await asyncio.sleep(0.3)
            return before == written

        await eventually_async(is_held, 30, "it writes no more")
        assert written < 60_000_000, "half of what it had"
        response.close()


async def test_nothing_but_health_is_told_without_the_secret() -> None:
    async with front_of(says(ANSWER), is_ready=False) as front:
        async with front.session.get(front.url + "/health") as response:
            assert response.status == 503, "the provider was not heard yet"
        assert (await front.whole(CHAT))[0] == 503
        assert await front.server.get_ready() == ""
        async with front.session.get(front.url + "/health") as response:
            assert response.status == 200
        for path in ("/metrics", "/v1/models"):
            async with front.session.get(front.url + path) as response:
                assert response.status == 401
        async with front.post(CHAT, secret="wrong") as response:
            assert response.status == 401
        assert front.provider.seen == []


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_is_told_at_once(status: int) -> None:
    async with front_of(says(ANSWER), is_ready=False) as front:
        front.provider.models_status = status
        why = await front.server.get_ready()
        assert f"refuses the key (status {status})" in why
        assert KEY not in why


async def test_a_provider_without_a_list_of_models_is_taken_at_its_word() -> None:
    async with front_of(says(ANSWER), is_ready=False) as front:
        front.provider.models_status = 405
        assert await front.server.get_ready() == ""


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_it_is_not_ready_for_a_model_that_the_provider_does_not_have(kind: str) -> None:
    async with front_of(says(ANSWER), kind, is_ready=False) as front:
        front.provider.models = ("their-large-model",)
        why = await front.server.get_ready()
        assert f"does not list the model '{THEIRS}' (it has their-large-model): check the option model" in why
        async with front.session.get(front.url + "/health") as response:
            assert response.status == 503
        front.provider.aliases = (THEIRS,)
        assert await front.server.get_ready() == "", "lists leave out aliases, and come in pages"


async def test_it_is_not_ready_at_a_url_without_models_unless_it_was_told_that_there_is_no_list() -> None:
    async with front_of(says(ANSWER), is_ready=False) as front:
        front.provider.models_status = 404
        why = await front.server.get_ready()
        assert "has no /v1/models (status 404): check the option url, which often ends in /v1" in why
    async with front_of(says(ANSWER), is_ready=False, is_checked=False) as front:
        front.provider.models_status = 404
        assert await front.server.get_ready() == ""
        front.provider.models_status, front.provider.models = 200, ()
        assert await front.server.get_ready() == ""


async def test_a_refusal_of_the_platform_is_told_as_one_in_our_words() -> None:
    leaky = {"error": {"message": f"The model {THEIRS} does not exist for {KEY}", "code": "model_not_found"}}
    async with front_of(says(leaky, 404)) as front:
        status, body = await front.whole(CHAT)
        assert status == 503
        assert body["error"]["code"] == "provider_refused"
        assert body["error"]["message"] == "it knows no such model or route at the provider (status 404)"


async def test_a_new_key_in_the_file_is_used_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("old-key\n")

    async def handler(request: web.Request) -> web.StreamResponse:
        is_good = request.headers["authorization"] == "Bearer new-key"
        return web.json_response(ANSWER if is_good else {"error": {"message": "no"}}, status=200 if is_good else 401)

    async with front_of(handler, key_file=file) as front:
        assert (await front.whole(CHAT))[0] == 503
        file.write_text("new-key\n")
        assert (await front.whole(CHAT))[0] == 200
        file.unlink()
        assert (await front.whole(CHAT))[0] == 200, "what it has is good"


async def test_embeddings_and_completions_have_their_own_fields() -> None:
    answer = {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 3}}
    async with front_of(says(answer)) as front:
        status, body = await front.whole(
            {"model": OURS, "input": "x", "dimensions": 1, "messages": 1}, "/v1/embeddings"
        )
        assert (status, body["model"], body["data"]) == (200, OURS, answer["data"])
        assert front.provider.seen[0][1] == {"model": THEIRS, "input": "x", "dimensions": 1}
    async with front_of(says({**ANSWER, "object": "text_completion"})) as front:
        status, _ = await front.whole({"model": OURS, "prompt": "x", "max_tokens": 3}, "/v1/completions")
        assert (status, front.provider.seen[0][1]) == (200, {"model": THEIRS, "prompt": "x", "max_tokens": 3})


@pytest.mark.parametrize("body", [[], "x", None])
async def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    async with front_of(says(ANSWER)) as front:
        assert (await front.whole(body))[0] == 400
