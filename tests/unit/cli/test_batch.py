"""A batch is made once, however often its answer was lost, and what is refused leaves no file behind."""

from typing import Any

import pytest

from modelyard.cli import batch
from modelyard.cli.exits import Exit, Failure, Refused

ORDER = {"input_file_id": "file-x", "endpoint": "/v1/x", "completion_window": "24h"}


class Stub:
    """A platform that fails as it is told, then answers."""

    def __init__(self, *failures: Failure) -> None:
        self.failures = list(failures)
        self.orders: list[dict[str, Any]] = []
        self.deleted: list[str] = []

    def post(self, path: str, order: dict[str, Any]) -> dict[str, Any]:
        self.orders.append(order)
        if self.failures:
            raise self.failures.pop(0)
        return {"id": "batch_1"}

    def delete(self, path: str) -> None:
        self.deleted.append(path)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PAUSE_S", 0.001)


def made(platform: Any, *, is_ours: bool = True) -> Any:
    return batch.make(platform, ORDER, is_ours=is_ours)


def test_a_lost_answer_is_asked_for_again_with_the_same_key() -> None:
    platform = Stub(Failure("away", Exit.UNAVAILABLE), Refused("busy", status=503, code="storage_unavailable"))
    assert made(platform) == {"id": "batch_1"}
    assert len(platform.orders) == 3
    assert len({order["idempotency_key"] for order in platform.orders}) == 1
    assert platform.deleted == []
    other = Stub()
    made(other)
    assert other.orders[0]["idempotency_key"] != platform.orders[0]["idempotency_key"]


def test_a_refusal_is_final_and_takes_the_file_that_was_sent_for_it() -> None:
    platform = Stub(Refused("no", status=400, code="invalid_value"))
    with pytest.raises(Refused, match="no"):
        made(platform)
    assert (len(platform.orders), platform.deleted) == (1, ["/v1/files/file-x"])
    theirs = Stub(Refused("no", status=429, code="batches_full"))
    with pytest.raises(Refused):
        made(theirs, is_ours=False)
    assert theirs.deleted == [], "it was there before"


def test_who_stays_away_is_given_up_and_the_file_stays_since_the_batch_may_be_made() -> None:
    platform = Stub(*(Failure("away", Exit.UNAVAILABLE) for _ in range(9)))
    with pytest.raises(Failure, match="away"):
        made(platform)
    assert (len(platform.orders), platform.deleted) == (batch.TRIES_MAX, [])
