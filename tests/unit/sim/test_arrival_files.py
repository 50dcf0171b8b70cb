"""Requests are read from the traces that people have; what a file lacks is drawn, what is wrong is one line."""

from pathlib import Path
from random import Random

import pytest

from modelyard.domain.lengths import lengths_of
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
        ("time,input_tokens\nsoon,2\n", "request 1: 'soon' is no time"),
        ("time,input_tokens\n1,many\n", "request 1: could not convert"),
        ("time\n", "has no requests"),
        ('{"timestamp": 1}\n[]\n', "line 2 is no object"),
        ('{"timestamp": 1}\n{\n', "line 2 is not valid JSON"),
        ('{"at": "nan"}\n', "not a finite number"),
        ('{"tokens": 1}\n', "has no time"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of(tmp_path, text)
