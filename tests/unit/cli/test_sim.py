"""``modelyard sim``: variants side by side, as a table, JSON or pictures; what is wrong is one line with its place."""

import builtins
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from modelyard.cli import sim_output
from modelyard.cli.main import main
from modelyard.cli.sim import command
from modelyard.cli.sim_output import Progress, cells
from modelyard.sim import examples
from modelyard.sim.results import Figure, Ran, Results, Tried

SMALL = """title = "small"
[hardware]
gpu_type = "l40s"
[traffic]
rate = 2
minutes = 1
[[variant]]
name = "one"
[[variant]]
name = "two"
hardware.min_replicas = 2
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SMALL, "utf-8")
    return file


def test_variants_stand_side_by_side_with_differences_to_the_first(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", str(small)]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "Scenario  small"
    assert lines[2].split() == ["one", "two", "+/-"]
    cost = next(line for line in lines if line.startswith("Cost an hour, $"))
    assert cost.split()[-4:] == ["1.80", "3.60", "+100.0", "%"]
    assert shown.err == "", "a short run says nothing of its progress"


def test_seeds_give_a_mean_and_a_range(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", str(small), "--seeds", "3"]) == 0
    shown = capsys.readouterr().out
    assert "Seeds     1, 2, 3: mean, and from the least to the most" in shown
    requests = next(line for line in shown.splitlines() if line.startswith("Requests"))
    assert " to " in requests


def test_json_has_figures_and_what_happened_over_time(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", str(small), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [tried["name"] for tried in found["tried"]] == ["one", "two"]
    run = found["tried"][0]["runs"][0]
    assert run["seed"] == 1
    assert {figure["key"] for figure in found["figures"]} >= set(run["figures"]) - {"hit_rate"}
    assert len(run["series"]["hours"]) == len(run["series"]["replicas"]) > 10
    assert main(["sim", str(small), "--quiet"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert ["two", "replicas_mean", "2"] in lines


def test_a_page_and_pictures_are_written_and_load_nothing(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    page, folder = tmp_path / "out.html", tmp_path / "pictures"
    # What matplotlib and a page could take for something of their own.
    small.write_text(SMALL.replace('"two"', '"<two & \\"more\\">"').replace('"one"', '"_$x^$ 模型"'), "utf-8")
    assert main(["sim", str(small), "--html", str(page), "--pictures", str(folder)]) == 0
    assert "pictures are in" in capsys.readouterr().err
    names = {file.stem for file in folder.iterdir()}
    assert names == {"overview", "utilisation", "replicas", "waits", "cost", "traffic"}
    text = page.read_text("utf-8")
    assert text.count("<svg") == len(names) - 1
    assert "&lt;two &amp;" in text
    assert "<two" not in text
    assert "_$x^$ 模型</text>" in text
    assert "src=" not in text
    assert "Cost an hour, $" in text
    overview = (folder / "overview.svg").read_text("utf-8")
    assert len(overview) < 60_000
    again = tmp_path / "again"
    assert main(["sim", str(small), "--quiet", "--pictures", str(again)]) == 0
    assert (again / "overview.svg").read_text("utf-8") == overview, "the same run gives the same picture"


def test_pictures_without_matplotlib_are_refused_before_the_run(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Any = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["sim", str(small), "--html", "x.html"]) == 1
    assert capsys.readouterr().err == "Error: Pictures need matplotlib: pip install 'modelyard[sim]'.\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SMALL.replace("gpu_type", "gpu_typ"), "line 3, hardware.gpu_typ: this field does not exist here; did"),
        (SMALL.replace("min_replicas = 2", "min_replicas = 0"), "line 11, variant[1].hardware.min_replicas: 0 needs"),
        (SMALL + "[variant.traffic]\nrate = 0\n", "line 13, variant[1].traffic.rate:"),
        (SMALL.replace("rate = 2", "file = 'none.csv'"), "line 5, traffic.file: "),
        ("title = ", "is not valid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_its_place(
    small: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    small.write_text(text, "utf-8")
    assert main(["sim", str(small)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: {small}")
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["nothing.toml"], 3, "There is neither a file nor an example 'nothing.toml'."),
        (["canry"], 3, "Did you mean 'canary'?"),
        (["examples", "show", "canry"], 3, "Did you mean 'canary'?"),
        (["canary", "--seeds", "0"], 2, "0 is not in the range"),
        (["canary", "--html", "/nowhere/x.html"], 2, "there is no such folder"),
        (["/"], 3, "Is a directory"),
    ],
)
def test_what_cannot_be_run_says_so(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *arguments]) == code
    assert told in capsys.readouterr().err


def test_examples_are_listed_and_printed_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "examples"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["NAME", "SHOWS"]
    assert len(shown.splitlines()) == len(examples.names()) + 1 >= 9
    assert main(["sim", "examples", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == examples.names()
    assert main(["sim", "examples", "show", "canary"]) == 0
    assert capsys.readouterr().out == examples.text("canary")


def test_every_help_page_has_an_example() -> None:
    def pages(group: click.Command, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [path]
        if isinstance(group, click.Group):
            for name, one in group.commands.items():
                found += pages(one, (*path, name))
        return found

    for path in pages(command, ()):
        shown = CliRunner().invoke(command, [*path, "--help"])
        assert shown.exit_code == 0
        assert "Example:" in shown.output, path


def results(*values: dict[str, float]) -> Results:
    figures = (Figure("a", "A", "share", "more"), Figure("b", "B", "count"), Figure("c", "C", "s"))
    tried = [Tried(f"v{at}", (Ran(1, one, {}),)) for at, one in enumerate(values)]
    return Results("", "request", figures, tuple(tried))


def test_differences_are_points_of_shares_and_parts_of_all_else() -> None:
    headings, rows = cells(results({"a": 0.5, "b": 0.0, "c": 2.0}, {"a": 0.625, "c": 3.0}, {"a": 0.5, "c": 8.0}))
    assert headings == ["", "v0", "v1", "+/-", "v2", "+/-"]
    assert rows == [
        ["A, %", "50", "62.5", "+12.5 pt", "50", "same"],
        ["C, s", "2", "3", "+50.0 %", "8", "x 4"],
    ], "a count that is 0 everywhere has no row"


def test_progress_is_told_after_a_moment_with_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moment = [0.0]
    monkeypatch.setattr(sim_output.time, "perf_counter", lambda: moment[0])
    progress = Progress(2)
    for at_s, name, share in ((0.5, "a", 0.1), (6.0, "a", 0.5), (7.0, "a", 0.6), (18.0, "b", 0.5)):
        moment[0] = at_s
        progress(name, 1, share)
    progress.clear()
    assert capsys.readouterr().err.splitlines() == [
        "run 1 of 2: a, 50% of its time; about 18 s left",
        "run 2 of 2: b, 50% of its time; about 6 s left",
    ]


@pytest.mark.parametrize(
    ("unit", "before", "after", "told"),
    [
        ("share", 0.99948, 0.999485638, ["99.948", "99.949", "+0.001 pt"]),
        ("share", 0.244, 0.3023, ["24.4", "30.2", "+5.83 pt"]),
        ("share", 0.999, 0.769, ["99.900", "76.9", "-23.0 pt"]),
        ("share", 0.0, 0.00001, ["0", "0.001", "+0.001 pt"]),
        ("share", 0.999999999, 1.0, ["99.999", "100", "same"]),
        ("usd", 4.0, 3.99999, ["4.00", "4.00", "same"]),
        ("usd", 4.0, 3.9999, ["4.00", "4.00", "same"]),
        ("count", 100_000.0, 100_030.0, ["100,000", "100,030", "+0.03 %"]),
        ("count", 100_000.0, 100_001.0, ["100,000", "100,001", "same"]),
        ("s", 2.0, 0.0, ["2", "0", "-100.0 %"]),
        ("s", 0.0, 2.0, ["0", "2", "-"]),
    ],
)  # fmt: skip
def test_no_difference_is_told_finer_than_what_it_is_of(
    unit: str, before: float, after: float, told: list[str]
) -> None:
    tried = tuple(Tried(name, (Ran(1, {"a": value}, {}),)) for name, value in (("x", before), ("y", after)))
    _, rows = cells(Results("", "request", (Figure("a", "A", unit),), tried))
    assert rows[0][1:] == told


def test_a_run_that_is_interrupted_ends_at_once_and_quietly(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_text("[hardware]\ngpu_type = 'h100'\nmin_replicas = 20\n[traffic]\nrate = 500\nminutes = 20\n", "utf-8")
    running = subprocess.Popen(
        [sys.executable, "-m", "modelyard", "sim", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    try:
        told = running.stderr.readline()
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "left" in told, "it was not running yet"
    assert running.returncode == 130
    assert out == ""
    assert "Traceback" not in err


def test_what_a_tenant_is_called_cannot_break_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.csv").write_text('time,tenant\n0,"a\nb"\n1,"<script>"\n2,\x1b[31mred\n', "utf-8")
    file = tmp_path / "some.toml"
    file.write_text("[hardware]\ngpu_type = 'h100'\n[traffic]\nfile = 'some.csv'\n", "utf-8")
    pytest.importorskip("matplotlib")
    assert main(["sim", str(file), "--html", str(tmp_path / "x.html")]) == 0
    shown = capsys.readouterr().out
    assert "In time, a b, %" in shown
    assert "\x1b" not in shown
    page = (tmp_path / "x.html").read_text("utf-8")
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_a_picture_leaves_names_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = 'id="0.123456" 5"'
    file = tmp_path / "small.toml"
    file.write_text(SMALL.replace('"one"', f"'{name}'"), "utf-8")
    assert main(["sim", str(file), "--quiet", "--html", str(tmp_path / "x.html")]) == 0
    page = (tmp_path / "x.html").read_text("utf-8")
    assert f"{name}</text>" in page
    ids = re.findall(r' id="([^"]+)"', re.sub(r">[^<]*<", "><", page))
    assert len(ids) == len(set(ids)), "clips of one picture must not be another's"


@pytest.mark.parametrize("arguments", [["--html", "."], ["--pictures", "small.toml"]])
def test_what_cannot_be_written_is_refused_before_the_run(
    small: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small.parent)
    assert main(["sim", str(small), *arguments]) == 2
    assert capsys.readouterr().out == ""
