"""S13, S18, S30 for the management API: every route, from the very table that serves them.

A route added later is covered without a line here; one with a new kind of id
must be given an example in ``Theirs``.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.files import upload
from tests.support.management import Management, management

from modelyard.control.api import declared_routes
from modelyard.domain.events import EventType
from modelyard.domain.requests import Claim, Finish, RequestStatus
from modelyard.domain.tenants import IDENTITY_HEADER, Identity, Scope
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.domain.webhooks import Webhook
from modelyard.policy.utc import day_of, month_name
from modelyard.stores import JournalPosition
from modelyard.web.routes import AnyRoute, Empty

DEPLOYMENT = {"model_name": "their-model", "framework": "simulated"}
CHANGING = ("POST", "PUT", "PATCH", "DELETE")


@dataclass
class Theirs:
    """What tenant A owns, by the name of the path parameter that finds it."""

    ids: dict[str, list[str]]
    secrets: list[str]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path) as running:
        yield running


@pytest.fixture
async def theirs(api: Management) -> Theirs:
    tenant_id = await api.tenant("tenant-a")
    owner, _ = await api.key(tenant_id, Scope.MANAGE)
    endpoint_id = (await api.call(owner, "POST", "/v1/models/deploy", DEPLOYMENT)).json()["endpoint_id"]
    request_id = await kept_request(api, owner)
    wanted = {"name": "their-model", "size_bytes": 1}
    upload_id = (await api.call(owner, "POST", "/v1/uploads/artifacts", wanted)).json()["id"]
    file_id = (await upload(api, owner))["id"]
    order = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = (await api.call(owner, "POST", "/v1/batches", order)).json()["id"]
    version_id = (await api.context.store.versions())[0].id
    budget = await api.call(owner, "POST", "/v1/budgets", {"amount": 1, "name": "their-budget"})
    money = await money_of(api, tenant_id)
    webhook = Webhook(id="wh_theirs", tenant_id=tenant_id, url="https://theirs.example/", types=("*",), created_at=1.0)
    await api.context.webhooks.store.add_webhook(webhook, most=9)
    await api.context.events.add(tenant_id, EventType.BATCH_COMPLETED, {"id": "batch_theirs"}, now=1.0)
    webhooks = api.context.webhooks.store
    (delivery,) = await webhooks.deliveries("wh_theirs", status=None, limit=9, after=None)
    return Theirs(
        {
            "endpoint": [endpoint_id, "their-model"],
            "model": [version_id, "their-model"],
            "key_id": [owner.key_id],
            "tenant_id": [tenant_id],
            "request_id": [request_id],
            "version": [version_id],
            "upload": [upload_id],
            "number": ["1"],
            "pool": ["their-pool"],
            "file_id": [file_id],
            "batch_id": [batch_id],
            "budget": [budget.json()["id"]],
            **money,
            "webhook_id": ["wh_theirs"],
            "delivery_id": [delivery.id],
        },
        [
            *(endpoint_id, version_id, upload_id, file_id, owner.key_id, tenant_id, request_id, "their-model"),
            *(batch_id, budget.json()["id"], "their-budget"),
            *(one for ids in money.values() for one in ids),
            *("their-reason", "wh_theirs", "theirs.example"),
        ],
    )


async def money_of(api: Management, tenant_id: str) -> dict[str, list[str]]:
    """Let the tenant use something, pay for it, and be told of it; return the ids of all that."""
    admin, _ = await api.key("platform", Scope.ADMIN)
    price = await api.call(admin, "PUT", "/v1/prices", {"model": "their-model", "input": 1, "tenant": tenant_id})
    at = api.clock.unix_s()
    intent = Intent("req_used", at, tenant_id, "k", "ep", "their-model", "v", "/", False, 9, 9, Price(input=10**15))
    settle = Settle("req_used", at, 9, 0, 9, UsageStatus.SUCCESS, 200, "", None, 1.0, "r", 1, False)
    await api.context.usage.apply([intent, settle], JournalPosition("gateway-0", "1.journal", 1))
    credit = {"tenant": tenant_id, "amount": 1, "reason": "their-reason"}
    grant = await api.call(admin, "POST", "/v1/credits", credit)
    assert grant.status_code == 201
    wanted = {"tenant": tenant_id, "month": month_name(day_of(at))}
    draft = (await api.call(admin, "POST", "/v1/invoices", wanted)).json()
    path = f"/v1/invoices/{draft['id']}"
    assert (await api.call(admin, "POST", f"{path}/issue")).json()["number"] == "INV-000001"
    back = {"reason": "their-reason", "amount": "1"}
    note = (await api.call(admin, "POST", f"{path}/credit-notes", back)).json()
    assert note["number"] == "CN-000001"
    await api.context.billing_desk.round()
    assert (await api.context.billing.billing_events(tenant_id=tenant_id, limit=9)) != []
    return {
        "invoice": [draft["id"], "INV-000001"],
        "price": [price.json()["id"]],
        "grant": [grant.json()["id"]],
        "note": [note["id"], "CN-000001"],
    }


async def kept_request(api: Management, owner: Identity) -> str:
    """Keep an answer for ``owner``; return the id of the request."""
    claim = Claim(
        id="req_theirs",
        tenant_id=owner.tenant_id,
        key_id=owner.key_id,
        instance="gateway",
        route="/v1/completions",
        model="their-model",
        fingerprint="",
        is_detached=True,
    )
    assert (await api.context.requests.claim(claim)).is_new
    end = Finish(
        id=claim.id, status=RequestStatus.SUCCEEDED, http_status=200, content_type="text/plain", answer=b"theirs"
    )
    await api.context.requests.finish(end)
    return claim.id


@pytest.fixture
async def stranger(api: Management) -> Identity:
    return (await api.key(await api.tenant("tenant-b"), Scope.MANAGE))[0]


def paths(route: AnyRoute, ids: dict[str, list[str]]) -> list[str]:
    found = [route.path.replace(":path}", "}")]
    for name, values in ids.items():
        found = [path.replace(f"{{{name}}}", value) for path in found for value in values]
    assert not any("{" in path for path in found), f"{route.path}: give an example of this id in `theirs`"
    return list(dict.fromkeys(found))


def body_of(route: AnyRoute) -> Any:
    return None if route.body is Empty else (route.example or {})


async def test_another_tenants_ids_do_not_exist(api: Management, theirs: Theirs, stranger: Identity) -> None:
    tried = 0
    for route in declared_routes(api.context):
        if "{" not in route.path:
            continue
        for path in paths(route, theirs.ids):
            answer = await api.call(stranger, route.method, path, body_of(route))
            # What needs "admin" refuses before it looks for the id, so it tells nothing either.
            expected = 403 if route.scope is Scope.ADMIN else 404
            assert answer.status_code == expected, f"{route.method} {path}: {answer.status_code} {answer.text}"
            tried += 1
    assert tried > 10
    (endpoint,) = [one for one in await api.context.store.endpoints() if one.name == "their-model"]
    assert not endpoint.is_deleted
    assert all(key.revoked_at is None for key in await api.context.store.keys())


async def test_lists_show_nothing_of_another_tenant(api: Management, theirs: Theirs, stranger: Identity) -> None:
    for route in declared_routes(api.context):
        if route.method != "GET" or "{" in route.path or route.scope is Scope.ADMIN:
            continue
        # OpenAI's usage has no default for its beginning.
        must_begin = any(field.name == "start_time" for field in msgspec.structs.fields(route.query))
        query = f"?start_time={int(api.clock.unix_s()) - 86_400}" if must_begin else ""
        answer = await api.call(stranger, "GET", route.path + query)
        assert answer.status_code == 200, answer.text
        for secret in theirs.secrets:
            assert secret not in answer.text, f"{route.path} shows {secret}"


async def test_no_route_answers_without_token_or_identity(api: Management, theirs: Theirs) -> None:
    strong, _ = await api.key("platform", Scope.ADMIN)
    for route in declared_routes(api.context):
        for path in paths(route, theirs.ids):
            for identity, token in ((strong, None), (strong, "wrong"), (None, None)):
                async with api.client(identity, token=token) as client:
                    assert (await client.request(route.method, path)).status_code == 401, path
            assert (await api.call(None, route.method, path, body_of(route))).status_code == 401, path
            async with api.client(None) as client:
                answer = await client.request(route.method, path, headers={IDENTITY_HEADER: "{}"})
                assert answer.status_code == 401, path


async def test_scopes_are_kept_on_every_route(api: Management, theirs: Theirs) -> None:
    order = [Scope.INFERENCE, Scope.MANAGE, Scope.ADMIN]
    for route in declared_routes(api.context):
        for weaker in order[: order.index(route.scope)]:
            identity, _ = await api.key("ten-tenant-a", weaker)
            for path in paths(route, theirs.ids):
                answer = await api.call(identity, route.method, path, body_of(route))
                assert answer.status_code == 403, f"{route.method} {path} as {weaker}"


def nonsense(route: AnyRoute) -> list[tuple[bytes, bool]]:
    """Return bad bodies, and whether the answer can name a parameter."""
    fields = [field.encode_name for field in msgspec.structs.fields(route.body)]
    deep = b"[" * 5000 + b"]" * 5000
    bad: list[tuple[bytes, bool]] = [
        (b"{", False),
        (b"not json", False),
        (b"\xff\xfe{\x00}\x00", False),
        (b"[]", False),
        (b'"text"', False),
        (b"null", False),
        (b"[" * 100_000, False),
        (b'{"nope": ' + deep + b"}", True),
        (b'{"is_admin": true}', True),
    ]
    for field in fields:
        name = field.encode()
        bad += [
            (b'{"%b": NaN}' % name, False),
            (b'{"%b": Infinity}' % name, False),
            (b'{"%b": "\\ud800"}' % name, False),
            (b'{"%b": "\xff"}' % name, False),
            (b'{"%b": %b}' % (name, deep), True),
            (b'{"%b": %b}' % (name, b'{"a":' * 5000 + b"1" + b"}" * 5000), True),
            (b'{"%b": [[1]]}' % name, True),
            (b'{"%b": {"no": {"such": "thing"}}}' % name, True),
            (b'{"%b": 1e999}' % name, True),
        ]
    return bad


async def test_bad_bodies_are_refused_by_name_and_never_a_500(api: Management, theirs: Theirs) -> None:
    strong, _ = await api.key("platform", Scope.ADMIN)
    tried = 0
    for route in declared_routes(api.context):
        if route.body is Empty:
            continue
        path = paths(route, theirs.ids)[0]
        for body, has_name in nonsense(route):
            async with api.client(strong) as client:
                answer = await client.request(route.method, path, content=body)
            assert answer.status_code == 400, f"{route.method} {path} {body[:60]!r}: {answer.status_code} {answer.text}"
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert not has_name or error["param"], f"{route.method} {path} {body[:60]!r}: {error}"
            assert len(answer.content) < 2000
            tried += 1
    assert tried > 100


@pytest.mark.parametrize(
    "query", ["%00=1", "limit=%00", "after=" + "x" * 10_000, "limit=99999999999999999999", "a[]=1"]
)
async def test_bad_queries_are_refused_and_never_a_500(api: Management, theirs: Theirs, query: str) -> None:
    strong, _ = await api.key("platform", Scope.ADMIN)
    for route in declared_routes(api.context):
        if route.method == "GET":
            for path in paths(route, theirs.ids):
                answer = await api.call(strong, "GET", f"{path}?{query}")
                assert answer.status_code == 400, f"{path}?{query[:40]}: {answer.status_code}"


@pytest.mark.parametrize(
    "reference", ["%2e%2e%2f%2e%2e%2fsecrets", "a%00b", "%E2%80%AE", "x" * 5000, "a%0d%0ab", "%ff"]
)
async def test_strange_ids_are_unknown(api: Management, theirs: Theirs, reference: str) -> None:
    strong, _ = await api.key("platform", Scope.ADMIN)
    for route in declared_routes(api.context):
        if "{" in route.path:
            path = paths(route, {name: [reference] for name in theirs.ids})[0]
            answer = await api.call(strong, route.method, path, body_of(route))
            # This one makes what it names: what cannot be a name is bad input, and a path of several names no route.
            expected = (400, 404) if (route.method, route.path) == ("PUT", "/v1/pools/{pool}") else (404,)
            assert answer.status_code in expected, f"{route.method} {path[:60]}: {answer.status_code}"
            assert answer.json()["error"]["type"] == "invalid_request_error"
