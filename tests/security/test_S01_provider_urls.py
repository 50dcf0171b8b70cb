"""Where a provider's URL may lead: judged when it connects, so that a name that changes its mind leads nowhere."""

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web
from tests.support.providers import HOME, KEY, front_of

from modelyard.engines.providers.upstream import Bounds, Key, NotAllowedError, Upstream, judge
from modelyard.policy.addresses import networks

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def reached(request: web.Request) -> web.StreamResponse:
    raise AssertionError("it must not be reached")


def names(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Let every name resolve to these addresses, one list a question; return who was asked for."""
    asked: list[str] = []

    async def getaddrinfo(self: Any, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop().__class__, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "10.0.0.1", "192.168.1.1", "100.100.100.200", "0.0.0.0", "224.0.0.1", "::1", "fd00::1",
     "::ffff:10.0.0.1", "64:ff9b::a00:1"],
)  # fmt: skip
def test_an_address_inside_is_refused_whatever_its_spelling(address: str) -> None:
    with pytest.raises(NotAllowedError):
        judge(address, "evil.example", HOME, is_plain=False)
    literal = f"[{address}]" if ":" in address else address
    with pytest.raises(NotAllowedError):
        Upstream(f"https://{literal}/v1", Key(KEY, None), private=(), tls=None, bounds=Bounds(1, 1))


def test_without_tls_only_networks_of_the_operator_are_spoken_to() -> None:
    judge("10.0.0.1", "inside.example", networks(["10.0.0.0/8"]), is_plain=True)
    with pytest.raises(NotAllowedError, match="https"):
        judge("93.184.216.34", "public.example", networks(["10.0.0.0/8"]), is_plain=True)


@pytest.mark.parametrize("answers", [["10.0.0.7"], ["93.184.216.34", "10.0.0.7"], ["127.0.0.1", "169.254.169.254"]])
async def test_a_name_that_leads_inside_is_never_connected_to(
    monkeypatch: pytest.MonkeyPatch, answers: list[str]
) -> None:
    async with front_of(reached, is_ready=False, url="http://evil.example/v1") as front:
        asked = names(monkeypatch, answers)
        why = await front.server.get_ready()
        assert "evil.example" in why or "use https" in why
        assert asked == ["evil.example"], "it is refused at once, not tried again"


async def test_a_name_that_changes_its_mind_is_judged_at_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": {}}, headers={"connection": "close"})

    async with front_of(handler, is_ready=False) as inner:
        port = inner.provider.url.split(":")[2].split("/")[0]
        async with front_of(reached, is_ready=False, url=f"http://fickle.example:{port}/v1") as front:
            asked = names(monkeypatch, ["127.0.0.1"], ["127.0.0.1"], ["10.0.0.7"])
            assert await front.server.get_ready() == ""
            statuses = [(await front.whole(CHAT))[0] for _ in range(3)]
            assert statuses[-1] == 503, "by then it leads inside"
            assert "fickle.example" in front.said[-1]
            assert len(asked) >= 3
            assert len(inner.provider.seen) == 3 - statuses.count(503)


async def test_redirects_lead_nowhere() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{request.url.port}/elsewhere")

    async with front_of(handler) as front:
        assert (await front.whole(CHAT))[0] == 503
        assert [request.path for request, _ in front.provider.seen] == ["/v1/chat/completions"]


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": []})

    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with front_of(handler) as front:
        assert (await front.whole(CHAT))[0] == 200
