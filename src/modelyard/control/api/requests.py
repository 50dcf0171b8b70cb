"""Detached requests: look, fetch the answer, cancel or forget, send the webhook again."""

import msgspec
from starlette.responses import Response

from modelyard.control.api.access import missing
from modelyard.control.context import Context
from modelyard.domain.requests import KeptRequest, RequestView, view
from modelyard.domain.tenants import Scope
from modelyard.errors import conflict, invalid_value
from modelyard.web.paging import Page, Paging
from modelyard.web.routes import AnyRoute, Call, Empty, Route


class Requests:
    """The routes of requests."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, scope = "/v1/requests", "/v1/requests/{request_id}", Scope.INFERENCE
        replay = f"{one}/webhook/replay"
        return [
            Route("GET", every, scope, "List detached requests", self.page, Empty, Paging, Page[RequestView]),
            Route("GET", one, scope, "Get a detached request", self.get, Empty, Empty, RequestView),
            Route("GET", f"{one}/response", scope, "Get its answer as it is", self.answer, Empty, Empty, msgspec.Raw),
            Route("DELETE", one, scope, "Cancel it, or forget it if it is over", self.end, Empty, Empty, RequestView),
            Route("POST", replay, scope, "Send its webhook again", self.replay, Empty, Empty, RequestView, 202),
        ]

    async def page(self, call: Call[Empty, Paging]) -> Page[RequestView]:
        """Return the newest first, without their answers."""
        desk, query = self._context.requests, call.query
        after = None
        if query.after:
            after = await desk.store.request(query.after, tenant_id=call.identity.visible_tenant)
            if after is None:
                raise invalid_value("after", "no object of this list has this id")
        tenant_id = call.identity.visible_tenant
        rows = await desk.store.detached(tenant_id=tenant_id, limit=query.limit + 1, after=after)
        return Page([view(row) for row in rows[: query.limit]], has_more=len(rows) > query.limit)

    async def get(self, call: Call[Empty, Empty]) -> RequestView:
        """Return one."""
        return view(await self._find(call))

    async def answer(self, call: Call[Empty, Empty]) -> Response:
        """Return the answer itself: its status, type and bytes."""
        request = await self._find(call)
        if not request.http_status:
            raise conflict(f"The request is {request.status.value}; it has no answer.")
        headers = {
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "content-type": request.content_type,
        }
        return Response(request.answer, request.http_status, headers)

    async def end(self, call: Call[Empty, Empty]) -> RequestView:
        """Cancel a request that runs; forget one that is over."""
        request = await self._find(call)
        desk = self._context.requests
        if request.status.is_over:
            await desk.store.forget_request(request.id)
            return view(request)
        await desk.cancel(request)
        return view(await self._find(call))

    async def replay(self, call: Call[Empty, Empty]) -> RequestView:
        """Make the webhook due now, with a new span of retries under the same id."""
        request = await self._find(call)
        webhook = request.webhook
        if webhook is None:
            raise conflict("The request has no webhook.")
        if webhook.delivery is None:
            raise conflict("The request is not over; its webhook will be sent at its end.")
        webhooks = self._context.webhooks
        await webhooks.store.redeliver(webhook.delivery.id, now=self._context.clock.unix_s())
        webhooks.wake()
        return view(await self._find(call))

    async def _find(self, call: Call[Empty, Empty]) -> KeptRequest:
        """Return the detached request that the path names.

        Raises:
            ApiError: 404.
        """
        request_id = call.path("request_id")
        store = self._context.requests.store
        request = await store.request(request_id, tenant_id=call.identity.visible_tenant)
        if request is None or not request.is_detached:
            raise missing("request", request_id)
        return request
