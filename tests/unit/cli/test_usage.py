"""``modelyard usage`` and ``modelyard reconcile``: how they ask, and what they show."""

import contextlib
import json
from collections.abc import Iterator
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
