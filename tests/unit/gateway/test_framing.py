"""Chunks, in any pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.gateway.framing import ChunkReader


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 9), max_size=50), st.booleans()
)
@settings(deadline=None, max_examples=60)
def test_the_payload_does_not_depend_on_the_pieces(payloads: list[bytes], cuts: list[int], has_trailer: bool) -> None:
    chunks = b"".join(b"%x;note=1\r\n%b\r\n" % (len(payload), payload) for payload in payloads)
    whole = chunks + b"0\r\n" + (b"x-a: b\r\n" if has_trailer else b"") + b"\r\n"
    reader, got, at = ChunkReader(), b"", 0
    for cut in [*cuts, len(whole)]:
        assert not reader.is_ended or at >= len(whole)
        got += reader.feed(whole[at : at + cut])
        at += cut
    assert got == b"".join(payloads)
    assert reader.is_ended


def test_an_end_inside_of_a_chunk_is_none() -> None:
    reader = ChunkReader()
    assert reader.feed(b"5\r\n0\r\n\r\n\r\n") == b"0\r\n\r\n"
    assert not reader.is_ended


@pytest.mark.parametrize("broken", [b"zz\r\n", b"\r\n", b"1" * 2000])
def test_broken_framing_is_an_error(broken: bytes) -> None:
    with pytest.raises(ValueError, match=r"int|end"):
        ChunkReader().feed(broken)
