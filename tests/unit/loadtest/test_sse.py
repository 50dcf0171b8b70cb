"""Events, whatever the pieces that they come in."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from modelyard.loadtest.sse import EventReader

STREAM = (
    b': loading 42 %\n\ndata: {"a": 1}\n\nevent: error\r\ndata: {"b": 2}\r\n\r\ndata: x\ndata: y\n\ndata:[DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"x\ny", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    found = [event for start, end in itertools.pairwise(places) for event in reader.feed(STREAM[start:end])]
    assert found == EVENTS


def test_an_event_without_its_end_is_none() -> None:
    assert EventReader().feed(b"data: half") == []
    assert EventReader().feed(b"data: half\n") == []
