"""/v1/organization/usage and /costs, as OpenAI's own SDK asks and reads them, and exports, against the ledger."""

import csv
import io
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet
import pytest
from tests.conformance.test_usage_rollups import a_request
from tests.support.management import Management, management

from modelyard.config import Config
from modelyard.config.billing import BillingConfig
from modelyard.control.api.usage_export import RowsGoneError
from modelyard.domain.tenants import PLATFORM, Identity, Scope
from modelyard.domain.usage import Intent, JournalRecord, Price, Settle, Unit, UsageFilter, UsageRow, UsageStatus
from modelyard.stores import JournalPosition
from modelyard.stores.sql import SqlUsageStore

HOUR, DAY = 3600, 86_400
NOON = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp())
EVER: dict[str, Any] = {"start_time": NOON - 40 * DAY, "end_time": NOON + DAY}
USED = (
    ("/v1/chat/completions", Unit.NONE, 0.0),
    ("/v1/completions", Unit.NONE, 0.0),
    ("/v1/embeddings", Unit.NONE, 0.0),
    ("/v1/moderations", Unit.NONE, 0.0),
    ("/v1/images/generations", Unit.IMAGES, 2.0),
    ("/v1/audio/speech", Unit.CHARACTERS, 31.0),
    ("/v1/audio/transcriptions", Unit.SECONDS, 2.25),
    ("/v1/score", Unit.PAIRS, 3.0),
)
PRICE = Price(input=150_000_000, cached_input=75_000_000, output=600_000_000, unit=100_000_000_000)


@pytest.fixture
async def rows(api: Management, manager: Identity) -> list[UsageRow]:
    """Forty days of two tenants, three keys, every kind of usage."""
    chance = random.Random(4)
    platform, _ = await api.key(PLATFORM, Scope.INFERENCE)
    second, _ = await api.key(manager.tenant_id, Scope.INFERENCE)
    records: list[JournalRecord] = []
    for number in range(320):
        who = chance.choice([platform, manager, second])
        route, unit, units = USED[number % len(USED)]
        prompt = 0 if unit in (Unit.IMAGES, Unit.CHARACTERS, Unit.SECONDS) else chance.randrange(1, 500)
        completion = chance.randrange(1, 300) if "completions" in route else 0
        at = NOON - 40 * DAY + chance.random() * 40 * DAY
        batch = chance.choice(["", f"batch_7/{number}"])
        records.append(
            Intent(
                f"r{number:03}", at, who.tenant_id, who.key_id, "ep-1", chance.choice(["smol", "=big"]), "ver-1", route,
                False, 1, 1, PRICE, batch_line=batch,
            )
        )  # fmt: skip
        records.append(
            Settle(
                f"r{number:03}", at + 1, prompt, prompt // 3, completion, UsageStatus.SUCCESS, 200, "", None, 5.0,
                "rep", 1, False, units, unit, reasoning_tokens=completion // 2, audio_input_tokens=prompt // 5,
                audio_output_tokens=completion // 7,
            )
        )  # fmt: skip
    await api.context.usage.apply(records, JournalPosition("gateway-0", "1.journal", 1))
    api.clock.elapsed_s = NOON + DAY - api.clock.start_s
    return await api.context.usage.rows_between(UsageFilter(), since=0, until=1e12, after=None, limit=1000)


def sdk(api: Management, identity: Identity) -> openai.AsyncOpenAI:
    client: Any = api.client(identity)
    return openai.AsyncOpenAI(
        api_key="k", admin_api_key="k", base_url="http://127.0.0.1:8484/v1", http_client=client, max_retries=0
    )


@pytest.fixture
async def client(api: Management, admin: Identity) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk(api, admin) as client:
        yield client


async def buckets_of(ask: Any, **asked: Any) -> list[Any]:
    """Return the buckets of all pages."""
    found: list[Any] = []
    page = await ask(**EVER | asked)
    while True:
        found += page.data
        assert page.has_more == (page.next_page is not None)
        if not page.has_more:
            return found
        page = await ask(**EVER | asked, page=page.next_page)


