"""What is told of rounds and of the passes beside them."""

from modelyard.observe.rounds import RoundTimes


def test_a_pass_is_counted_from_when_it_was_needed_until_it_is_done() -> None:
    times = RoundTimes()
    times.needed({"a", "b"}, 10.0, running=frozenset())
    times.needed({"b"}, 11.0, running=frozenset({"a"}))
    assert times.status(12.0).oldest_pass_s == 2.0
    times.passed("a", 12.0)
    times.passed("b", 15.0)
    told = times.status(20.0)
    assert (told.pass_p50_s, told.pass_max_s, told.oldest_pass_s) == (5.0, 5.0, 0.0)


def test_what_is_needed_no_more_and_does_not_run_is_forgotten() -> None:
    times = RoundTimes()
    times.needed({"a", "b"}, 10.0, running=frozenset())
    assert times.needed({"b"}, 11.0, running=frozenset()) == {"b": 10.0}
    times.passed("a", 12.0)
    assert times.status(12.0).pass_max_s == 0.0


def test_a_round_lasts_as_long_as_its_own_work() -> None:
    times = RoundTimes()
    times.took(2000, 0.3)
    times.took(1, 0.1)
    told = times.status(0.0)
    assert (told.rounds, told.max_s, told.largest_passes, told.largest_s) == (2, 0.3, 2000, 0.3)
