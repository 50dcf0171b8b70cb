"""A forecast is made from what was seen, and says where that is little."""

from modelyard.domain.usage import Price
from modelyard.policy.batch_forecast import OUTPUT_DEFAULT, Seen, Work, forecast

PRICE = Price(input=1_000_000, output=2_000_000)
"""One nano-dollar a prompt token, two a generated one."""


def test_a_model_that_is_known_tells_length_and_time() -> None:
    seen = Seen(answers=50, output_tokens=30.0, seconds=2.0, slots=4, lines_ahead=100)
    found = forecast(Work(100, 40_000, None), seen, PRICE, concurrency=64)
    assert (found.input_tokens, found.output_tokens) == (10_000, 3_000)
    assert found.cost_nanousd == 10_000 + 6_000
    assert found.seconds == 200 * 2.0 / 4
    assert found.basis == "its last 50 answers, 2 s each, 4 at once, behind 100 lines of other batches"


def test_a_model_that_nobody_has_asked_gets_a_guess_and_no_time() -> None:
    found = forecast(Work(10, 400, None), Seen(answers=2, output_tokens=1.0, slots=4), PRICE, concurrency=8)
    assert (found.output_tokens, found.seconds) == (10 * OUTPUT_DEFAULT, None)
    assert found.basis == "the text alone: the model has answered 2 requests lately"


def test_no_more_is_expected_than_is_allowed_and_nothing_where_answers_have_no_tokens() -> None:
    seen = Seen(answers=50, output_tokens=30.0, seconds=2.0, slots=4)
    assert forecast(Work(100, 400, 200), seen, PRICE, concurrency=8).output_tokens == 200
    embeddings = forecast(Work(100, 400, None, generates=False), seen, PRICE, concurrency=8)
    assert (embeddings.output_tokens, embeddings.cost_nanousd) == (0, 100)


def test_no_line_is_expected_to_generate_more_than_it_may() -> None:
    seen = Seen(answers=50, output_tokens=190.8, seconds=2.0, slots=4)
    work = Work(1001, 400, None, bounded=((1000, 16_000),))
    assert forecast(work, seen, PRICE, concurrency=8).output_tokens == 16_191, "one says nothing"
    work = Work(20, 400, 10 * 16 + 10 * 4000, bounded=((10, 160), (10, 40_000)))
    assert forecast(work, seen, PRICE, concurrency=8).output_tokens == 160 + 1908, "long ones do not speak for short"
    assert forecast(work, Seen(), PRICE, concurrency=8).output_tokens == 160 + 10 * OUTPUT_DEFAULT


def test_a_model_without_replicas_or_with_more_than_lines_may_be_out() -> None:
    seen = Seen(answers=50, output_tokens=30.0, seconds=2.0, slots=0)
    assert forecast(Work(100, 400, None), seen, PRICE, concurrency=8).seconds is None
    many = Seen(answers=50, output_tokens=30.0, seconds=2.0, slots=1000)
    assert forecast(Work(100, 400, None), many, PRICE, concurrency=8).seconds == 25.0


def test_each_line_pays_for_itself_and_for_what_it_used_beside_tokens() -> None:
    price = Price(unit=5_000_000, request=7)
    seen = Seen(answers=50, seconds=2.0, slots=4, units=2.0)
    work = Work(100, 400, None, generates=False)
    assert forecast(work, seen, price, concurrency=8).cost_nanousd == 100 * 7 + 100 * 2 * 5
    guessed = forecast(work, Seen(answers=2, units=2.0), price, concurrency=8)
    assert guessed.cost_nanousd == 100 * 7
    assert guessed.basis.endswith("; what is billed beside tokens is left out")


def test_where_it_is_not_known_how_long_an_answer_takes_there_is_no_time() -> None:
    found = forecast(Work(10, 400, None), Seen(answers=9, output_tokens=3.0, slots=4), PRICE, concurrency=8)
    assert (found.output_tokens, found.seconds) == (30, None)
    assert found.basis == "its last 9 answers, 4 at once"
