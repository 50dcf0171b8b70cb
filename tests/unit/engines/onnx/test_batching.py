"""Batches are of like length, no request and no model holds up another, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.onnx.batching import PADDING_MAX, Batcher, BatchRule, Item, QueueFullError


def items(model: str, lengths: list[int], owner: object = None, key: str = "text") -> list[Item]:
    return [Item(model, length, (model, place), key, owner) for place, length in enumerate(lengths)]


def batcher(*models: str, **rule: float) -> Batcher:
    found = Batcher()
    for model in models:
        found.set_rule(model, BatchRule(**rule))  # type: ignore[arg-type]
    return found


def test_a_batch_is_the_next_item_and_those_nearest_in_length() -> None:
    queue = batcher("m", items_max=3, tokens_max=1000)
    queue.add(items("m", [100, 10, 98, 11, 99]), 0.0)
    batch = queue.take(0.0)
    assert batch is not None
    assert [item.length for item in batch.items] == [98, 99, 100]
    batch = queue.take(0.0)
    assert batch is not None
    assert [item.length for item in batch.items] == [10, 11]


def test_tokens_bound_a_batch_with_its_padding() -> None:
    queue = batcher("m", items_max=8, tokens_max=250)
    queue.add(items("m", [100, 100, 100]), 0.0)
    assert [len(batch.items) for batch in (queue.take(0.0), queue.take(0.0)) if batch] == [2, 1]


def test_a_text_longer_than_a_batch_goes_alone() -> None:
    queue = batcher("m", items_max=8, tokens_max=50)
    queue.add(items("m", [400, 10]), 0.0)
    batch = queue.take(0.0)
    assert batch is not None
    assert [item.length for item in batch.items] == [400]


def test_items_of_another_kind_are_not_joined() -> None:
    queue = batcher("m", items_max=8)
    queue.add(items("m", [10], key="a"), 0.0)
    queue.add(items("m", [10], key="b"), 0.0)
    assert [len(batch.items) for batch in (queue.take(0.0), queue.take(0.0)) if batch] == [1, 1]


def test_a_delay_waits_for_more_but_not_longer_than_it_says() -> None:
    queue = batcher("m", items_max=2, delay_s=0.01)
    queue.add(items("m", [10]), 5.0)
    assert queue.take(5.005) is None
    assert queue.due_at_s() == pytest.approx(5.01)
    assert queue.take(5.011) is not None
    queue.add(items("m", [10, 10]), 6.0)
    assert queue.take(6.0) is not None, "a full batch has nothing to wait for"


def test_a_small_request_passes_a_large_one_after_its_next_item() -> None:
    queue = batcher("m", items_max=1)
    queue.add(items("m", [10] * 1000, owner="large"), 0.0)
    assert queue.take(0.0) is not None
    queue.add(items("m", [10], owner="small"), 0.1)
    order = [batch.items[0].owner for _ in range(2) if (batch := queue.take(0.2))]
    assert "small" in order


def test_small_requests_without_end_do_not_starve_a_large_one() -> None:
    queue = batcher("m", items_max=1)
    queue.add(items("m", [10] * 20, owner="large"), 0.0)
    taken = 0
    for turn in range(39):
        if turn % 2:
            queue.add(items("m", [10], owner=turn), float(turn))
        batch = queue.take(float(turn))
        assert batch is not None
        taken += batch.items[0].owner == "large"
    assert taken >= 19


def test_models_share_the_cores_by_time_and_not_by_batches() -> None:
    queue = batcher("slow", "fast", items_max=1)
    queue.add(items("slow", [10] * 100), 0.0)
    queue.add(items("fast", [10] * 1000), 0.0)
    used = {"slow": 0.0, "fast": 0.0}
    for _ in range(110):
        batch = queue.take(0.0)
        assert batch is not None
        took = 0.1 if batch.model == "slow" else 0.01
        used[batch.model] += took
        queue.done(batch.model, took)
    assert used["slow"] == pytest.approx(used["fast"], rel=0.15)


def test_a_model_that_was_idle_saves_nothing_up() -> None:
    queue = batcher("busy", "idle", items_max=1)
    queue.add(items("busy", [10] * 200), 0.0)
    for _ in range(100):
        batch = queue.take(0.0)
        assert batch is not None
        queue.done(batch.model, 1.0)
    queue.add(items("idle", [10] * 50), 0.0)
    order = []
    for _ in range(20):
        batch = queue.take(0.0)
        assert batch is not None
        order.append(batch.model)
        queue.done(batch.model, 1.0)
    assert 8 <= order.count("idle") <= 12


def test_a_full_queue_refuses_and_an_empty_one_takes_any_request() -> None:
    queue = batcher("m", queue_max=5)
    queue.add(items("m", [1] * 8), 0.0)
    with pytest.raises(QueueFullError):
        queue.add(items("m", [1]), 0.0)
    assert queue.waiting("m") == 8


def test_who_leaves_is_not_computed() -> None:
    queue = batcher("m")
    me = object()
    queue.add(items("m", [10, 10], owner=me), 0.0)
    queue.add(items("m", [10], owner="other"), 0.0)
    queue.drop(me)
    batch = queue.take(0.0)
    assert batch is not None
    assert [item.owner for item in batch.items] == ["other"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.lists(st.integers(1, 512), min_size=1, max_size=12)),
        max_size=20,
    ),
    st.integers(1, 8),
    st.integers(16, 2048),
    st.data(),
)
def test_every_item_is_computed_once_within_the_rule(
    requests: list[tuple[str, list[int]]], items_max: int, tokens_max: int, data: st.DataObject
) -> None:
    queue = batcher("a", "b", "c", items_max=items_max, tokens_max=tokens_max, queue_max=10_000)
    waiting: set[tuple[int, int]] = set()
    for number, (model, lengths) in enumerate(requests):
        queue.add(items(model, lengths, owner=number), float(number))
        waiting |= {(number, place) for place in range(len(lengths))}
        if data.draw(st.booleans()):
            _compute_one(queue, waiting, items_max, tokens_max)
    while waiting:
        _compute_one(queue, waiting, items_max, tokens_max)
    assert queue.take(1e9) is None
    assert queue.due_at_s() is None


def _compute_one(queue: Batcher, waiting: set[tuple[int, int]], items_max: int, tokens_max: int) -> None:
    batch = queue.take(1e9)
    assert batch is not None
    assert len({item.model for item in batch.items}) == 1
    assert len(batch.items) <= items_max
    lengths = [item.length for item in batch.items]
    assert lengths == sorted(lengths)
    padded = max(lengths) * len(lengths)
    assert padded <= tokens_max or len(lengths) == 1
    assert sum(lengths) >= (1 - PADDING_MAX) * padded * 0.999
    for item in batch.items:
        waiting.remove((item.owner, item.payload[1]))
    queue.done(batch.model, 0.01)
