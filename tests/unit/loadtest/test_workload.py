"""Prompts and lengths: alike for a seed, of the length that is asked for, and shared where that is asked for."""

from itertools import islice
from pathlib import Path

import pytest

from modelyard.domain.lengths import lengths_of
from modelyard.loadtest.workload import Made, asks_of, asks_of_file


def words(made: Made, seed: int, count: int = 4) -> list[list[str]]:
    return [ask.content[0]["content"].split() for ask in islice(asks_of(made, "chat", seed=seed), count)]


def test_prompts_have_their_length_differ_from_the_first_words_on_and_are_the_same_for_a_seed() -> None:
    made = Made(lengths_of("64"), lengths_of("16"))
    found = words(made, 1)
    assert [len(one) for one in found] == [64] * 4
    assert len({" ".join(one[:8]) for one in found}) == 4
    assert found == words(made, 1)
    assert found != words(made, 2)


def test_a_shared_prefix_is_the_same_in_all_and_for_all_seeds() -> None:
    made = Made(lengths_of("64"), lengths_of("16"), prefix_share=0.5)
    found = words(made, 1) + words(made, 2)
    assert len({" ".join(one[:32]) for one in found}) == 1
    assert len({" ".join(one[32:]) for one in found}) == 8


def test_each_route_gets_its_form() -> None:
    made = Made(lengths_of("4"), lengths_of("16"))
    assert isinstance(next(asks_of(made, "completions", seed=0)).content, str)
    assert next(asks_of(made, "embeddings", seed=0)).output_tokens == 0


def test_a_file_is_read_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "one"}], "output_tokens": 5}\n\n{"prompt": "two", "max_tokens": 7}\n'
        '{"input": "three"}\n'
    )
    found = list(islice(asks_of_file(file, "chat", lengths_of("9"), seed=3)(), 6))
    told = {(ask.content[0]["content"], ask.output_tokens) for ask in found}
    assert told == {("one", 5), ("two", 7), ("three", 9)}
    assert {ask.output_tokens for ask in islice(asks_of_file(file, "chat", None, seed=3)(), 3)} == {5, 7, 0}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ("{", "line 1 is not valid JSON"),
        ('{"prompt": "a"}\n[]\n', "line 2 has no 'messages' or 'prompt'"),
        ('{"prompt": "a", "output_tokens": -1}', "output_tokens is no number"),
    ],
)
def test_faults_of_a_file_name_the_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=told):
        asks_of_file(file, "chat", None, seed=0)
