"""The simulated tokenizer: lossless, deterministic, easy to count by hand.

A token is a chat marker like ``<|user|>``, up to 8 ASCII letters or digits
with the blank before them, or one other character with the blank before it.
With ``by_byte`` every byte of a character outside ASCII is a token, as in
byte-level BPE, so that one character spans tokens.
"""

import re

BLOCK_TOKENS = 16
"""Tokens of a KV block."""

_PIECE = re.compile(r"<\|[a-z]{1,16}\|>|\s?[A-Za-z0-9_]{1,8}|\s?.", re.DOTALL)


def split(text: str, *, by_byte: bool = False) -> list[bytes]:
    """Return the tokens of ``text``; joined they are its UTF-8 again."""
    pieces = [piece.encode("utf-8", "replace") for piece in _PIECE.findall(text)]
    if not by_byte:
        return pieces
    found: list[bytes] = []
    for piece in pieces:
        if piece.isascii():
            found.append(piece)
        else:
            found.extend(bytes((byte,)) for byte in piece)
    return found


def blocks_for(tokens: int) -> int:
    """Return how many KV blocks ``tokens`` need."""
    return -(-tokens // BLOCK_TOKENS)


def repeat_to(pieces: list[bytes], length: int) -> list[bytes]:
    """Return ``pieces`` repeated and cut to ``length``; a repetition starts with a blank."""
    found = list(pieces)
    again = [b" " + pieces[0].lstrip(), *pieces[1:]]
    while len(found) < length:
        found.extend(again)
    return found[:length]
