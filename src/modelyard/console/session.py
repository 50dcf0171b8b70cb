"""Who is signed in: an API key, proven once, then a signed cookie.

The cookie holds the key's id, an expiry and a keyed hash over both and the
key's stored hash: it cannot be forged without the pepper, it ends with the
key (revoked, expired, rotated, tenant suspended), and the key itself never
goes to the browser's storage.
"""

import hashlib
import hmac
import re
from typing import Protocol

from modelyard.clock import Clock
from modelyard.domain.tenants import ApiKey, Identity, Scope
from modelyard.ids import hash_secret, parse_api_key
from modelyard.stores import ControlStore

SESSION_S = 8 * 3600
_TOKEN = re.compile(r"([a-z0-9]{8})\.(\d{1,12})\.([0-9a-f]{64})")


class SessionContext(Protocol):
    """What a session is judged by."""

    @property
    def store(self) -> ControlStore:
        """Keys and tenants."""
        ...

    @property
    def clock(self) -> Clock:
        """Time."""
        ...

    @property
    def pepper(self) -> bytes:
        """The key of all hashes."""
        ...


async def sign_in(context: SessionContext, text: str) -> str | None:
    """Return the cookie's value for the API key ``text``, None when the key is not valid or may not manage."""
    parsed = parse_api_key(text.strip())
    if parsed is None:
        return None
    key = await _live_key(context, parsed.key_id)
    if key is None or not _proves(key, hash_secret(context.pepper, parsed.secret), context.clock.unix_s()):
        return None
    if not _identity(key).may(Scope.MANAGE):
        return None
    expiry = int(context.clock.unix_s()) + SESSION_S
    return f"{key.id}.{expiry}.{_mac(context.pepper, key, expiry)}"


async def signed_in(context: SessionContext, token: str) -> Identity | None:
    """Return who the cookie stands for, None when it is not, or no longer, good."""
    match = _TOKEN.fullmatch(token)
    if match is None or int(match[2]) <= context.clock.unix_s():
        return None
    key = await _live_key(context, match[1])
    if key is None or not hmac.compare_digest(match[3], _mac(context.pepper, key, int(match[2]))):
        return None
    identity = _identity(key)
    return identity if identity.may(Scope.MANAGE) else None


async def _live_key(context: SessionContext, key_id: str) -> ApiKey | None:
    now = context.clock.unix_s()
    key = next((key for key in await context.store.keys() if key.id == key_id), None)
    if key is None or key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
        return None
    tenant = next((tenant for tenant in await context.store.tenants() if tenant.id == key.tenant_id), None)
    return None if tenant is None or tenant.is_suspended else key


def _proves(key: ApiKey, given: bytes, now: float) -> bool:
    if hmac.compare_digest(given, key.secret_hash):
        return True
    if key.previous_hash is None or (key.previous_expires_at or 0) <= now:
        return False
    return hmac.compare_digest(given, key.previous_hash)


def _mac(pepper: bytes, key: ApiKey, expiry: int) -> str:
    derived = hmac.digest(pepper, b"modelyard console session", hashlib.sha256)
    return hmac.new(derived, f"{key.id}.{expiry}.".encode() + key.secret_hash, hashlib.sha256).hexdigest()


def _identity(key: ApiKey) -> Identity:
    return Identity(key.id, key.tenant_id, key.scopes)
