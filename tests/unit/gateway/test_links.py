"""Links that the gateway follows: whose turn it is."""

import asyncio
import ipaddress
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from tests.support.waiting import eventually_async

from modelyard.gateway.links import AT_ONCE, TENANT_AT_ONCE, LinkFetcher
from modelyard.gateway.openai.call import Link
from modelyard.web.fetcher import Fetcher

PNG = b"\x89PNG\r\n\x1a\n"


def request_of(tenant: str, url: str) -> Any:
    """Return what the fetcher looks at of a request: its links, whose it is, and whether its caller is there."""
    failures: list[Exception] = []
    target = SimpleNamespace(url=url)
    return SimpleNamespace(
        call=SimpleNamespace(links=(Link("input[0]", target),)),
        key=SimpleNamespace(record=SimpleNamespace(tenant_id=tenant)),
        is_over=False,
        fail=failures.append,
        failures=failures,
        target=target,
    )


async def test_whoever_links_to_slow_servers_makes_no_other_tenant_wait() -> None:
    asked: list[str] = []
    is_over = asyncio.Event()

    async def picture(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/slow":
            await is_over.wait()
        return web.Response(body=PNG, content_type="image/png")

    app = web.Application()
    app.router.add_get("/{path}", picture)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    fetcher = LinkFetcher(Fetcher([ipaddress.ip_network("127.0.0.0/8")]), bytes_max=1000, timeout_s=30)
    try:
        slow = [request_of("acme", f"{url}/slow") for _ in range(2 * AT_ONCE)]
        for one in slow:
            fetcher.follow(one, lambda: None)

        async def are_slow() -> bool:
            return asked.count("/slow") == TENANT_AT_ONCE

        await eventually_async(are_slow, 20, "acme has its share")
        quick, gone_on = request_of("globex", f"{url}/quick"), asyncio.Event()
        fetcher.follow(quick, gone_on.set)
        await asyncio.wait_for(gone_on.wait(), 20)
        assert quick.target.url.startswith("data:image/png;base64,")
        assert asked.count("/slow") == TENANT_AT_ONCE
        is_over.set()

        async def are_done() -> bool:
            return all(one.target.url.startswith("data:") for one in slow)

        await eventually_async(are_done, 20, "acme's own go on one after the other")
        assert not any(one.failures for one in slow)
    finally:
        is_over.set()
        await fetcher.close()
        await runner.cleanup()
