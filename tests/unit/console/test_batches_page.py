"""The console's list of batches."""

import httpx2
from tests.support.management import URL, Management

from modelyard.domain.batches import Batch, BatchError, Forecast, Shard
from modelyard.domain.tenants import Scope

HOSTILE = '<script>alert("x")</script>'


async def made(api: Management, name: str, tenant_id: str) -> str:
    now = api.clock.unix_s()
    batch = Batch(
        f"batch_{name}", tenant_id, "k", "/v1/embeddings", "file-x", "24h", now, now + 86_400, f"file-o{name}",
        f"file-e{name}",
    )  # fmt: skip
    await api.context.batches.add_batch(batch)
    lease = await api.context.batches.lease_batch("w", now=now, until=now + 60)
    assert lease is not None
    if name == "bad":
        errors = [BatchError("invalid_json_line", HOSTILE, line=7)]
        assert await api.context.batches.fail(batch.id, lease.token, errors, now=now)
    else:
        forecast = Forecast(100, 0, 1_500_000_000, 120.0, "measured")
        shard = Shard(batch.id, 0, 0, 1_200, 0, 9)
        assert await api.context.batches.plan(batch.id, lease.token, [shard], "m-" + name, forecast, now=now)
    return batch.id


async def test_batches_are_listed_with_progress_trouble_and_forecast(
    api: Management, browser: httpx2.AsyncClient
) -> None:
    mine, theirs = await api.tenant("mine"), await api.tenant("theirs")
    going, bad = await made(api, "going", mine), await made(api, "bad", mine)
    other = await made(api, "other", theirs)
    _, key = await api.key(mine, Scope.MANAGE)
    assert (await browser.get("/console/batches")).status_code == 303
    await browser.post("/console/login", data={"key": key}, headers={"origin": URL})
    page = await browser.get("/console/batches")
    assert page.status_code == 200
    assert going in page.text
    assert bad in page.text
    assert other not in page.text
    assert "0 of 1,200" in page.text
    assert "about 20" in page.text, "when it will be done"
    assert "1.500000000" in page.text
    assert "line 7: " in page.text
    assert HOSTILE not in page.text
