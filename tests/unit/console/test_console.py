"""The console: signing in, what it shows, and what cannot be done to it."""

import re

import httpx2
import msgspec
import pytest
from tests.support.management import URL, Management

from modelyard.console.session import SESSION_S
from modelyard.console.views import EndpointRow, usd
from modelyard.domain.endpoints import Endpoint, EndpointStatus, Progress, Release, Scaling, Stage
from modelyard.domain.fleet import GuestSeat, Replica, ReplicaState, SeatState
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.policy.utc import day_of, month_name
from modelyard.stores import Event, JournalPosition

HOSTILE = "<img src=x onerror=alert(1)>"


async def sign_in(browser: httpx2.AsyncClient, key: str, origin: str | None = URL) -> httpx2.Response:
    headers = {"origin": origin} if origin is not None else {}
    return await browser.post("/console/login", data={"key": key}, headers=headers)


async def test_signing_in_shows_the_pages(api: Management, browser: httpx2.AsyncClient) -> None:
    _, key = await api.key(PLATFORM, Scope.ADMIN)
    for page in ("/console/", "/console/keys", "/console/usage", "/console/endpoints/ep-x", "/console/invoices/x"):
        answer = await browser.get(page)
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    assert (await browser.get("/console")).headers["location"] == "/console/"
    assert (await browser.get("/console/login")).status_code == 200
    answer = await sign_in(browser, key)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/")
    cookie = answer.headers["set-cookie"].lower()
    for part in ("httponly", "samesite=strict", "path=/console", f"max-age={SESSION_S}"):
        assert part in cookie
    assert key.lower() not in cookie
    for page in (
        *("/console/", "/console/keys", "/console/usage?days=7", "/console/invoices", "/console/static/console.css"),
    ):
        answer = await browser.get(page)
        assert answer.status_code == 200, page
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert key not in answer.text
        assert not re.search(r"<script|style=|\son\w+=|(src|href)=\"(https?:)?//", answer.text)
    answer = await browser.post("/console/logout", headers={"origin": URL})
    assert answer.status_code == 303
    assert (await browser.get("/console/")).status_code == 303


async def test_cookie_stays_on_https_where_the_visitor_came_by_it(api: Management, browser: httpx2.AsyncClient) -> None:
    _, key = await api.key(PLATFORM, Scope.ADMIN)
    behind_tls = await sign_in(browser, key, URL.replace("http:", "https:"))
    assert "secure" in behind_tls.headers["set-cookie"].lower()
    assert "secure" not in (await sign_in(browser, key)).headers["set-cookie"].lower()


async def test_only_live_keys_that_may_manage_get_in(api: Management, browser: httpx2.AsyncClient) -> None:
    identity, weak = await api.key(PLATFORM, Scope.INFERENCE)
    _, good = await api.key(PLATFORM, Scope.MANAGE)
    wrong = good[:20] + ("A" if good[20] != "A" else "B") + good[21:]
    for key in ("", "sk-1234", weak, wrong, "x" * 3000):
        answer = await sign_in(browser, key)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert identity.key_id not in answer.text
    assert (await sign_in(browser, "x" * 10_000)).status_code == 413


async def test_session_ends_with_its_key(api: Management, browser: httpx2.AsyncClient) -> None:
    admin, _ = await api.key(PLATFORM, Scope.ADMIN)
    for ending in ("revoke", "rotate", "suspend", "expire"):
        tenant_id = await api.tenant(ending)
        identity, key = await api.key(tenant_id, Scope.MANAGE)
        await sign_in(browser, key)
        assert (await browser.get("/console/")).status_code == 200
        if ending == "revoke":
            await api.call(admin, "DELETE", f"/v1/keys/{identity.key_id}")
        elif ending == "rotate":
            await api.call(admin, "POST", f"/v1/keys/{identity.key_id}/rotate")
        elif ending == "suspend":
            await api.call(admin, "PATCH", f"/v1/tenants/{tenant_id}", {"is_suspended": True})
        else:
            api.clock.advance(SESSION_S + 1)
        assert (await browser.get("/console/")).status_code == 303, ending


