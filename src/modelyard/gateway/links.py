"""Pictures behind links, fetched before their request goes on: by the gateway, so that no engine reaches out (S1).

Off until an operator allows it (``gateway.image_links``): whoever may name a
link may try to have a neighbour asked. What is allowed goes through the one
fetcher (``web/fetcher.py``), bounded in size, time and number; the picture then
stands in the request as a ``data:`` URL, and its engine looks at its size
before decoding it.
"""

import asyncio
import base64
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from modelyard import errors
from modelyard.errors import ApiError
from modelyard.gateway.openai.call import Link
from modelyard.web.fetcher import Bounds, Fetcher, FetchError

if TYPE_CHECKING:
    from modelyard.gateway.exchange import Exchange

PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp")
AT_ONCE = 16
"""Fetches of a worker at once; more wait."""
TENANT_AT_ONCE = 4
"""Of them those of one tenant: whoever links to slow servers makes nobody else wait."""
REDIRECTS_MAX = 3
_log = logging.getLogger(__name__)


class LinkFetcher:
    """What fetches for one worker; without a ``fetcher`` every link is refused."""

    def __init__(self, fetcher: Fetcher | None, *, bytes_max: int, timeout_s: float) -> None:
        self._fetcher = fetcher
        self._bounds = Bounds(timeout_s, bytes_max, REDIRECTS_MAX)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._of_tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Of those that fetch; held by who does."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<LinkFetcher {'on' if self._fetcher is not None else 'off'}, {len(self._tasks)} requests>"

    def check(self, links: Sequence[Link]) -> None:
        """Refuse links where nobody would follow them.

        Raises:
            ApiError: 400.
        """
        if links and self._fetcher is None:
            reason = "only data: URLs are accepted; links are not fetched (gateway.image_links is off)"
            raise errors.invalid_value(links[0].param, reason)

    def follow(self, exchange: "Exchange", then: Callable[[], None]) -> None:
        """Fetch what a request links to, then go on with it; without the pictures it fails."""
        task = asyncio.get_running_loop().create_task(self._follow(exchange, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is fetched."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, exchange: "Exchange", then: Callable[[], None]) -> None:
        try:
            for link in exchange.call.links:
                if exchange.is_over:
                    return
                async with self._turn_of(exchange.key.record.tenant_id):
                    link.target.url = await self._fetched(link)
            if not exchange.is_over:
                then()
        except ApiError as error:
            exchange.fail(error)
        except Exception:  # noqa: BLE001 - boundary: a bug here must not leave the request hanging
            _log.exception("a link could not be followed", extra={"request_id": exchange.request_id})
            exchange.fail(errors.internal_error(exchange.request_id))

    def _turn_of(self, tenant_id: str) -> asyncio.Semaphore:
        found = self._of_tenants.get(tenant_id)
        if found is None:
            found = self._of_tenants[tenant_id] = asyncio.Semaphore(TENANT_AT_ONCE)
        return found

    async def _fetched(self, link: Link) -> str:
        """Return the picture behind a link as a ``data:`` URL."""
        assert self._fetcher is not None, "checked before"
        try:
            async with self._at_once:
                found = await self._fetcher.fetch("GET", link.target.url, bounds=self._bounds)
        except FetchError as error:
            raise errors.invalid_value(link.param, f"it cannot be fetched: {error}", code="link_not_fetched") from None
        reason = ""
        if found.status != 200:
            reason = f"its server answered {found.status}"
        elif found.content_type not in PICTURE_TYPES:
            reason = f"its content type is none of {', '.join(PICTURE_TYPES)}"
        if reason:
            raise errors.invalid_value(link.param, f"it cannot be fetched: {reason}", code="link_not_fetched")
        return f"data:{found.content_type};base64,{base64.b64encode(found.body).decode()}"
