"""Requests are read from the traces that people have; what a file lacks is drawn, what is wrong is one line."""

from pathlib import Path
from random import Random

import pytest

from modelyard.domain.lengths import lengths_of
from modelyard.sim import arrival_files
from modelyard.sim.arrival_files import read
from modelyard.sim.requests import Arrival
from modelyard.sim.traffic import Traffic

TRAFFIC = Traffic(tenant_id="ten", input_tokens=lengths_of("70"), output_tokens=lengths_of("30"))


def of(tmp_path: Path, text: str, **changes: float) -> list[Arrival]:
    file = tmp_path / "arrivals"
    file.write_text(text, "utf-8")
    return read(file, TRAFFIC, Random(1), **changes)


def test_azures_trace_is_read_as_it_is(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:48.6805900,396,109\n"
        "2023-11-16 18:15:46.6805900,374,44\n",
    )
    assert [(one.at_s, one.prompt_tokens, one.output_tokens) for one in found] == [(0.0, 374, 44), (2.0, 396, 109)]


def test_mooncakes_hashes_stay_equal_where_they_are_equal(tmp_path: Path) -> None:
    first, second = of(
        tmp_path,
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 48]}\n\n'
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [46, 9]}\n',
    )
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert first.blocks == (92, 93), "the last block of a prompt is not whole"
    assert second.blocks == (92, 93, 94, 95)


def test_what_a_file_does_not_say_is_drawn(tmp_path: Path) -> None:
    found = of(tmp_path, "time,tenant,completion_tokens\n10,a,\n14,,7\n", speedup=2.0)
    assert [(one.at_s, one.tenant_id, one.prompt_tokens, one.output_tokens) for one in found] == [
        (0.0, "a", 70, 30),
        (2.0, "ten", 70, 7),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column of times"),
        ("when,tokens\n1,2\n", "no column of times"),
        ("time,input_tokens\nsoon,2\n", "line 2: 'soon' is no time"),
        ("time,input_tokens\n1,many\n", "line 2: 'many' is no number of tokens"),
        ("time\n", "has no requests"),
        ('{"timestamp": 1}\n[]\n', "line 2 is no object"),
        ('{"timestamp": 1}\n{\n', "line 2 is not valid JSON"),
        ('{"at": "nan"}\n', "not a finite number"),
        ('{"tokens": 1}\n', "has no time"),
        ("time,input_tokens\n1,5\n\n2,-5\n", "line 4: -5 tokens: must be 0 to 1,000,000,000"),
        ("time,input_tokens\n1,1e300\n", "line 2: 1e\\+300 tokens"),
        ("time,input_tokens\n1,nan\n", "line 2: nan tokens"),
        ("time,tenant\n1," + "x" * 200_000, "line 2 is no line of a CSV: field larger than field limit"),
        ("time\n" + "1" * 2_000_000, "line 2 has more than 1,048,576 letters"),
        ("x" * 2_000_000, "line 1 has more than 1,048,576 letters"),
        ('{"at": 1, "hash_ids": [-3]}\n', "line 1: one of its hash_ids is below 0"),
        ('{"at": 1, "hash_ids": 5}\n', "line 1: "),
        ("[" * 100_000, "no column of times"),
        ('{"at": ' + "[" * 100_000, "line 1 is not valid JSON"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of(tmp_path, text)


def test_files_of_spreadsheets_are_read(tmp_path: Path) -> None:
    found = of(tmp_path, '\ufeffTimestamp, Input_Tokens ,Tenant\r\n7,20,"a\nb"\r\n , ,\r\n5,,\r\n')
    assert [(one.at_s, one.prompt_tokens, one.tenant_id) for one in found] == [(0.0, 70, "ten"), (2.0, 20, "a b")]


def test_a_zone_is_kept_beside_parts_of_a_second(tmp_path: Path) -> None:
    found = of(tmp_path, "time\n2026-11-30T12:00:00.12+02:00\n2026-11-30T10:00:01.1234567Z\n2026-11-30 10:00:02\n")
    assert [one.at_s for one in found] == pytest.approx([0.0, 1.003456, 1.88])


def test_hashes_of_a_csv_are_those_of_json_lines(tmp_path: Path) -> None:
    lines = of(tmp_path, '{"timestamp": 1, "input_length": 1100, "hash_ids": [46, 470]}\n')
    cells = of(tmp_path, 'timestamp,input_length,hash_ids\n1,1100,"[46, 470]"\n')
    assert lines[0].blocks == cells[0].blocks == (92, 93, 940, 941)
    assert of(tmp_path, "timestamp,input_length,hash_ids\n1,1100,46 470\n")[0].blocks == lines[0].blocks


def test_only_the_earliest_are_taken_however_the_file_is_ordered(tmp_path: Path) -> None:
    text = "time,input_tokens\n" + "".join(f"{100 - at},{at}\n" for at in range(100))
    assert [one.prompt_tokens for one in of(tmp_path, text, most=3)] == [99, 98, 97]


def test_a_file_of_too_many_requests_is_left_as_soon_as_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_files, "REQUESTS_MAX", 50)
    text = "time\n" + "".join(f"{at}\n" for at in range(60)) + "this is never read\n"
    with pytest.raises(ValueError, match="has more than 50 requests; say how many with requests = "):
        of(tmp_path, text)
    text = "time\n" + "".join(f"{at}\n" for at in range(60))
    assert len(of(tmp_path, text, most=40)) == 40


def test_bytes_that_are_no_text_are_told_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "arrivals"
    file.write_bytes(b"time\n" + b"1\n" * 9000 + b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"arrivals is not UTF-8 after line \d+"):
        read(file, TRAFFIC, Random(1))


def test_what_a_file_lacks_is_drawn_apart(tmp_path: Path) -> None:
    text = "time\n" + "".join(f"{at}\n" for at in range(50))
    file = tmp_path / "arrivals"
    file.write_text(text, "utf-8")
    longer, shorter = (
        read(file, Traffic(output_tokens=lengths_of(length)), Random(1)) for length in ("uniform:1:900", "5")
    )
    assert [one.prompt_tokens for one in longer] == [one.prompt_tokens for one in shorter]