async def test_cookie_cannot_be_forged(api: Management, browser: httpx2.AsyncClient) -> None:
    identity, key = await api.key(PLATFORM, Scope.MANAGE)
    other, _ = await api.key(PLATFORM, Scope.ADMIN)
    await sign_in(browser, key)
    key_id, expiry, proof = str(browser.cookies["modelyard_session"]).split(".")
    assert key_id == identity.key_id
    forged = (f"{other.key_id}.{expiry}.{proof}", f"{key_id}.{int(expiry) + 1}.{proof}", f"{key_id}.{expiry}.", "x", "")
    for token in forged:
        async with api.client(None) as thief:
            answer = await thief.get("/console/", headers={"cookie": f"modelyard_session={token}"})
            assert answer.status_code == 303, token


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "http://[", "", None])
async def test_forms_of_other_sites_are_refused(
    api: Management, browser: httpx2.AsyncClient, origin: str | None
) -> None:
    _, key = await api.key(PLATFORM, Scope.ADMIN)
    answer = await sign_in(browser, key, origin)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    headers = {"origin": origin} if origin is not None else {}
    assert (await browser.post("/console/logout", headers=headers)).status_code == 403


async def test_hostile_text_is_only_text(api: Management, browser: httpx2.AsyncClient) -> None:
    import msgspec

    identity, key = await api.key(PLATFORM, Scope.ADMIN)
    await api.call(identity, "POST", "/v1/keys", {"name": HOSTILE})
    spec = {"model_name": "smol", "framework": "simulated"}
    endpoint_id = (await api.call(identity, "POST", "/v1/models/deploy", spec)).json()["endpoint_id"]
    (endpoint,) = await api.context.store.endpoints()
    await api.context.store.put_endpoint(
        msgspec.structs.replace(endpoint, failure=HOSTILE, progress=Progress(Stage.LOADING, 42, 7.6, HOSTILE))
    )
    await api.context.store.add_event(Event(api.clock.unix_s(), endpoint_id, "failed", HOSTILE))
    await sign_in(browser, key)
    for page in ("/console/", f"/console/endpoints/{endpoint_id}", "/console/keys", "/console/" + HOSTILE):
        text = (await browser.get(page)).text
        assert "<img" not in text, page
    page = (await browser.get(f"/console/endpoints/{endpoint_id}")).text
    assert page.count("&lt;img src=x") == 3
    assert "42 %" in page
    assert "about 8 s" in page


async def test_releases_are_shown_where_there_are_several(api: Management, browser: httpx2.AsyncClient) -> None:
    identity, key = await api.key(PLATFORM, Scope.ADMIN)
    spec = {"model_name": "smol", "framework": "simulated"}
    endpoint_id = (await api.call(identity, "POST", "/v1/models/deploy", spec)).json()["endpoint_id"]
    await sign_in(browser, key)
    assert "Releases" not in (await browser.get(f"/console/endpoints/{endpoint_id}")).text
    release = {"framework": "simulated", "version": "next", "shadow": 10}
    await api.call(identity, "POST", f"/v1/endpoints/{endpoint_id}/releases", release)
    page = (await browser.get(f"/console/endpoints/{endpoint_id}")).text
    assert "next on simulated" in page
    assert "copies of 10 % of the requests" in page
    assert "100 % of the requests" in page


def a_release(id: str, **given: int) -> Release:
    return Release(id, **{"weight": 0, **given})


async def test_guests_are_shown_with_their_host_and_its_seats(api: Management, browser: httpx2.AsyncClient) -> None:
    identity, key = await api.key(PLATFORM, Scope.ADMIN)
    store = api.context.store
    hosting = {"model_name": "base", "framework": "simulated", "options": {"max_adapters": 4}}
    host_id = (await api.call(identity, "POST", "/v1/models/deploy", hosting)).json()["endpoint_id"]
    spec = {"model_name": "bot", "framework": "simulated"}
    guest_id = (await api.call(identity, "POST", "/v1/models/deploy", spec)).json()["endpoint_id"]
    ends = {one.id: one for one in await store.endpoints()}
    await store.put_endpoint(msgspec.structs.replace(ends[guest_id], host_id=host_id))
    guest_version = ends[guest_id].releases[0].version_id
    replica = Replica("rep-1", host_id, ends[host_id].releases[0].version_id, 0, 1, ReplicaState.READY, 0.0)
    await store.put_replica(replica)
    seats = [GuestSeat(guest_id, guest_version, "bot@1", SeatState.READY), GuestSeat("ep-of-others", "ver-x", "x@1")]
    await store.put_guests("rep-1", tuple(seats))
    await sign_in(browser, key)
    page = (await browser.get(f"/console/endpoints/{guest_id}")).text
    assert f'<dt>Host</dt><dd><a href="/console/endpoints/{host_id}">base</a>' in page
    assert "<h2>Seats</h2>" in page
    assert "rep-1/bot@1" in page
    assert "Scaling" not in page
    host = (await browser.get(f"/console/endpoints/{host_id}")).text
    assert "<dt>Guests</dt><dd>2 of 4 seats</dd>" in host
    assert f'<a href="/console/endpoints/{guest_id}">bot</a>' in host
    assert "(another tenant&#39;s)" in host or "(another tenant's)" in host
    assert "ep-of-others" not in host
    assert '<td class="n">on base</td>' in (await browser.get("/console/")).text


