"""A pace grows into what is idle, shrinks for others, and sends nothing before it may."""

from modelyard.policy.batch_pace import START, Pace


def fill(pace: Pace, now_s: float) -> int:
    sent = 0
    while pace.has_room(now_s):
        pace.sent()
        sent += 1
    return sent


def answer_all(pace: Pace, now_s: float, *, queued_s: float = 0.0) -> None:
    for _ in range(pace.running):
        pace.answered(now_s, queued_s=queued_s)


def test_it_grows_fast_while_everything_is_answered_soon_and_stops_at_its_most() -> None:
    pace, sizes = Pace(40), []
    for at in range(10):
        sizes.append(fill(pace, float(at)))
        answer_all(pace, float(at))
    assert sizes[:2] == [int(START), 6]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 40


def test_what_is_not_used_up_does_not_grow() -> None:
    pace = Pace(40)
    for at in range(50):
        pace.sent()
        pace.answered(float(at))
    assert pace.limit == START


def test_whoever_is_turned_away_comes_again_when_told_and_with_half() -> None:
    pace = Pace(64, limit=32.0)
    assert fill(pace, 0.0) == 32
    for _ in range(32):
        pace.turned_away(10.0, 5.0)
    assert pace.limit == 16.0, "one jam halves it once"
    assert not pace.has_room(14.9)
    assert fill(pace, 15.0) == 16


def test_a_long_wait_or_giving_way_shrinks_it_and_growth_is_slow_after_that() -> None:
    pace = Pace(64, limit=16.0)
    fill(pace, 0.0)
    pace.answered(1.0, queued_s=9.0)
    assert pace.limit == 8.0
    answer_all(pace, 2.0)
    before = pace.limit
    fill(pace, 2.0)
    answer_all(pace, 2.1)
    assert before < pace.limit + 1 <= before + 3
    pace.sent()
    pace.answered(9.0, gave_way=True)
    assert pace.limit < before


def test_where_it_was_too_much_before_it_only_feels_its_way() -> None:
    pace, turned_away = Pace(64, limit=2.0), 0
    for at in range(200):  # a key that may have one at a time
        now_s = at * 10.0
        sent = fill(pace, now_s)
        for _ in range(sent - 1):
            pace.turned_away(now_s, 1.0)
            turned_away += 1
        pace.answered(now_s)
    assert turned_away <= 30


def test_it_never_stops_for_good_and_never_pauses_for_long() -> None:
    pace = Pace(8)
    for at in range(20):
        pace.sent()
        pace.turned_away(at * 1000.0, 86_400.0)
    assert pace.limit == 1.0
    assert pace.has_room(19_000.0 + 60.0)


def test_a_line_without_an_answer_gives_its_place_back_and_says_nothing() -> None:
    pace = Pace(8)
    pace.sent()
    pace.dropped()
    assert (pace.running, pace.limit) == (0, START)


def test_the_news_of_one_jam_halve_it_once_however_many_bring_them() -> None:
    pace = Pace(256, limit=80.0)
    fill(pace, 0.0)
    for at in range(80):
        pace.answered(10.0 + at, gave_way=True)
    assert pace.limit == 40.0
    assert pace.running == 0
    fill(pace, 100.0)
    pace.answered(110.0, gave_way=True)
    assert pace.limit == 39.0, "the next jam is another one"


def test_what_was_too_much_long_ago_is_tried_again() -> None:
    pace = Pace(256, limit=20.0)
    fill(pace, 0.0)
    pace.answered(1.0, queued_s=9.0)
    sizes = []
    for at in range(120):
        answer_all(pace, 2.0 + at)
        fill(pace, 2.0 + at)
        sizes.append(pace.limit)
    assert sizes[25] < 22.0, "it only feels its way there"
    assert sizes[-1] > 40.0
