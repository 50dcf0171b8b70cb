"""AWS Signature Version 4, for GET requests without a body.

Own, since it is a page of code and its one good library brings a second HTTP
client; ``tests/unit/control/artifacts/test_sigv4.py`` holds it to AWS's own examples.
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class Keys(NamedTuple):
    """What requests are signed with."""

    access_key: str
    secret_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        """Return it without its secrets."""
        return "Keys(…)"


def signed(
    keys: Keys, url: str, headers: Mapping[str, str], *, region: str, at_s: float, service: str = "s3"
) -> dict[str, str]:
    """Return the headers to add to a GET of ``url`` with ``headers`` at the Unix time ``at_s``."""
    parts = urlsplit(url)
    stamp = datetime.fromtimestamp(at_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    added = {"x-amz-date": stamp}
    if service == "s3":
        added["x-amz-content-sha256"] = EMPTY_SHA256
    if keys.session_token:
        added["x-amz-security-token"] = keys.session_token
    every = {"host": parts.netloc, **{name.lower(): value for name, value in headers.items()}, **added}
    names = ";".join(sorted(every))
    canonical = "\n".join(
        [
            "GET",
            quote(unquote(parts.path or "/"), safe="/-_.~"),
            canonical_query(parts.query),
            *(f"{name}:{' '.join(every[name].split())}" for name in sorted(every)),
            "",
            names,
            EMPTY_SHA256,
        ]
    )
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{keys.secret_key}".encode()
    for step in (*scope.split("/"), text):
        key = hmac.new(key, step.encode(), hashlib.sha256).digest()
    credential = f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}"
    return {**added, "authorization": f"{credential}, SignedHeaders={names}, Signature={key.hex()}"}


def canonical_query(query: str) -> str:
    """Return a query in the one form that is signed: quoted anew, in order."""
    pairs = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    return "&".join(f"{name}={value}" for name, value in pairs)