@pytest.mark.parametrize("width", ["1h", "1d"])
async def test_the_sdk_reads_completions_that_are_those_of_the_ledger(
    client: openai.AsyncOpenAI, rows: list[UsageRow], width: Any
) -> None:
    groups: list[Any] = ["project_id", "api_key_id", "model", "batch"]
    asked = client.admin.organization.usage.completions
    buckets = await buckets_of(asked, bucket_width=width, group_by=groups, limit=24)
    expected: Counter[Any] = Counter()
    step = HOUR if width == "1h" else DAY
    for row in rows:
        if row.route not in ("/v1/chat/completions", "/v1/completions"):
            continue
        start = max(int(row.created_at // step * step), EVER["start_time"])
        group = (start, row.tenant_id, row.key_id, row.model, bool(row.batch_id))
        expected[group, "requests"] += 1
        expected[group, "input"] += row.prompt_tokens
        expected[group, "cached"] += row.cached_tokens
        expected[group, "output"] += row.completion_tokens
        expected[group, "audio in"] += row.audio_input_tokens
        expected[group, "audio out"] += row.audio_output_tokens
        expected[group, "thought"] += row.reasoning_tokens
    found: Counter[Any] = Counter()
    for bucket in buckets:
        for result in bucket.results:
            assert result.object == "organization.usage.completions.result"
            group = (bucket.start_time, result.project_id, result.api_key_id, result.model, result.batch)
            found[group, "requests"] += result.num_model_requests
            found[group, "input"] += result.input_tokens
            found[group, "cached"] += result.input_cached_tokens
            found[group, "output"] += result.output_tokens
            found[group, "audio in"] += result.input_audio_tokens
            found[group, "audio out"] += result.output_audio_tokens
            found[group, "thought"] += result.output_reasoning_tokens
            assert result.input_uncached_tokens == result.input_tokens - result.input_cached_tokens
    assert +found == +expected
    edges = [(bucket.start_time, bucket.end_time) for bucket in buckets]
    assert (edges[0][0], edges[-1][1]) == (EVER["start_time"], EVER["end_time"])
    assert all(before[1] == after[0] and after[0] % step == 0 for before, after in pairwise(edges))


async def test_every_other_kind_of_usage_is_read_too(client: openai.AsyncOpenAI, rows: list[UsageRow]) -> None:
    usage, week = client.admin.organization.usage, {"limit": 31}

    async def total(ask: Any, field: str, **asked: Any) -> int:
        return sum(getattr(result, field) for one in await buckets_of(ask, **week, **asked) for result in one.results)

    def expected(route: str, value: Any) -> int:
        return sum(value(row) for row in rows if row.route == route)

    for ask, route, field, value in (
        (usage.embeddings, "/v1/embeddings", "input_tokens", lambda row: row.prompt_tokens),
        (usage.moderations, "/v1/moderations", "input_tokens", lambda row: row.prompt_tokens),
        (usage.images, "/v1/images/generations", "images", lambda row: row.units),
        (usage.audio_speeches, "/v1/audio/speech", "characters", lambda row: row.units),
    ):
        assert await total(ask, field) == expected(route, value)
        assert await total(ask, "num_model_requests") == expected(route, lambda row: 1)
        of_model = [row for row in rows if row.route == route and row.model == "smol"]
        assert await total(ask, "num_model_requests", models=["smol"]) == len(of_model)
    seconds = [bucket for bucket in await buckets_of(usage.audio_transcriptions, **week) if bucket.results]
    for bucket in seconds:
        inside = [
            row for row in rows if "transcr" in row.route and bucket.start_time <= row.created_at < bucket.end_time
        ]
        assert bucket.results[0].seconds == round(sum(row.units for row in inside))


async def test_costs_are_those_of_all_rows_to_the_nano_dollar(
    client: openai.AsyncOpenAI, rows: list[UsageRow], manager: Identity
) -> None:
    costs = client.admin.organization.usage.costs
    [whole] = [await buckets_of(costs, limit=180)]
    assert sum(result.cost_nanousd for bucket in whole for result in bucket.results) == sum(
        r.cost_nanousd for r in rows
    )
    groups = ["project_id", "line_item", "api_key_id"]
    by_item = await buckets_of(costs, limit=5, group_by=groups, project_ids=[manager.tenant_id])
    found: Counter[Any] = Counter()
    for bucket in by_item:
        for result in bucket.results:
            assert result.amount.currency == "usd"
            assert result.amount.value == pytest.approx(result.cost_nanousd / 1e9, abs=1e-9)
            found[bucket.start_time, result.project_id, result.api_key_id, result.line_item] += result.cost_nanousd
    expected: Counter[Any] = Counter()
    for row in rows:
        if row.tenant_id == manager.tenant_id:
            start = max(int(row.created_at // DAY * DAY), EVER["start_time"])
            expected[start, row.tenant_id, row.key_id, row.model] += row.cost_nanousd
    assert found == expected


async def test_an_amount_that_one_unit_says_has_it(api: Management, admin: Identity, rows: list[UsageRow]) -> None:
    async def quantities(**asked: object) -> set[object]:
        query = "&".join(f"{name}={value}" for name, value in {**EVER, "limit": 180, **asked}.items())
        page = (await api.call(admin, "GET", f"/v1/organization/costs?{query}")).json()
        return {result["quantity_unit"] for bucket in page["data"] for result in bucket["results"]}

    assert await quantities() == {None}
    speech = next(row for row in rows if row.unit is Unit.CHARACTERS)
    alone = {"start_time": int(speech.created_at), "end_time": int(speech.created_at) + 1, "group_by[]": "line_item"}
    assert await quantities(**alone) == {"characters"}


async def test_minutes_are_of_kept_rows(client: openai.AsyncOpenAI, rows: list[UsageRow], api: Management) -> None:
    last = rows[-1]
    start = int(last.created_at) // 60 * 60
    page = await client.admin.organization.usage.costs(start_time=start, end_time=start + 60, bucket_width="1m")  # type: ignore[arg-type]  # OpenAI has days alone
    assert [bucket.results[0].cost_nanousd for bucket in page.data] == [  # type: ignore[union-attr]
        sum(row.cost_nanousd for row in rows if start <= row.created_at < start + 60)
    ]
    await api.context.usage.forget_rows(before=start // HOUR * HOUR + HOUR, limit=10_000)
    with pytest.raises(openai.BadRequestError, match="use bucket_width 1h"):
        await client.admin.organization.usage.completions(start_time=start, end_time=start + 60, bucket_width="1m")


async def test_everybody_gets_what_is_theirs(api: Management, rows: list[UsageRow], manager: Identity) -> None:
    async def cost(identity: Identity, **asked: Any) -> int:
        async with sdk(api, identity) as client:
            buckets = await buckets_of(client.admin.organization.usage.costs, limit=180, **asked)
            return sum(result.cost_nanousd for bucket in buckets for result in bucket.results)

    mine = [row for row in rows if row.tenant_id == manager.tenant_id]
    assert await cost(manager) == sum(row.cost_nanousd for row in mine)
    key_id = next(row.key_id for row in mine if row.key_id != manager.key_id)
    user = Identity(key_id, manager.tenant_id, (Scope.INFERENCE,))
    own = sum(row.cost_nanousd for row in mine if row.key_id == key_id)
    assert await cost(user) == await cost(manager, api_key_ids=[key_id]) == own
    for identity, asked in (
        (manager, {"project_ids": [PLATFORM]}),
        (user, {"api_key_ids": [manager.key_id]}),
        (manager, {"api_key_ids": ["nosuchkey"]}),
    ):
        with pytest.raises(openai.NotFoundError):
            await cost(identity, **asked)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=5&end_time=4", "start_time"),
        ("start_time=5&bucket_width=2d", "bucket_width"),
        ("start_time=5&limit=32", "limit"),
        ("start_time=5&bucket_width=1h&limit=169", "limit"),
        ("start_time=5&group_by=colour", "group_by"),
        ("start_time=5&group_by[]=service_tier", "group_by"),
        ("start_time=5&user_ids[]=user-1", "user_ids"),
        ("start_time=5&page=page_7", "page"),
        ("start_time=5&page=page_99999999999999", "page"),
        ("start_time=5&page=next", "page"),
        ("start_time=5&limit=1&limit=1", "limit"),
    ],
)
async def test_bad_questions_are_refused_by_parameter(api: Management, admin: Identity, query: str, param: str) -> None:
    answer = await api.call(admin, "GET", f"/v1/organization/usage/completions?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_groups_come_once_or_many_times_or_with_commas(api: Management, admin: Identity, rows: object) -> None:
    start = f"start_time={EVER['start_time']}&limit=31"
    answers = [
        (await api.call(admin, "GET", f"/v1/organization/usage/embeddings?{start}&{groups}")).json()["data"]
        for groups in (
            "group_by=model&group_by=project_id", "group_by[]=model&group_by[]=project_ids",
            "group_by=model,project_id",
            "group_by%5B%5D=models&group_by=project_id",
        )
    ]  # fmt: skip
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert any(result["model"] and result["project_id"] for bucket in answers[0] for result in bucket["results"])


# --- exports ---


async def exported(api: Management, identity: Identity, query: str) -> bytes:
    answer = await api.call(identity, "GET", f"/v1/usage/export?since=0&{query}")
    assert answer.status_code == 200, answer.text
    assert "attachment" in answer.headers["content-disposition"]
    return answer.content


def read(format: str, content: bytes) -> list[dict[str, Any]]:
    match format:
        case "csv":
            return list(csv.DictReader(io.StringIO(content.decode(), newline="")))
        case "json":
            return list(json.loads(content))
        case "jsonl":
            return [json.loads(line) for line in content.splitlines()]
        case _:
            return list(pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist())


COUNTS = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "audio_input_tokens",
    "audio_output_tokens", "cost_nanousd",
)  # fmt: skip


@pytest.mark.parametrize("format", ["csv", "json", "jsonl", "parquet"])
async def test_export_and_api_and_ledger_are_equal_to_the_token_and_nano_dollar(
    api: Management, admin: Identity, rows: list[UsageRow], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.control.api.usage_export.PAGE_ROWS", 7)
    found = read(format, await exported(api, admin, f"format={format}"))
    assert [row["request_id"] for row in found] == [row.request_id for row in rows], "each row once, oldest first"
    for line, row in zip(found, rows, strict=True):
        for name in (*COUNTS, "http_status", "attempts"):
            assert int(line[name]) == getattr(row, name)
        assert float(line["created_at"]) == row.created_at
        assert float(line["units"]) == row.units
        assert line["unit"] == row.unit.value
        assert line["model"].lstrip("'") == row.model
        assert (line["batch_id"], line["tenant_id"], line["status"]) == (row.batch_id, row.tenant_id, "success")
    sums = read(
        format, await exported(api, admin, f"of=sums&group_by=day,tenant,model&tz=Asia/Kolkata&format={format}")
    )
    report = (await api.call(admin, "GET", "/v1/usage?since=0&group_by=day,tenant,model&tz=Asia/Kolkata")).json()
    assert len(sums) == len(report["data"]) > 50
    for line, entry in zip(sums, report["data"], strict=True):
        assert (line["day"], line["tenant"], line["model"].lstrip("'")) == (
            entry["day"],
            entry["tenant"],
            entry["model"],
        )
        for name in ("requests", *COUNTS):
            assert int(line[name]) == entry[name]
        assert line["cost_usd"] == entry["cost_usd"]
        for unit in ("seconds", "images", "characters", "pairs"):
            assert float(line[f"units_{unit}"]) == entry["units"].get(unit, 0.0)
    for name in COUNTS:
        total = sum(getattr(row, name) for row in rows)
        assert sum(int(line[name]) for line in found) == sum(int(line[name]) for line in sums) == total
        assert report["total"][name] == total
    assert sum(int(line["requests"]) for line in sums) == len(rows) == report["total"]["requests"]


@pytest.mark.parametrize("format", ["csv", "json", "jsonl", "parquet"])
async def test_an_export_of_nothing_is_a_whole_file(api: Management, admin: Identity, format: str) -> None:
    assert read(format, await exported(api, admin, f"format={format}&until=5")) == []
    assert read(format, await exported(api, admin, f"format={format}&until=5&of=sums&group_by=day")) == []


async def test_exports_have_what_their_caller_may_see(api: Management, manager: Identity, rows: list[UsageRow]) -> None:
    found = read("jsonl", await exported(api, manager, "format=jsonl"))
    mine = [row for row in rows if row.tenant_id == manager.tenant_id]
    assert [line["request_id"] for line in found] == [row.request_id for row in mine]
    user = Identity(
        next(row.key_id for row in mine if row.key_id != manager.key_id), manager.tenant_id, (Scope.INFERENCE,)
    )
    assert (await api.call(user, "GET", "/v1/usage/export?since=0")).status_code == 403
    [own] = read("json", await exported(api, user, "of=sums&format=json"))
    assert own["requests"] == sum(row.key_id == user.key_id for row in mine)
    assert (await api.call(manager, "GET", f"/v1/usage/export?tenant={PLATFORM}")).status_code == 404


async def test_rows_that_are_gone_are_not_left_out_in_silence(
    api: Management, manager: Identity, rows: list[UsageRow]
) -> None:
    cut = int(rows[100].created_at // HOUR * HOUR)
    before = (await api.call(manager, "GET", "/v1/usage?since=0")).json()["total"]
    await api.context.usage.forget_rows(before=cut, limit=10_000)
    refused = await api.call(manager, "GET", "/v1/usage/export?since=0")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")
    assert "of=sums" in refused.json()["error"]["message"]
    report = (await api.call(manager, "GET", f"/v1/usage?since=1234567&until={cut - 600}")).json()
    assert (report["rows_since"], report["since"], report["until"]) == (cut, 1234567 // HOUR * HOUR, cut - HOUR)
    assert (await api.call(manager, "GET", "/v1/usage?since=0")).json()["total"] == before
    minutes = await api.call(manager, "GET", "/v1/usage?since=0&group_by=minute")
    assert (minutes.status_code, minutes.json()["error"]["param"]) == (400, "since")


async def test_dates_and_days_are_those_of_the_zone(api: Management, admin: Identity) -> None:
    at = datetime(2026, 11, 20, 18, 45, tzinfo=UTC).timestamp()  # 0:15 of the 21st in India
    intent, settle = a_request(1, at, random.Random(1))
    await api.context.usage.apply([intent, settle], JournalPosition("gateway-0", "1.journal", 1))

    async def found(query: str) -> tuple[int, list[str]]:
        answer = await api.call(admin, "GET", f"/v1/usage?group_by=day&{query}")
        report = answer.json()
        assert answer.status_code == 200, answer.text
        return report["total"]["requests"], [entry["day"] for entry in report["data"]]

    assert await found("since=2026-11-20&until=2026-11-21") == (1, ["2026-11-20"])
    assert await found("since=2026-11-20&until=2026-11-21&tz=Asia/Kolkata") == (0, [])
    assert await found("since=2026-11-21&until=2026-11-22&tz=Asia/Kolkata") == (1, ["2026-11-21"])
    assert await found("since=2026-11-20&until=2026-11-21&tz=America/St_Johns") == (1, ["2026-11-20"])
    for tz in ("Mars/Phobos", "../../etc/passwd", "", "Asia", "x" * 99):
        answer = await api.call(admin, "GET", f"/v1/usage?tz={tz}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tz"), tz


async def test_an_export_that_the_sweep_of_old_rows_overtakes_is_cut_off(
    api: Management, admin: Identity, rows: list[UsageRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a ledger must not be taken for a whole one."""
    monkeypatch.setattr("modelyard.control.api.usage_export.PAGE_ROWS", 7)
    real, cut = SqlUsageStore.rows_between, int(rows[100].created_at // HOUR * HOUR)

    async def swept(store: SqlUsageStore, *given: Any, **asked: Any) -> list[UsageRow]:
        found = await real(store, *given, **asked)
        if asked["after"] is None:
            await store.forget_rows(before=cut, limit=1000)
        return found

    monkeypatch.setattr(SqlUsageStore, "rows_between", swept)
    with pytest.raises(RowsGoneError):
        await exported(api, admin, "format=csv")
    monkeypatch.undo()
    answer = await api.call(admin, "GET", f"/v1/usage/export?format=jsonl&since={cut}")
    found = read("jsonl", answer.content)
    assert len(found) == sum(row.created_at >= cut for row in rows)


async def test_costs_are_in_the_currency_of_the_installation(tmp_path: Path) -> None:
    async with management(tmp_path, Config(billing=BillingConfig(currency="EUR"))) as api:
        admin, _ = await api.key(PLATFORM, Scope.ADMIN)
        at = api.clock.unix_s() - 100
        await api.context.usage.apply(a_request(1, at, random.Random(1)), JournalPosition("g", "1.journal", 1))
        answer = (await api.call(admin, "GET", f"/v1/organization/costs?start_time={int(at) - DAY}")).json()
        amounts = [result["amount"] for bucket in answer["data"] for result in bucket["results"]]
        assert [amount["currency"] for amount in amounts] == ["eur"]
