"""Pooling, scores and entities, worked out by hand."""

from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="needs the extra 'onnx'")

from modelyard.engines.onnx import scores  # noqa: E402

HIDDEN = np.array([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], [[5.0, 5.0], [7.0, 7.0], [9.0, 0.0]]], np.float32)
MASK = np.array([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("how", "wanted"),
    [("mean", [[2, 3], [7, 4]]), ("cls", [[1, 2], [5, 5]]), ("last", [[3, 4], [9, 0]])],
)
def test_pooling_leaves_padding_out(how: str, wanted: list[list[float]]) -> None:
    assert scores.pool(HIDDEN, MASK, how) == pytest.approx(np.array(wanted))


def test_a_shortened_vector_has_length_one_again() -> None:
    vector = scores.normalised(np.array([3.0, 4.0, 12.0], np.float32))
    assert scores.shortened(vector, 2, is_normalised=True) == pytest.approx([0.6, 0.8])


def test_sigmoid_and_softmax_do_not_overflow() -> None:
    values = np.array([[-1e4, 0.0, 1e4]], np.float32)
    assert scores.scored(values, "sigmoid") == pytest.approx(np.array([[0.0, 0.5, 1.0]]))
    assert scores.scored(values, "softmax") == pytest.approx(np.array([[0.0, 0.0, 1.0]]))


TEXT = "Anna Maria lives in New York"
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
#         [CLS]   Anna    Ma       ##ria    lives     in        New       York      [SEP]
OFFSETS = [(0, 0), (0, 4), (5, 7), (7, 10), (11, 16), (17, 19), (20, 23), (24, 28), (0, 0)]
WORDS = [None, 0, 1, 1, 2, 3, 4, 5, None]


def rows(*best: tuple[int, float]) -> Any:
    found = np.zeros((len(best), len(LABELS)), np.float32)
    for place, (label, score) in enumerate(best):
        found[place] = (1 - score) / (len(LABELS) - 1)
        found[place, label] = score
    return found


TAGGED = rows((0, 1), (1, 0.9), (2, 0.8), (0, 0.6), (0, 0.9), (0, 0.9), (3, 0.9), (4, 0.7), (0, 1))


def test_simple_joins_neighbours_of_one_entity() -> None:
    found = scores.entities(TEXT, TAGGED, OFFSETS, WORDS, LABELS, "simple")
    assert [(one["entity_group"], one["word"], one["start"], one["end"]) for one in found] == [
        ("PER", "Anna Ma", 0, 7),
        ("LOC", "New York", 20, 28),
    ]
    assert found[1]["score"] == pytest.approx(0.8)


def test_first_gives_a_word_the_label_of_its_first_token() -> None:
    found = scores.entities(TEXT, TAGGED, OFFSETS, WORDS, LABELS, "first")
    assert [one["word"] for one in found] == ["Anna Maria", "New York"]


def test_average_gives_a_word_the_mean_of_its_tokens() -> None:
    found = scores.entities(TEXT, TAGGED, OFFSETS, WORDS, LABELS, "average")
    assert [one["word"] for one in found] == ["Anna Maria", "New York"]
    assert found[0]["score"] == pytest.approx((0.9 + (0.8 + 0.1) / 2) / 2)


def test_a_begin_starts_a_new_entity_of_the_same_kind() -> None:
    tagged = rows((0, 1), (1, 0.9), (1, 0.9), (2, 0.9), (0, 0.9), (0, 0.9), (0, 0.9), (0, 0.9), (0, 1))
    found = scores.entities(TEXT, tagged, OFFSETS, WORDS, LABELS, "simple")
    assert [one["word"] for one in found] == ["Anna", "Maria"]


def test_none_lists_tokens_with_their_place() -> None:
    found = scores.entities(TEXT, TAGGED, OFFSETS, WORDS, LABELS, "none")
    assert [(one["entity"], one["word"], one["index"]) for one in found] == [
        ("B-PER", "Anna", 0),
        ("I-PER", "Ma", 1),
        ("B-LOC", "New", 5),
        ("I-LOC", "York", 6),
    ]
