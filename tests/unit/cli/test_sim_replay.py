"""What ``modelyard sim --replay`` finds in a database: worlds with their guests, settings, speeds and times."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from modelyard.cli.main import main
from modelyard.domain.books import ReplicaHour, ReplicaLife
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Endpoint, Release, Scaling
from modelyard.domain.tenants import Tenant
from modelyard.domain.usage import Intent, Price, Settle, UsageStatus
from modelyard.metering.booking import booked
from modelyard.metering.export import ROWS, Format, encoder_of, values_of_row
from modelyard.policy.engine_model import EngineModel, Sample, encode, learn
from modelyard.stores import JournalPosition
from modelyard.stores.sql import SqlBookStore, SqlControlStore, SqlUsageStore, open_database

T0 = 1_796_000_400.0
"""A full hour."""
FROM = ("--from", "2026-11-30T01:00", "--to", "2026-11-30T03:00")


def version(id: str, framework: str = "simulated", **options: Any) -> ModelVersion:
    return ModelVersion(id, "ten-1", id.removeprefix("ver-"), "v1", framework, Artifact(""), options, 1)


def endpoint(name: str, **more: Any) -> Endpoint:
    return Endpoint(f"ep-{name}", "ten-1", name, (Release(f"ver-{name}"),), Scaling(1, 2), 1, **more)


def requests(name: str, moments: Iterable[float], *, prompt: int = 200) -> list[Intent | Settle]:
    found: list[Intent | Settle] = []
    for number, at in enumerate(moments):
        id = f"req-{name}-{number:04d}"
        found.append(
            Intent(
                id, T0 + at, "ten-1", "key-1", f"ep-{name}", name, f"ver-{name}", "/v1/chat/completions", True, prompt,
                0, Price(1_000_000, 1_000_000, 1_000_000),
            )
        )  # fmt: skip
        end = (UsageStatus.SUCCESS, 200, "", 60.0, 660.0, f"rep-{name}", 1, False)
        found.append(Settle(id, T0 + at + 0.66, prompt, 0, 31, *end, version_id=f"ver-{name}"))
    return found


async def filled(folder: Path, fit: EngineModel | None) -> None:
    database = open_database(f"sqlite:///{folder / 'control.sqlite'}", timeout_s=5)
    control, usage, books = SqlControlStore(database), SqlUsageStore(database), SqlBookStore(database)
    await control.add_tenant(Tenant("ten-1", "acme", 1))
    await control.add_deployment(version("ver-chat", slots=4), endpoint("chat"))
    await control.add_deployment(version("ver-guest"), endpoint("guest", host_id="ep-chat"))
    await control.add_deployment(version("ver-far", "openai"), endpoint("far"))
    await control.add_deployment(version("ver-idle"), endpoint("idle"))
    await control.add_observed_load("ver-chat", 12.0)
    if fit is not None:
        await control.put_engine_fits({"ver-chat": encode(fit)}, at=1.0)
    rows = [*requests("chat", range(0, 7200, 60)), *requests("guest", range(30, 7200, 600)), *requests("far", [5, 6])]
    rows += requests("gone", [7.0])
    await usage.apply(rows, JournalPosition("gateway-0", "1", 1))
    life = ReplicaLife(
        "rep-chat", "ep-chat", "ten-1", "chat", "ver-chat", "l4", 0.5, 400_000_000, T0 - 90, T0 - 60, None, T0 + 7200
    )
    hour = ReplicaHour(int(T0), "rep-chat", "ep-chat", "ten-1", "chat", "l4", 3600, 3600, 360, 1800, 400_000_000)
    await books.put_lives([life], [hour])
    await control.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    asyncio.run(filled(tmp_path, None))
    return tmp_path


def replayed(capsys: pytest.CaptureFixture[str], data: Path, *line: str) -> list[dict[str, Any]]:
    assert main(["sim", "--replay", *FROM, "--data-dir", str(data), "--json", *line]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def figures(results: dict[str, Any], name: str) -> dict[str, float]:
    (found,) = [one["runs"][0]["figures"] for one in results["tried"] if one["name"] == name]
    return dict(found)


def test_a_host_is_one_world_with_its_guests(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    (results,) = replayed(capsys, data, "--endpoint", "guest")
    assert results["title"].startswith("replay of chat, 2026-11-30 01:00:00Z to")
    assert figures(results, "as is")["requests"] == figures(results, "recorded")["requests"] == 132
    assert "Guests on its replicas are replayed with it: guest." in results["notes"]


def test_a_replica_costs_in_the_replay_what_it_was_seen_to_cost(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    (results,) = replayed(capsys, data, "--endpoint", "chat", "--price", "l4=1.6", "--set", "load_s=3")
    for name in ("as is", "recorded"):
        assert figures(results, name)["replica_hours"] == pytest.approx(2.0)
        assert figures(results, name)["gpu_hours"] == pytest.approx(1.0)
        assert figures(results, name)["gpu_usd"] == pytest.approx(0.8)
    assert figures(results, "recorded")["busy"] == pytest.approx(0.1)
    assert figures(results, "changed")["gpu_usd"] == pytest.approx(1.6)


def test_where_nothing_is_known_of_replicas_their_cost_is_not_taken_for_nothing(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    with contextlib.closing(sqlite3.connect(data / "control.sqlite")) as database, database:
        database.execute("DELETE FROM replica_lives")
    (results,) = replayed(capsys, data, "--endpoint", "chat")
    assert "Nothing is known of its replicas in this time: what they cost is not told." in results["notes"]
    assert "replica_hours" not in figures(results, "recorded")
    assert 2 <= figures(results, "as is")["replica_hours"] < 2.5


def test_what_no_engine_of_ours_served_is_left_out_and_said(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    assert main(["sim", "--replay", *FROM, "--data-dir", str(data), "--json"]) == 0
    said = capsys.readouterr()
    assert [one["title"].split(",")[0] for one in json.loads(said.out)] == ["replay of chat"]
    assert "Left out: far has no engine of ours to simulate" in said.err
    assert "Left out: gone was removed, and its settings with it" in said.err
    prices = replayed(capsys, data, "--token-price", "input=2")
    names = ["replay of chat", "replay of far", "replay of gone", "3 endpoints together"]
    assert [one["title"].split(",")[0] for one in prices] == names
    assert figures(prices[1], "changed")["revenue_usd"] == pytest.approx(2 * 2 * 200 / 1e6)
    assert figures(prices[3], "recorded")["requests"] == 135
    assert figures(prices[3], "changed")["revenue_usd"] == pytest.approx(135 * 2 * 200 / 1e6)


def test_a_sample_is_a_part_of_each_hour(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    (results,) = replayed(capsys, data, "--endpoint", "chat", "--sample", "20%")
    assert results["title"].endswith("0.4 hours of it")
    assert figures(results, "as is")["requests"] == 12 + 2 + 12 + 1  # two and one are of its guest
    assert figures(results, "recorded")["replica_hours"] == pytest.approx(0.4)


def fit(step_s: float) -> EngineModel:
    model = EngineModel()
    for number in range(40):
        batch, read = 1.0 + number % 4, 50.0 * (number % 3)
        model = learn(model, Sample(step_s + 2e-4 * read, batch, read, 100.0 * batch))
    return model


def test_what_the_controller_measured_comes_first_where_the_ledger_bears_it_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for step_s, why in ((0.02, "as the controller measured it while it ran, within"), (0.2, "What the controller")):
        folder = tmp_path / str(step_s)
        folder.mkdir()
        asyncio.run(filled(folder, fit(step_s)))
        (results,) = replayed(capsys, folder, "--endpoint", "chat")
        (note,) = [note for note in results["notes"] if note.startswith("Speed of chat@v1")]
        assert why in note
        # 31 tokens in 660 ms, 60 ms of them to the first.
        assert figures(results, "as is")["latency_p50_s"] == pytest.approx(0.66, rel=0.1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (("--from", "2h", "--last", "1h"), "Give --from or --last, not both"),
        (("--from", "1h", "--to", "2h"), "The time to replay ends before it begins"),
        (("--sample", "200%"), "'200%' is no part; write --sample 10%"),
        (("--traffic", "lots"), "'lots' is no factor; write --traffic x2"),
        (("--set", "scaling.max_replicas"), "is no setting; write --set scaling.max_replicas=4"),
        (("--price", "l4=cheap"), "'cheap' is no amount"),
        (("--token-price", "chat:inputs=1"), "unknown field `inputs`"),
        (("--runs-on", "2 h100s!"), "is no hardware; write --runs-on h100"),
        (("--price", "l4=1", "--html", "x.html"), "there is nothing to draw"),
    ],
)
def test_what_is_written_wrong_is_said_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: tuple[str, ...], why: str
) -> None:
    assert main(["sim", "--replay", "--data-dir", str(tmp_path), *line]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert why in said.err


def test_a_setting_that_is_none_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    line = ["sim", "--replay", *FROM, "--data-dir", str(data), "--endpoint", "chat", "--set", "scaling.many=1"]
    assert main(line) == 2
    assert "This cannot be tried: there is no 'scaling.many'; scaling has min_replicas" in capsys.readouterr().err


def test_a_file_of_variants_with_a_name_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "try.toml"
    file.write_text("[variant.a]\nhardwear = 'h100'\n")
    assert main(["sim", "--replay", "--data-dir", str(tmp_path), "--variants", str(file)]) == 2
    assert "unknown field `hardwear`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "code", "why"),
    [
        (("--price", "h100=3"), 2, "The price of 'h100' would change nothing: replicas are on l4"),
        (("--price", "l4=3", "--hardware", "h100"), 2, "The price of 'l4' would change nothing: replicas are on h100"),
        (
            ("--token-price", "caht:input=1"),
            2,
            "The price of 'caht' is of no request; there are requests of chat, guest",
        ),
        (("--token-price", "chat@v9:input=1"), 2, "The price of 'chat@v9' is of no request"),
        (("--traffic", "x3", "--limit", "200"), 2, "With --traffic x3 these are more than 200 requests"),
        (("--set", "colour=red"), 2, "This cannot be tried: 'colour' cannot be set"),
        (("--hardware", "cpu"), 2, "This cannot be tried: what fits a 'cpu'"),
    ],
)
def test_what_would_change_nothing_or_too_much_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path, line: tuple[str, ...], code: int, why: str
) -> None:
    assert main(["sim", "--replay", *FROM, "--data-dir", str(data), "--endpoint", "chat", *line]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert why in said.err


def test_a_price_of_a_version_reaches_its_requests(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    (results,) = replayed(capsys, data, "--endpoint", "chat", "--token-price", "chat@v1:input=1,request=0.5")
    own = figures(results, "changed")["revenue_usd"] - 12 * (231 / 1e9)
    assert own == pytest.approx(120 * (200 / 1e6 + 0.5))


@pytest.mark.parametrize(
    ("line", "text", "why"),
    [
        (("--token-price", "chat:input=1", "--token-price", "chat:output=1"), "", "A model is priced twice"),
        (("--runs-on", "0xl4"), "", "'0xl4' is no hardware"),
        ((), '[variant."as is"]\ntraffic = 2', "A variant cannot be called 'as is'"),
        (("--traffic", "x2"), "[variant.changed]\ntraffic = 3", "A variant cannot be called 'changed'"),
        ((), f"variant = {'[' * 3000}", "nested too deeply"),
    ],
)
def test_what_is_ambiguous_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: tuple[str, ...], text: str, why: str
) -> None:
    given = [*line]
    if text:
        file = tmp_path / "try.toml"
        file.write_text(text)
        given += ["--variants", str(file)]
    assert main(["sim", "--replay", "--data-dir", str(tmp_path), *given]) == 2
    assert why in capsys.readouterr().err


def test_an_export_says_what_it_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = [values_of_row(booked(*pair)) for pair in batched_pairs(requests("chat", range(30)))]
    encoder = encoder_of(Format.CSV, ROWS)
    file = tmp_path / "rows.csv"
    file.write_bytes(b"".join((encoder.begin(), encoder.rows(values), encoder.end())))
    assert main(["sim", "--replay", "--usage", str(file), "--endpoint", "caht"]) == 3
    assert "is of 'caht'. Did you mean 'chat'?" in capsys.readouterr().err
    assert main(["sim", "--replay", "--usage", str(file), "--runs-on", "l4", "--price", "l4=1"]) == 2
    assert "it is not known what replicas held" in capsys.readouterr().err
    assert main(["sim", "--replay", "--usage", str(file), "--runs-on", "l4", "--json"]) == 0
    (results,) = json.loads(capsys.readouterr().out)
    assert figures(results, "as is")["requests"] == 30
    # Half of a minute's requests; the window has its beginning, and not its end.
    window = ("--from", "2026-11-30T01:00:00", "--to", "2026-11-30T01:00:28")
    assert main(["sim", "--replay", "--usage", str(file), *window, "--json"]) == 0
    assert figures(json.loads(capsys.readouterr().out)[0], "as is")["requests"] == 28
    assert main(["sim", "--replay", "--usage", str(file), *window, "--sample", "75%", "--json"]) == 0
    assert figures(json.loads(capsys.readouterr().out)[0], "as is")["requests"] == 21


def batched_pairs(records: list[Intent | Settle]) -> list[tuple[Intent, Settle]]:
    return list(zip(records[::2], records[1::2], strict=True))  # type: ignore[arg-type]


def test_progress_counts_the_runs_of_all_endpoints(
    capsys: pytest.CaptureFixture[str], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.cli.sim_output._QUIET_S", 0.0)
    monkeypatch.setattr("modelyard.cli.sim_output._PIPE_S", 0.0)
    with contextlib.closing(sqlite3.connect(data / "control.sqlite")) as database, database:
        copy = "SELECT * FROM inference_requests WHERE endpoint_id = 'ep-chat'"
        columns = [row[1] for row in database.execute("PRAGMA table_info(inference_requests)")]
        instead = {"request_id": "'x' || request_id", "endpoint_id": "'ep-idle'"}
        chosen = ", ".join(instead.get(name, name) for name in columns)
        database.execute(f"INSERT INTO inference_requests {copy.replace('*', chosen)}")
    assert main(["sim", "--replay", *FROM, "--data-dir", str(data), "--json"]) == 0
    said = capsys.readouterr().err
    assert "run 1 of 4: chat, as is" in said
    assert "run 2 of 4: idle, as is" in said
