"""The console as an ASGI application, to be mounted under ``/console``.

Pages are rendered here, with autoescape and without any script, so there is
nothing to inject into. Changing requests (sign in, sign out, those of webhooks)
must come from a page of our own origin.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from modelyard.console import views
from modelyard.console.batch_rows import batch_rows
from modelyard.console.session import SESSION_S, sign_in, signed_in
from modelyard.domain.tenants import Identity
from modelyard.domain.webhooks import DeliveryStatus
from modelyard.errors import ApiError, conflict
from modelyard.metering import invoice_pages
from modelyard.stores import StoreUnavailableError
from modelyard.web.app import read_body

if TYPE_CHECKING:
    import jinja2

ROOT = "/console"
COOKIE = "modelyard_session"
URL_HEADER = "x-modelyard-url"
FORM_BYTES_MAX = 4096
SPANS = (7, 30, 90)
DELIVERIES = ("pending", "delivered", "failed")
"""Statuses of deliveries that can be asked for."""
OVERLAP_S = 86_400.0
"""Time in which messages are signed with the secret before a rotation too."""

_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; object-src 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not "no-referrer": that would make the Origin of our own forms "null".
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}

Page = Callable[[Request, Identity], Awaitable[Response]]


def build_console(context: views.ConsoleContext) -> ASGIApp:
    """Return the console; a failure of ours is left to the application that mounts it."""
    console = _Console(context)
    guarded = console.guarded
    router = Router(
        [
            Route("/", guarded(console.overview), methods=["GET"]),
            Route("/endpoints/{endpoint}", guarded(console.endpoint), methods=["GET"]),
            Route("/keys", guarded(console.keys), methods=["GET"]),
            Route("/usage", guarded(console.usage), methods=["GET"]),
            Route("/batches", guarded(console.batches), methods=["GET"]),
            Route("/invoices", guarded(console.invoices), methods=["GET"]),
            Route("/invoices/{invoice}", guarded(console.invoice), methods=["GET"]),
            Route("/webhooks", guarded(console.webhooks), methods=["GET"]),
            Route("/webhooks/{webhook}", guarded(console.webhook), methods=["GET"]),
            Route("/webhooks/{webhook}/rotate", guarded(console.rotate), methods=["POST"]),
            Route("/webhooks/{webhook}/redeliver/{delivery}", guarded(console.redeliver), methods=["POST"]),
            Route("/login", console.login_page, methods=["GET"]),
            Route("/login", console.login, methods=["POST"]),
            Route("/logout", console.logout, methods=["POST"]),
            Route("/static/console.css", _style, methods=["GET"]),
        ],
        redirect_slashes=False,
    )
    return ExceptionMiddleware(
        router,
        handlers={
            HTTPException: console.refuse_http,
            ApiError: console.refuse_api,
            StoreUnavailableError: console.refuse_store,
        },
    )


@dataclass(slots=True)
class _Console:
    """The pages."""

    context: views.ConsoleContext

    def guarded(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """Return ``page`` for those who are signed in, the way to the login for all others."""

        async def answer(request: Request) -> Response:
            identity = await signed_in(self.context, request.cookies.get(COOKIE, ""))
            if identity is None:
                return RedirectResponse(f"{ROOT}/login", 303, headers=_HEADERS)
            return await page(request, identity)

        return answer

    async def overview(self, _: Request, identity: Identity) -> Response:
        rows = await views.endpoint_rows(self.context, identity)
        return self._page("overview.html", identity, rows=rows, gateways=len(self.context.gateways()))

    async def endpoint(self, request: Request, identity: Identity) -> Response:
        for row in await views.endpoint_rows(self.context, identity):
            if row.endpoint.id == request.path_params["endpoint"]:
                events = await views.endpoint_events(self.context, row.endpoint)
                return self._page("endpoint.html", identity, row=row, events=events)
        raise HTTPException(404)

    async def keys(self, _: Request, identity: Identity) -> Response:
        return self._page("keys.html", identity, rows=await views.key_rows(self.context, identity))

    async def usage(self, request: Request, identity: Identity) -> Response:
        wanted = request.query_params.get("days", "")
        days = int(wanted) if wanted in map(str, SPANS) else SPANS[1]
        rows, total = await views.usage_rows(self.context, identity, days=days)
        currency = self.context.config.billing.currency
        return self._page("usage.html", identity, rows=rows, total=total, currency=currency, days=days, spans=SPANS)

    async def batches(self, _: Request, identity: Identity) -> Response:
        return self._page("batches.html", identity, rows=await batch_rows(self.context, identity))

    async def invoices(self, _: Request, identity: Identity) -> Response:
        return self._page("invoices.html", identity, rows=await views.invoice_rows(self.context, identity))

    async def invoice(self, request: Request, identity: Identity) -> Response:
        reference = request.path_params["invoice"]
        found = await self.context.billing.invoice(reference, tenant_id=identity.visible_tenant)
        if found is None:
            raise HTTPException(404)
        notes = await self.context.billing.credit_notes(tenant_id=None, invoice_id=found.id)
        # A page of its own, to be printed: its policy allows its own style, which is inside of it.
        headers = {**_HEADERS, "content-security-policy": invoice_pages.POLICY}
        return HTMLResponse(invoice_pages.page(found, notes), headers=headers)

    async def webhooks(self, _: Request, identity: Identity) -> Response:
        rows = await views.webhook_rows(self.context, identity)
        return self._page("webhooks.html", identity, rows=rows, most=views.WEBHOOKS_SHOWN)

    async def webhook(self, request: Request, identity: Identity) -> Response:
        return await self._webhook(await self._row(request, identity), identity, request.query_params.get("status", ""))

    async def rotate(self, request: Request, identity: Identity) -> Response:
        """Show the new secret in the answer, this once: there is no page that it could be read from again."""
        _check_origin(request)
        row = await self._row(request, identity)
        done = await self.context.webhooks.rotate(row.webhook.id, overlap_s=OVERLAP_S)
        if done is None:
            raise HTTPException(404)
        return await self._webhook(views.WebhookRow(done[0], row.pending), identity, secret=done[1])

    async def redeliver(self, request: Request, identity: Identity) -> Response:
        _check_origin(request)
        webhook, store = (await self._row(request, identity)).webhook, self.context.webhooks.store
        delivery = await store.delivery(request.path_params["delivery"], webhook_id=webhook.id)
        if delivery is None:
            raise HTTPException(404)
        if not webhook.is_enabled:
            raise conflict(f"This webhook is disabled. Enable it first: modelyard webhooks set {webhook.id} --enable")
        await store.redeliver(delivery.id, now=self.context.clock.unix_s())
        self.context.webhooks.wake()
        return RedirectResponse(f"{ROOT}/webhooks/{webhook.id}", 303, headers=_HEADERS)

    async def _row(self, request: Request, identity: Identity) -> views.WebhookRow:
        row = await views.webhook_row(self.context, identity, request.path_params["webhook"])
        if row is None:
            raise HTTPException(404)
        return row

    async def _webhook(
        self, row: views.WebhookRow, identity: Identity, wanted: str = "", *, secret: str = ""
    ) -> Response:
        status = DeliveryStatus(wanted) if wanted in DELIVERIES else None
        deliveries = await self.context.webhooks.store.deliveries(
            row.webhook.id, status=status, limit=views.DELIVERIES_SHOWN, after=None
        )
        return self._page(
            "webhook.html",
            identity,
            row=row,
            secret=secret,
            wanted={"status": status.value if status else "", "statuses": ("", *DELIVERIES)},
            deliveries=deliveries,
            answer_of=views.answer_of,
            most=views.DELIVERIES_SHOWN,
        )

    async def login_page(self, _: Request) -> Response:
        return self._page("login.html", None, failed=False)

    async def login(self, request: Request) -> Response:
        _check_origin(request)
        body = await read_body(request, most=FORM_BYTES_MAX)
        form = dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=8))
        token = await sign_in(self.context, form.get("key", ""))
        if token is None:
            return self._page("login.html", None, status=401, failed=True)
        response = RedirectResponse(f"{ROOT}/", 303, headers=_HEADERS)
        secure = request.headers.get("origin", "").startswith("https:")
        response.set_cookie(
            COOKIE, token, max_age=SESSION_S, path=ROOT, httponly=True, samesite="strict", secure=secure
        )
        return response

    async def logout(self, request: Request) -> Response:
        _check_origin(request)
        response = RedirectResponse(f"{ROOT}/login", 303, headers=_HEADERS)
        response.delete_cookie(COOKIE, path=ROOT, httponly=True, samesite="strict")
        return response

    async def refuse_http(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException"
        text = {404: "There is no such page.", 405: "This page does not accept that method."}
        return self._error(error.status_code, text.get(error.status_code, "The request is not valid here."))

    async def refuse_api(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), "registered for ApiError"
        return self._error(error.status, error.message)

    async def refuse_store(self, _: Request, __: Exception) -> Response:
        return self._error(503, "The database does not answer right now. Please try again.")

    def _error(self, status: int, message: str) -> Response:
        return self._page("error.html", None, status=status, message=message)

    def _page(self, name: str, identity: Identity | None, *, status: int = 200, **values: object) -> Response:
        age = views.age(self.context.clock)
        text = _templates().get_template(name).render(root=ROOT, identity=identity, age=age, status=status, **values)
        return HTMLResponse(text, status, _HEADERS)


def _check_origin(request: Request) -> None:
    """Refuse what another site's page sends with the visitor's cookies; browsers always name the origin of a POST.

    The scheme is not compared, because whoever ends TLS in front of the gateway is the only one who knows it; the
    cookie's own ``SameSite=Strict`` tells ``http`` from ``https``.
    """
    origin = request.headers.get("origin")
    if origin is None:
        is_own = request.headers.get("sec-fetch-site") == "same-origin"
    else:
        url = request.headers.get(URL_HEADER) or f"http://{request.headers.get('host', '')}"
        own = _host_of(url)
        is_own = own != "" and _host_of(origin) == own
    if not is_own:
        message = "This form was not sent from the console. Open /console and try again."
        raise ApiError(403, code="cross_origin", type="permission_error", message=message)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


@lru_cache(maxsize=1)
def _templates() -> "jinja2.Environment":
    import jinja2  # 30 ms, and most controllers never show a page

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("modelyard.console"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = views.moment
    return environment


@lru_cache(maxsize=1)
def _style_text() -> bytes:
    return (resources.files("modelyard.console") / "static" / "console.css").read_bytes()


async def _style(_: Request) -> Response:
    headers = {**_HEADERS, "cache-control": "public, max-age=3600"}
    return Response(_style_text(), headers=headers, media_type="text/css")
