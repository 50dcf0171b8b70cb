"""What the gateway refuses when it does not keep up."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.policy.job import BANDS
from modelyard.policy.overload import CALM_S, RETRY_AFTER_S, Level, OverloadState, Seen, decide, sheds

N, BATCH, STANDARD, REFUSE = Level
CALM = Seen()


def after(*story: tuple[float, Seen], state: OverloadState | None = None) -> OverloadState:
    state = state or OverloadState()
    for now_s, seen in story:
        state = decide(seen, state, now_s=now_s)
    return state


def lag(seconds: float) -> Seen:
    return Seen(lag_s=seconds)


def test_each_level_refuses_its_bands() -> None:
    refused = {level: [band for band in range(len(BANDS)) if sheds(level, band)] for level in Level}
    assert refused == {N: [], BATCH: [2], STANDARD: [1, 2], REFUSE: [0, 1, 2]}


@pytest.mark.parametrize(
    ("seen", "level", "reason"),
    [
        (Seen(), N, ""),
        (Seen(lag_s=0.19), N, ""),
        (Seen(lag_s=0.2), BATCH, "the event loop is late"),
        (Seen(lag_s=0.6), STANDARD, "the event loop is late"),
        (Seen(lag_s=2.0), REFUSE, "the event loop is late"),
        (Seen(connections=69, connections_max=100), N, ""),
        (Seen(connections=70, connections_max=100), BATCH, "open connections"),
        (Seen(connections=85, connections_max=100), STANDARD, "open connections"),
        (Seen(connections=95, connections_max=100), REFUSE, "open connections"),
        (Seen(in_flight=9, in_flight_max=10), STANDARD, "requests in flight"),
        (Seen(journal_bytes=70, journal_bytes_max=100), BATCH, "the journal is behind"),
        (Seen(body_bytes=96, body_bytes_max=100), REFUSE, "bytes of request bodies"),
        (Seen(memory_bytes=2**40), N, ""),  # no limit known
        (Seen(memory_bytes=90, memory_bytes_max=100, lag_s=0.2), STANDARD, "memory"),
    ],
)
def test_worst_measure_decides(seen: Seen, level: Level, reason: str) -> None:
    state = after((1.0, seen), (1.25, seen))
    assert (state.level, state.reason, state.retry_after_s) == (level, reason, RETRY_AFTER_S[level])


def test_one_late_wakeup_is_no_overload_and_two_are() -> None:
    assert after((1.0, lag(5.0)), (1.25, CALM), (1.5, lag(5.0))).level is N
    assert after((1.0, lag(5.0)), (6.25, lag(0.7))).level is STANDARD


def test_level_is_left_one_at_a_time_after_a_calm_while() -> None:
    state = after((0.0, lag(2.0)), (1.0, lag(2.0)))
    levels = []
    for quarter in range(1, 40):
        state = decide(CALM, state, now_s=1.0 + quarter / 4)
        levels.append(state.level)
    assert levels[: int(CALM_S * 4)] == [REFUSE] * int(CALM_S * 4)
    assert [levels.index(level) / 4 for level in (STANDARD, BATCH, N)] == [CALM_S, 2 * CALM_S, 3 * CALM_S]
    assert state == OverloadState()


def test_load_around_a_threshold_does_not_flap() -> None:
    state, changes = OverloadState(), 0
    for step in range(400):
        seen = Seen(connections=680 + 40 * (step % 2), connections_max=1000)
        new = decide(seen, state, now_s=step / 4)
        changes += new.level is not state.level
        state = new
    assert (state.level, changes) == (BATCH, 1)


def test_load_just_below_a_threshold_keeps_the_level() -> None:
    state = after((0.0, Seen(connections=70, connections_max=100)))
    for second in range(1, 60):
        state = decide(Seen(connections=50, connections_max=100), state, now_s=second)
    assert (state.level, state.reason) == (BATCH, "open connections")


def test_relapse_while_calm_starts_the_wait_again() -> None:
    bad = Seen(memory_bytes=71, memory_bytes_max=100)
    state = after((0.0, bad), (1.0, CALM), (2.0, bad), (3.0, CALM), (4.9, CALM))
    assert state.level is BATCH
    assert decide(CALM, state, now_s=5.0).level is N


MEASURES = [name for name in Seen.__struct_fields__ if not name.endswith("_max")]
limits = st.fixed_dictionaries({f"{name}_max": st.sampled_from([0, 100]) for name in MEASURES if name != "lag_s"})
loads = st.fixed_dictionaries({name: st.integers(0, 110) for name in MEASURES if name != "lag_s"})
lags = st.sampled_from([0.0, 0.05, 0.07, 0.1, 0.2, 0.25, 0.3, 0.8, 1.0, 3.0])
states = st.builds(
    lambda level, lag_s, calm: OverloadState(
        level=level, reason="before" if level else "", lag_s=lag_s, calm_since_s=calm if level else None
    ),
    st.sampled_from(Level),
    lags,
    st.none() | st.floats(90, 100),
)


@settings(max_examples=60, deadline=None)
@given(limit=limits, load=loads, lag_s=lags, state=states, worse=st.sampled_from(MEASURES), more=st.integers(1, 50))
def test_worse_measurements_never_give_a_milder_level(
    limit: dict[str, int], load: dict[str, int], lag_s: float, state: OverloadState, worse: str, more: int
) -> None:
    seen = Seen(lag_s=lag_s, **limit, **load)
    raised = msgspec.structs.replace(seen, **{worse: getattr(seen, worse) + more})
    assert decide(raised, state, now_s=100.0).level >= decide(seen, state, now_s=100.0).level


@settings(max_examples=60, deadline=None)
@given(limit=limits, load=loads, lag_s=lags, state=states)
def test_level_falls_by_one_at_most_and_says_why(
    limit: dict[str, int], load: dict[str, int], lag_s: float, state: OverloadState
) -> None:
    new = decide(Seen(lag_s=lag_s, **limit, **load), state, now_s=100.0)
    assert new.level >= state.level - 1
    assert bool(new.reason) is bool(new.level)
    assert (new.retry_after_s > 0) is bool(new.level)


@settings(max_examples=60, deadline=None)
@given(state=states)
def test_calm_always_ends_in_normal(state: OverloadState) -> None:
    for step in range(60):
        state = decide(CALM, state, now_s=101.0 + step / 4)
    assert state.level is N
