"""What commands print: exact, aligned, and safe on a terminal."""

import json

import pytest

from modelyard.cli.output import clean, dollars, owners, progress_text, show_list, show_table, stage_text

ITEMS = [
    {"id": "ep-1", "name": "a", "count": 5},
    {"id": "ep-22", "name": "long\x1b[31mname", "count": 1234},
]
COLUMNS = {"NAME": lambda item: item["name"], "COUNT": lambda item: item["count"], "ID": lambda item: item["id"]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcode 🙂\ttab\nline", "plain ünïcode 🙂\ttab\nline"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("over\rwrite\x08\x00\x7f\x9b31m", "overwrite31m"),
        ("\x1bcreset", "reset"),
    ],
)
def test_nothing_untrusted_can_steer_a_terminal(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_a_table_is_aligned_with_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    show_list(ITEMS, COLUMNS, is_json=False, is_quiet=False, empty="")
    assert capsys.readouterr().out.splitlines() == [
        "NAME      COUNT  ID",
        "a             5  ep-1",
        "longname   1234  ep-22",
    ]


def test_json_is_the_items_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_list(ITEMS, COLUMNS, is_json=True, is_quiet=False, empty="")
    assert json.loads(capsys.readouterr().out) == ITEMS


def test_quiet_is_ids(capsys: pytest.CaptureFixture[str]) -> None:
    show_list(ITEMS, COLUMNS, is_json=False, is_quiet=True, empty="")
    assert capsys.readouterr().out == "ep-1\nep-22\n"


@pytest.mark.parametrize(("is_json", "out"), [(True, "[]\n"), (False, "")])
def test_an_empty_list_is_no_data(capsys: pytest.CaptureFixture[str], is_json: bool, out: str) -> None:
    show_list([], COLUMNS, is_json=is_json, is_quiet=False, empty="Make one.")
    captured = capsys.readouterr()
    assert captured.out == out
    assert captured.err == ("" if is_json else "Make one.\n")


def test_what_is_missing_shows_as_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["A", "B"], [[None, ""], [0, "x"]])
    assert capsys.readouterr().out == "A  B\n-  -\n0  x\n"


@pytest.mark.parametrize(
    ("nanousd", "text"),
    [
        (0, "$0.00"),
        (1, "$0.000000001"),
        (1_500_000_000, "$1.50"),
        (12_340_000_000_000, "$12340.00"),
        (-20_000_000, "-$0.02"),
    ],
)
def test_money_is_never_rounded(nanousd: int, text: str) -> None:
    assert dollars(nanousd) == text


def test_progress_says_stage_percent_time_and_reason() -> None:
    progress = {"stage": "downloading", "percent": 42, "eta_s": 7.6, "reason": "one core"}
    assert progress_text(progress) == "downloading 42%, ~8 s (one core)"
    paced = {"stage": "downloading", "percent": 21, "eta_s": 45.0, "reason": "", "bytes_per_s": 85_300_000.0}
    assert progress_text(paced) == "downloading 21%, ~45 s, 85.3 MB/s"
    assert progress_text({"stage": "queued", "percent": None, "eta_s": None, "reason": ""}) == "queued"
    assert progress_text({"stage": "ready", "percent": 100, "eta_s": 1.0, "reason": ""}) == "ready"
    assert progress_text(None) == ""


def test_a_stopped_endpoint_shows_why_and_not_that_it_is_queued() -> None:
    asleep = {"status": "stopped", "progress": {"stage": "queued", "reason": "asleep: no request"}}
    assert stage_text(asleep) == "asleep: no request"
    assert stage_text(asleep | {"status": "provisioning"}) == "queued (asleep: no request)"


def test_what_is_empty_makes_no_column_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["REASON", "N"], [["-", "-"], ["", "12"]])
    assert capsys.readouterr().out == "REASON   N\n-        -\n-       12\n"


def test_the_tenant_is_shown_where_there_are_several() -> None:
    assert owners([{"tenant_id": "a"}, {"tenant_id": "a"}], "tenant_id") == {}
    assert list(owners([{"tenant_id": "a"}, {"tenant_id": "b"}], "tenant_id")) == ["TENANT"]
    assert owners([], "tenant_id") == {}
    files = [{"modelyard": {"tenant_id": "a"}}, {"modelyard": {"tenant_id": "b"}}]
    column = owners(files, "modelyard", "tenant_id")["TENANT"]
    assert [column(file) for file in files] == ["a", "b"]
    assert owners([{"id": "of a user"}], "modelyard", "tenant_id") == {}
