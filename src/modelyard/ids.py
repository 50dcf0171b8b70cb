"""Identifiers and API keys.

Ids are a readable prefix and 128 random bits, so that they can neither be
guessed nor collide. An API key is ``my_<id>_<secret>_<check>``: the id is
public and finds the record, the secret is 256 random bits and is stored only
as a keyed hash, the check lets clients and secret scanners reject typos
offline (``reference/security.md`` S15).
"""

import binascii
import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_KEY_PATTERN = re.compile(r"my_([a-km-np-z2-9]{8})_([0-9A-Za-z]{43})_([0-9A-Za-z]{6})")

KEY_LENGTH = 3 + 8 + 1 + 43 + 1 + 6
"""Characters of every well-formed API key."""


class ParsedKey(NamedTuple):
    """The two parts of a well-formed key that matter."""

    key_id: str
    secret: str


def new_id(prefix: str) -> str:
    """Return ``<prefix><26 characters of 130 random bits>``; the prefix carries its own ``-`` or ``_``."""
    return prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(26))


def digest_text(content: bytes, length: int) -> str:
    """Return up to 32 characters, as ids are made of, that follow from ``content``."""
    return "".join(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in hashlib.sha256(content).digest()[:length])


class RequestIds:
    """Request ids for one process: unpredictable prefix, then a counter.

    A counter costs a tenth of a random id; the 80-bit random prefix keeps ids
    of different processes and restarts apart.
    """

    __slots__ = ("_count", "prefix")

    def __init__(self) -> None:
        self.prefix = "req_" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(16))
        self._count = 0

    def next(self) -> str:
        """Return an id never given before."""
        self._count += 1
        return f"{self.prefix}{self._count:08x}"


def new_api_key(key_id: str | None = None) -> tuple[str, ParsedKey]:
    """Return a fresh key as shown to its owner once, and its parts; a rotation keeps ``key_id``."""
    key_id = key_id or "".join(secrets.choice(_ID_ALPHABET) for _ in range(8))
    secret = _base62(secrets.randbits(256), 43)
    body = f"my_{key_id}_{secret}"
    return f"{body}_{_check(body)}", ParsedKey(key_id, secret)


def parse_api_key(text: str) -> ParsedKey | None:
    """Return the parts of ``text``, or None when it is no key of ours (length, alphabet or check is off)."""
    if len(text) != KEY_LENGTH:
        return None
    match = _KEY_PATTERN.fullmatch(text)
    if match is None or _check(text[:-7]) != match[3]:
        return None
    return ParsedKey(match[1], match[2])


def hash_secret(pepper: bytes, secret: str) -> bytes:
    """Return HMAC-SHA256 of a key's secret: 32 bytes, useless without the pepper file."""
    return hmac.digest(pepper, secret.encode(), hashlib.sha256)


def _check(body: str) -> str:
    return _base62(binascii.crc32(body.encode()), 6)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))
