"""Arrivals are read from what people have, a replay is one table, and what is wrong is one line."""

import json
from pathlib import Path

import click
import msgspec
import pytest

from modelyard.cli.autoscale import Setting, size_text, tier_text
from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import Platform
from modelyard.cli.main import main
from modelyard.cli.traces import read_arrivals
from modelyard.domain.endpoints import Autoscale
from modelyard.policy.backtest import backtest

WEEK_S = 7 * 86_400


@pytest.mark.parametrize(
    ("text", "moments"),
    [
        ("5\n\n2.5\n", [2.5, 5.0]),
        ('{"timestamp": 1500, "input_length": 7}\n{"timestamp": 500}\n', [0.5, 1.5]),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6805900,374\n1970-01-01 00:00:07,1\n", [7.0, 1700158546.68059]),
        ("id,created_at\na,12\nb,10\n", [10.0, 12.0]),
        ("2026-11-30T00:00:00+01:00\n", [1795993200.0]),
    ],
)
def test_arrivals_are_read_from_numbers_json_lines_and_csv(tmp_path: Path, text: str, moments: list[float]) -> None:
    file = tmp_path / "arrivals"
    file.write_text(text)
    assert read_arrivals(file) == pytest.approx(moments)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no arrivals"),
        ("1\nsoon\n", "line 2: 'soon' has no time"),
        ('{"when": 5}\n', "line 1"),
        ("timestamp,x\n,\n", "line 2"),
        ("nan\n", "not a finite number"),
        ("\udcff", "Cannot read"),
    ],
)
def test_a_file_without_times_is_refused_with_the_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "arrivals"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(Failure, match=why) as refused:
        read_arrivals(file)
    assert refused.value.exit_code is Exit.USAGE


def test_a_replay_of_a_file_needs_no_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "arrivals"
    file.write_text("\n".join(str(day * 86_400 + 32_400) for day in range(21)))
    assert main(["forecast", "backtest", "--trace", str(file)]) == 0
    shown = capsys.readouterr()
    assert "by idle time alone" in shown.out
    assert "13 requests in 13.0 days, after 7 to learn from" in shown.err or "14 requests" in shown.err
    assert main(["forecast", "backtest", "--trace", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["forecast"]["cold_starts"] < result["fixed"]["cold_starts"]


def test_a_file_is_replayed_at_its_exact_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "arrivals"
    file.write_text("\n".join(str(1_796_000_000 + at / 2) for at in range(100)))
    assert main(["forecast", "backtest", "--trace", str(file), "--load", "5s", "--idle", "5s"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split() == ["by", "idle", "time", "alone", "1", "0.02"]
    assert "An estimate" not in shown.err


@pytest.mark.parametrize(("idle_s", "is_estimate"), [(5.0, True), (600.0, False)])
def test_counts_by_ten_minutes_are_no_measure_of_shorter_idle_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], idle_s: float, is_estimate: bool
) -> None:
    result = msgspec.to_builtins(backtest({0: 100}, Autoscale(), idle_s=idle_s, load_s=5))
    monkeypatch.setattr(Platform, "get", lambda *_, **__: {"result": result, "idle_s": idle_s})
    assert main(["forecast", "backtest", "demo", "--url", "http://127.0.0.1:1", "--key", "k"]) == 0
    assert ("An estimate: requests are counted by ten minutes" in capsys.readouterr().err) is is_estimate


def test_a_replay_of_nothing_or_of_centuries_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "backtest"]) == Exit.USAGE
    file = tmp_path / "arrivals"
    file.write_text(f"0\n{500 * WEEK_S}\n")
    assert main(["forecast", "backtest", "--trace", str(file)]) == Exit.USAGE
    assert "more than 400 days" in capsys.readouterr().err


def test_settings_are_numbers_words_and_texts() -> None:
    read = Setting()
    given = ("up_queue=5", "up_kv=92.5", "prewarm=false", "target_latency_s=null", "burst_pool=7", "idle=learned")
    values = [read.convert(text, None, None)[1] for text in given]
    assert values == [5, 92.5, False, None, "7", "learned"]
    for bad in ("up_queue", "up_queue=many", "=5"):
        with pytest.raises(click.BadParameter):
            read.convert(bad, None, None)


def test_a_size_is_told_with_what_it_was_made_from() -> None:
    seen = {"ready": 2, "utilization": 0.5, "kv_use": 0.25, "tokens_s": 80.4}
    endpoint = {
        "size": {"replicas": 2, "reason": "it fits", "seen": seen},
        "tier": {"tier": "hot", "reason": "1 ready"},
    }
    assert size_text(endpoint) == "2: it fits; busy 50 %; KV 25 %; 80 tokens/s"
    assert tier_text(endpoint) == "hot: 1 ready"
    assert size_text({"size": None}) is None
    assert tier_text({}) is None
