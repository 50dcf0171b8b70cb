"""The management API: one file a noun, each declaring its own routes.

``build_api`` gives the ASGI application that the gateway forwards to.
"""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

import modelyard
from modelyard.control.api.batches import Batches
from modelyard.control.api.books import Books
from modelyard.control.api.budgets import Budgets
from modelyard.control.api.credit_notes import CreditNotes
from modelyard.control.api.credits import Credits
from modelyard.control.api.deploy import Deployments
from modelyard.control.api.endpoint_stats import Stats
from modelyard.control.api.endpoint_why import EndpointWhy
from modelyard.control.api.endpoints import Endpoints
from modelyard.control.api.files import Files
from modelyard.control.api.fit import Fits
from modelyard.control.api.forecast import ForecastPages
from modelyard.control.api.invoices import Invoices
from modelyard.control.api.keys import Keys
from modelyard.control.api.logs import Logs
from modelyard.control.api.nodes import Nodes
from modelyard.control.api.organization import Organization
from modelyard.control.api.plan import Plans
from modelyard.control.api.pools import WarmPools
from modelyard.control.api.prices import Prices
from modelyard.control.api.registry import Registry
from modelyard.control.api.releases import Releases
from modelyard.control.api.requests import Requests
from modelyard.control.api.rollouts import Rollouts
from modelyard.control.api.status import StatusPage
from modelyard.control.api.tenants import Tenants
from modelyard.control.api.uploads import Uploads
from modelyard.control.api.usage import Usage
from modelyard.control.api.usage_export import UsageExport
from modelyard.control.api.webhooks import Webhooks
from modelyard.control.api.why import Why
from modelyard.control.context import Context
from modelyard.control.internal import internal_routes
from modelyard.web.app import build_app, json_response
from modelyard.web.docs import docs_page
from modelyard.web.openapi import Foreign, document
from modelyard.web.routes import AnyRoute

_AS_OPENAI = "Takes and answers what OpenAI's API reference says; docs/reference/api.md has what differs."

GATEWAY_ROUTES = (
    Foreign("POST", "/v1/chat/completions", "Chat completions (OpenAI)", _AS_OPENAI),
    Foreign("POST", "/v1/completions", "Completions (OpenAI)", _AS_OPENAI),
    Foreign("POST", "/v1/embeddings", "Embeddings (OpenAI)", _AS_OPENAI),
    Foreign("GET", "/v1/models", "Models that this key may use (OpenAI)"),
    Foreign("GET", "/v1/models/{model}", "One model (OpenAI)"),
    Foreign("GET", "/healthz", "Whether the gateway runs", is_public=True),
    Foreign("GET", "/readyz", "Whether the gateway can serve", is_public=True),
    Foreign("GET", "/metrics", "Metrics (Prometheus)"),
)


def declared_routes(context: Context) -> list[AnyRoute]:
    """Return every route that needs an identity. Endpoints come last of their paths: their names may hold slashes."""
    nouns = (
        Deployments,
        Plans,
        Fits,
        Logs,
        Releases,
        Rollouts,
        Stats,
        EndpointWhy,
        ForecastPages,
        Endpoints,
        Registry,
        Uploads,
        Files,
        Keys,
        Tenants,
        Usage,
        UsageExport,
        Organization,
        StatusPage,
        Requests,
        Webhooks,
        Why,
        Nodes,
        WarmPools,
        Prices,
        Credits,
        Budgets,
        CreditNotes,
        Invoices,
        Batches,
        Books,
    )
    return [route for noun in nouns for route in noun(context).routes()]


def build_api(context: Context, console: ASGIApp | None = None) -> Starlette:
    """Return the application; ``console``, if any, answers under ``/console`` and checks its own cookie."""
    routes = declared_routes(context)
    described = document(routes, title="Modelyard", version=modelyard.__version__, foreign=GATEWAY_ROUTES)

    async def openapi(_: Request) -> Response:
        return json_response(described)

    async def docs(_: Request) -> Response:
        return docs_page(described)

    mounts = internal_routes(context.requests)
    if console is not None:
        mounts += [StarletteRoute("/console", _to_console, methods=["GET"]), Mount("/console", console)]
    public = {"/openapi.json": openapi, "/docs": docs}
    return build_app(routes, internal_token=context.internal_token, public=public, mounts=mounts)


async def _to_console(_: Request) -> Response:
    return RedirectResponse("/console/", 307)