def test_replicas_of_fallbacks_are_not_of_the_endpoints_size() -> None:
    releases = (a_release("v1", weight=100), *(a_release(f"f{at}", fallback=at) for at in (1, 2, 3)))
    replicas = [Replica(one.version_id, "ep-1", one.version_id, 0, 1, ReplicaState.READY, 0.0) for one in releases]
    row = EndpointRow(Endpoint("ep-1", "ten-1", "m", releases, Scaling(), 0), None, replicas, 0, 0)
    assert (row.ready, row.ready_beside) == (1, 3)


@pytest.mark.parametrize(
    ("status", "progress", "shown"),
    [
        (EndpointStatus.STOPPED, Progress(Stage.QUEUED, reason="asleep: no request"), "asleep: no request"),
        (EndpointStatus.PROVISIONING, Progress(Stage.LOADING, percent=42, eta_s=7.6), "loading 42 %, about 8 s"),
        (EndpointStatus.PROVISIONING, Progress(Stage.QUEUED, reason="no free core"), "queued (no free core)"),
        (EndpointStatus.RUNNING, Progress(Stage.READY, percent=100, eta_s=0.0), "ready"),
    ],
)
def test_stage_is_what_a_person_asks_for(status: EndpointStatus, progress: Progress, shown: str) -> None:
    endpoint = Endpoint("ep-1", "ten-1", "m", (), Scaling(), 0, status=status, progress=progress)
    assert EndpointRow(endpoint, None, [], 0, 0).stage == shown


def test_cost_is_exact() -> None:
    assert usd(200) == "0.000000200"
    assert usd(1_234_000_000_001) == "1,234.000000001"


async def test_tenants_see_their_own(api: Management, browser: httpx2.AsyncClient) -> None:
    owner: Identity = (await api.key(await api.tenant("theirs"), Scope.MANAGE))[0]
    spec = {"model_name": "their-model", "framework": "simulated"}
    endpoint_id = (await api.call(owner, "POST", "/v1/models/deploy", spec)).json()["endpoint_id"]
    _, key = await api.key(await api.tenant("mine"), Scope.MANAGE)
    await sign_in(browser, key)
    for page in ("/console/", "/console/keys", "/console/usage"):
        text = (await browser.get(page)).text
        assert "their-model" not in text
        assert owner.key_id not in text
    assert (await browser.get(f"/console/endpoints/{endpoint_id}")).status_code == 404


async def test_database_that_does_not_answer_is_told(api: Management, browser: httpx2.AsyncClient) -> None:
    _, key = await api.key(PLATFORM, Scope.ADMIN)
    await sign_in(browser, key)
    await api.context.store.close()
    answer = await browser.get("/console/")
    assert answer.status_code == 503
    assert "database" in answer.text


async def test_console_needs_the_gateways_token(api: Management) -> None:
    async with api.client(None, token=None) as client:
        assert (await client.get("/console/login")).status_code == 401


async def test_a_tenant_sees_its_own_invoices_as_pages_to_print(api: Management, browser: httpx2.AsyncClient) -> None:
    made: dict[str, str] = {}
    for number, name in enumerate(("acme", "globex")):
        tenant_id = await api.tenant(name)
        at = api.clock.unix_s()
        intent = Intent(f"r{number}", at, tenant_id, "k", "ep", HOSTILE, "v", "/", False, 9, 9, Price(input=10**15))
        settle = Settle(f"r{number}", at, 9, 0, 9, UsageStatus.SUCCESS, 200, "", None, 1.0, "r", 1, False)
        await api.context.usage.apply([intent, settle], JournalPosition("g", "1.journal", number))
        draft = await api.context.billing_desk.draft(tenant_id, month_name(day_of(at)))
        assert draft is not None
        made[name] = draft.id
    issued = await api.context.billing_desk.issue(made["acme"], key_id="k")
    assert issued is not None
    _, key = await api.key("ten-acme", Scope.MANAGE)
    await sign_in(browser, key)
    listing = await browser.get("/console/invoices")
    assert "INV-000001" in listing.text
    assert "9.00" in listing.text
    assert "globex" not in listing.text
    page = await browser.get(f"/console/invoices/{made['acme']}")
    assert page.status_code == 200
    assert "INV-000001" in page.text
    assert HOSTILE not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page.text
    assert (await browser.get(f"/console/invoices/{made['globex']}")).status_code == 404
