"""How a caller wants its request answered: ``Prefer`` (RFC 7240), ``Idempotency-Key``, ``X-Modelyard-Webhook``.

A preference that is unknown or malformed is ignored, as the RFC says. A
mistake in the other two is refused: who sends an idempotency key that is not
honoured would find out from the bill.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from modelyard import errors

NAMES = frozenset({b"prefer", b"idempotency-key", b"x-modelyard-webhook"})
WAIT_S_MAX = 3600.0
KEY_LENGTH_MAX = 255
URL_LENGTH_MAX = 2048

_ASYNC = "respond-async"
_KEY = "Idempotency-Key"
_WEBHOOK = "X-Modelyard-Webhook"
_PREFERENCE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*(?:=[ \t]*(\"[^\"]*\"|[^ \t\"]*))?")
# Not one expression for the whole header: with its optional spaces everywhere it could be made to backtrack for ever.
_PIECE = re.compile(r'(?:[^,;"]|"(?:[^"\\]|\\.)*")+|[,;]')


class Preferences(NamedTuple):
    """What was asked for. ``wait_s``: longest time to hold the caller, None is what the settings say."""

    is_async: bool = False
    wait_s: float | None = None
    idempotency_key: str | None = None
    webhook_url: str = ""

    @property
    def is_kept(self) -> bool:
        """Say whether the answer is kept by the controller."""
        return self.is_async or self.idempotency_key is not None


NONE = Preferences()


def read(headers: Iterable[tuple[bytes, bytes]], *, is_stream: bool) -> Preferences:
    """Return what these headers (lower-case names, of ``NAMES``) ask for.

    Raises:
        ApiError: 400 for a bad key or webhook, or for a stream whose answer would have to be kept.
    """
    preferred: dict[str, str] = {}
    keys: list[str] = []
    urls: list[str] = []
    for name, value in headers:
        text = value.decode("latin-1")
        if name == b"prefer":
            for preference, argument in _parse(text):
                preferred.setdefault(preference, argument)  # "the first occurrence wins"
        elif name == b"idempotency-key":
            keys.append(text)
        else:
            urls.append(text)
    is_async = preferred.get(_ASYNC) == ""
    if is_stream and (is_async or keys):
        asked = f"Prefer: {_ASYNC}" if is_async else _KEY
        raise errors.unsupported_parameter("stream", f"'{asked}' keeps whole answers, and a stream has none")
    if len(keys) > 1 or (keys and not _is_key(keys[0])):
        raise errors.invalid_value(_KEY, f"send it once, with 1 to {KEY_LENGTH_MAX} printable ASCII characters")
    if urls and not is_async:
        raise errors.invalid_value(_WEBHOOK, f"it needs 'Prefer: {_ASYNC}'")
    if len(urls) > 1 or (urls and not 0 < len(urls[0]) <= URL_LENGTH_MAX):
        raise errors.invalid_value(_WEBHOOK, f"send it once, with at most {URL_LENGTH_MAX} characters")
    return Preferences(is_async, _seconds(preferred.get("wait", "")), keys[0] if keys else None, "".join(urls))


def fingerprint(route: str, content_type: bytes, body: bytes, *, is_async: bool) -> str:
    """Return a hash of everything that makes two requests the same one.

    A client that sends a form again separates its parts by another boundary, so that does not count.
    """
    if content_type.startswith(b"multipart/"):
        boundary = content_type.partition(b"boundary=")[2].partition(b";")[0].strip().strip(b'"')
        body = body.replace(boundary, b"") if boundary else body
    seen = hashlib.sha256(b"%b\0%d\0" % (route.encode(), is_async))
    seen.update(body)
    return seen.hexdigest()


def _parse(text: str) -> Iterable[tuple[str, str]]:
    """Yield well-formed preferences with their values; parameters (behind ``;``) mean nothing here."""
    is_start = True
    for piece in _PIECE.findall(text):
        if piece in (",", ";"):
            is_start = piece == ","
            continue
        found = _PREFERENCE.fullmatch(piece.strip(" \t")) if is_start else None
        is_start = False
        if found is not None:
            yield found[1].lower(), (found[2] or "").strip('"')


def _seconds(text: str) -> float | None:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        return None
    return min(float(text), WAIT_S_MAX)


def _is_key(text: str) -> bool:
    return 0 < len(text) <= KEY_LENGTH_MAX and text.isascii() and text.isprintable()
