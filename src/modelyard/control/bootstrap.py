"""What a fresh installation begins with: the platform's own tenant and its first admin key."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from modelyard.clock import Clock
from modelyard.domain.tenants import PLATFORM, ApiKey, Scope, Tenant
from modelyard.ids import ParsedKey, hash_secret, new_api_key, parse_api_key
from modelyard.stores import AlreadyExistsError, ControlStore


async def ensure_platform(store: ControlStore, clock: Clock) -> None:
    """Create the tenant that operates the platform, if it is not there."""
    with suppress(AlreadyExistsError):
        await store.add_tenant(Tenant(PLATFORM, PLATFORM, int(clock.unix_s())))


async def ensure_admin_key(store: ControlStore, pepper: bytes, clock: Clock) -> str | None:
    """Create an admin key if no live one exists, and return its text, which is stored nowhere; else None."""
    await ensure_platform(store, clock)
    if await _has_admin(store, clock):
        return None
    text, parsed = new_api_key()
    await store.add_key(_admin(text, parsed, pepper, clock))
    return text


async def keep_admin_key(store: ControlStore, pepper: bytes, clock: Clock, file: Path) -> None:
    """See to it that a live admin key exists and that ``file`` (mode 0600) has its text.

    The file is written first: a controller that is killed in between finds the key there at its next start and only
    adds it. A database that was lost gets the same key back.
    """
    await ensure_platform(store, clock)
    if await _has_admin(store, clock):
        return
    text = _read_secret(file)
    if (kept := parse_api_key(text)) is not None:
        with suppress(AlreadyExistsError):  # it was revoked: make another
            await store.add_key(_admin(text, kept, pepper, clock))
            return
    text, parsed = new_api_key()
    _write_secret(file, text)
    await store.add_key(_admin(text, parsed, pepper, clock))


async def _has_admin(store: ControlStore, clock: Clock) -> bool:
    now_s = clock.unix_s()
    return any(
        Scope.ADMIN in key.scopes
        and key.revoked_at is None
        and (key.expires_at is None or key.expires_at > now_s)
        and key.tenant_id == PLATFORM
        for key in await store.keys(tenant_id=PLATFORM)
    )


def _admin(text: str, parsed: ParsedKey, pepper: bytes, clock: Clock) -> ApiKey:
    return ApiKey(
        id=parsed.key_id,
        tenant_id=PLATFORM,
        name="admin",
        secret_hash=hash_secret(pepper, parsed.secret),
        scopes=(Scope.ADMIN,),
        created_at=int(clock.unix_s()),
        last4=text[-4:],
    )


def _read_secret(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _write_secret(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as writer:
        writer.write(text + "\n")
        writer.flush()
        os.fsync(descriptor)
    draft.replace(file)
