"""``modelyard usage`` and ``modelyard reconcile``: how they ask, and what they show."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from modelyard.cli.http import Platform
from modelyard.cli.main import main
from modelyard.cli.nouns import WHEN
from modelyard.clock import SystemClock


def test_usage_by_version_shows_names_and_keeps_ids_in_csv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 1)
    sums |= dict.fromkeys(("reasoning_tokens", "audio_input_tokens", "audio_output_tokens", "cost_nanousd"), 0)
    known = {"version": "ver-1", "version_name": "smol@v3", "model": "smol", "units": {}, **sums}
    unknown = {"version": "ver-2", "model": "smol", "units": {}, **sums}
    report = {"data": [known, unknown], "total": {"units": {}, **sums}, "since": 0, "data_up_to": 2**40}
    report["currency"] = "USD"
    monkeypatch.setattr(Platform, "get", lambda _self, _path, **_: report)
    line = ["usage", "--by", "model,version", "--url", "http://x", "--key", "k"]
    assert main(line) == 0
    shown = [text.split()[:2] for text in capsys.readouterr().out.splitlines()[1:3]]
    assert shown == [["smol", "smol@v3"], ["smol", "ver-2"]]
    assert main([*line, "--csv"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.startswith("model,version,requests")
    assert head.endswith(",version_name")
    assert first.startswith("smol,ver-1,")
    assert first.endswith(",smol@v3")
    assert second.endswith(",")


@pytest.mark.parametrize(
    ("text", "at"),
    [("2026-11-01", 1793491200), ("2026-11-01T09:30+01:00", 1793521800), ("2026-11-01T09:30Z", 1793525400)],
)
def test_a_moment_may_be_a_date_of_utc(text: str, at: int) -> None:
    assert WHEN.convert(text, None, None) == at
    assert WHEN.convert("2h", None, None) == pytest.approx(SystemClock.unix_s() - 7200, abs=60)


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01", "", "30x", "-5", "nan"])
def test_what_is_no_moment_is_said(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 2h or 30d"):
        WHEN.convert(text, None, None)


def test_reconcile_takes_the_dates_of_an_invoice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    result = {"balances": True, "since": 1793491200, "until": 1796083200, "checks": []}

    @contextlib.contextmanager
    def lines(_self: Platform, _method: str, _path: str, body: dict[str, Any]) -> Iterator[list[str]]:
        asked.append(body)
        yield ["data: " + json.dumps({"type": "result", "result": result})]

    monkeypatch.setattr(Platform, "lines", lines)
    line = ["reconcile", "--since", "2026-11-01", "--until", "2026-12-01", "--url", "http://x", "--key", "k"]
    assert main(line) == 0
    assert (asked[0]["since"], asked[0]["until"]) == (1793491200, 1796083200)
    assert "The books balance, 2026-11-01" in capsys.readouterr().out
    assert main(["reconcile", "--since", "monday", "--url", "http://x", "--key", "k"]) == 2


SUMS = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 1) | dict.fromkeys(
    ("reasoning_tokens", "audio_input_tokens", "audio_output_tokens"), 0
)
AT = ["--url", "http://x", "--key", "k"]


class Asked:
    """A platform that answers one report, and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]) -> None:
        self.query: dict[str, Any] = {}

        def get(_self: Platform, _path: str, **query: Any) -> dict[str, Any]:
            self.query = {name: value for name, value in query.items() if value is not None}
            return report

        monkeypatch.setattr(Platform, "get", get)


def test_usage_takes_the_filters_of_the_api_and_shows_names_and_the_currency(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = {**SUMS, "cost_nanousd": 250_000_000, "units": {}}
    rows = [{"tenant": "ten-1", "tenant_name": "acme", **sums}, {"tenant": "ten-gone", **sums}]
    report = {"data": rows, "total": sums, "since": 0, "data_up_to": 2**40, "currency": "EUR"}
    asked = Asked(monkeypatch, report)
    line = ["usage", "--by", "tenant", "--tenant", "acme", "--endpoint", "chat", "--batch", *AT]
    assert main(line) == 0
    assert {name: asked.query[name] for name in ("tenant", "endpoint", "batch")} == {
        "tenant": "acme",
        "endpoint": "chat",
        "batch": "true",
    }
    head, first, second, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["TENANT", "NAME", "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "COST"]
    assert first.split() == ["ten-1", "acme", "1", "1", "1", "1", "0.25", "EUR"]
    assert second.split()[:2] == ["ten-gone", "-"]
    assert total.split()[-2:] == ["0.25", "EUR"]
    assert main(["usage", "--by", "tenant", "--csv", "--no-batch", *AT]) == 0
    assert asked.query["batch"] == "false"
    head, first, _ = capsys.readouterr().out.splitlines()
    assert head.endswith(",tenant_name")
    assert first.endswith(",acme")
    assert main(["usage", *AT]) == 0
    assert not {"tenant", "endpoint", "batch"} & asked.query.keys()


def test_costs_take_dates_and_show_names_and_the_currency(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    customer = {"tenant_id": "ten-1", "tenant_name": "acme", "model": "chat", "accelerator_hours": 1.0, "tokens": 9}
    amounts = {"cost_nanousd": 10**9, "revenue_nanousd": 5 * 10**8, "margin_nanousd": -5 * 10**8}
    totals = {"cost_usd": "1", "revenue_usd": "0.5", "margin_usd": "-0.5", "waste_usd": "0"}
    report = {
        "customers": [{**customer, **amounts, "nanousd_per_million_tokens": None}],
        "accelerator_hours": 1.0,
        "utilisation": 0.5,
        "currency": "EUR",
        **totals,
    }
    asked = Asked(monkeypatch, report)
    assert main(["costs", "--by", "customer", "--since", "2026-11-01", "--until", "2026-12-01", *AT]) == 0
    assert asked.query == {"since": "1793491200", "until": "1796083200"}
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split()[:3] == ["ten-1", "acme", "chat"]
    assert "1.00 EUR" in shown.out
    assert "cost 1.00 EUR, revenue 0.50 EUR, margin -0.50 EUR, waste 0.00 EUR." in shown.err
    assert "$" not in shown.out + shown.err
    assert main(["costs", "--by", "customer", *AT]) == 0
    assert "until" not in asked.query
    assert main(["costs", "--since", "monday", *AT]) == 2


@pytest.mark.parametrize(
    ("name", "more", "asked"),
    [
        ("rows.csv", [], "csv"),
        ("rows.JSONL", [], "jsonl"),
        ("rows", [], "csv"),
        ("rows.xlsx", ["--format", "csv"], "csv"),
        ("rows.xlsx", [], None),
        ("rows.csv.gz", [], None),
    ],
)
def test_an_export_is_what_its_name_says_or_refused(
    name: str,
    more: list[str],
    asked: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    formats: list[str] = []

    @contextlib.contextmanager
    def pieces(_self: Platform, _path: str, **query: Any) -> Iterator[Iterator[bytes]]:
        formats.append(query["format"])
        yield iter([b"x"])

    monkeypatch.setattr(Platform, "pieces", pieces)
    code = main(["usage", "export", "-o", str(tmp_path / name), *more, *AT])
    assert (code, formats) == ((0, [asked]) if asked else (2, []))
    assert (tmp_path / name).exists() is (asked is not None)
    if not asked:
        assert ".csv, .json, .jsonl, .parquet" in capsys.readouterr().err
