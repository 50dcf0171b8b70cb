"""Lengths as people write them, and what is drawn of them."""

import random

import pytest

from modelyard.domain.lengths import TOKENS_MAX, Lengths, lengths_of


def test_lengths_are_read() -> None:
    assert lengths_of("512") == Lengths("constant", 512)
    assert lengths_of("uniform:100:900").mean == 500
    assert lengths_of("normal:512:128").mean == 512
    assert lengths_of("lognormal:512:0.6") == Lengths("lognormal", 512, 0.6)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "normal:5", "uniform:9:5", "gamma:1:2", "1e9", "normal:5:nan", "lognormal:5:11"]
)
def test_what_is_no_length_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="is no length"):
        lengths_of(text)


@pytest.mark.parametrize("text", ["lognormal:9999999:10", "normal:1:9999999", "uniform:1:9999999", "9999999"])
def test_no_draw_is_beyond_what_a_model_takes(text: str) -> None:
    generator = random.Random(3)
    assert all(1 <= lengths_of(text).draw(generator) <= TOKENS_MAX for _ in range(2000))


def test_draws_follow_their_distribution_and_are_at_least_one() -> None:
    generator = random.Random(1)
    uniform = [lengths_of("uniform:10:20").draw(generator) for _ in range(500)]
    assert (min(uniform), max(uniform)) == (10, 20)
    normal = [lengths_of("normal:100:10").draw(generator) for _ in range(500)]
    assert sum(normal) / 500 == pytest.approx(100, abs=2)
    assert min(lengths_of("normal:1:50").draw(generator) for _ in range(200)) == 1
    assert {lengths_of("7").draw(generator) for _ in range(5)} == {7}
