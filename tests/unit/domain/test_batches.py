"""A batch as its maker sees it: when it will be done, and what its lines pay."""

import msgspec

from modelyard.domain.batches import Batch, BatchStatus, Counts, Forecast, view

FORECAST = Forecast(10, 20, 3_000_000_000, 100.0, "a test", 250_000)
BEGUN = Batch(
    "batch_1",
    "ten",
    "key",
    "/v1/x",
    "file-in",
    "24h",
    1_000.0,
    87_400.0,
    status=BatchStatus.IN_PROGRESS,
    in_progress_at=2_000.0,
    counts=Counts(1000, 0, 0),
    forecast=FORECAST,
)


def finish_at(*, now: float, done: int = 0, **changes: object) -> int | None:
    batch = msgspec.structs.replace(BEGUN, counts=Counts(1000, done, 0), **changes)
    forecast = view(batch, price_factor=0.5, now=now).modelyard.forecast
    assert forecast is not None
    return forecast.finish_at


def test_it_goes_by_the_forecast_and_then_by_its_own_pace() -> None:
    assert finish_at(now=2_010.0) == 2_100
    assert finish_at(now=2_010.0, done=49) == 2_100
    assert finish_at(now=2_010.0, done=500) == 2_020


def test_it_is_never_done_at_a_moment_that_is_over() -> None:
    assert finish_at(now=2_120.0) == 2_120
    # What should have been done at 2100 has waited for an hour.
    assert finish_at(now=5_600.0) is None
    assert finish_at(now=5_600.0, done=10) == 5_600 + 3_600 * 99
    # The clock was set back since it began.
    assert finish_at(now=1_900.0, done=500) == 1_900


def test_where_nobody_knew_its_model_its_own_pace_tells_soon() -> None:
    unknown = msgspec.structs.replace(FORECAST, seconds=None)
    assert finish_at(now=2_010.0, forecast=unknown) is None
    assert finish_at(now=2_010.0, done=10, forecast=unknown) == 2_010 + 990


def test_the_price_factor_is_what_held_when_its_file_was_checked() -> None:
    assert view(BEGUN, price_factor=0.5, now=2_010.0).modelyard.price_factor == 0.25
    unchecked = msgspec.structs.replace(BEGUN, forecast=None)
    assert view(unchecked, price_factor=0.5, now=2_010.0).modelyard.price_factor == 0.5
    older = msgspec.structs.replace(BEGUN, forecast=msgspec.structs.replace(FORECAST, factor_micro=None))
    assert view(older, price_factor=0.5, now=2_010.0).modelyard.price_factor == 0.5
