"""What the routes of money share: amounts as people write them, whose they are, who changes what.

Amounts are decimal text (``"12.50"``) or numbers, exact to a billionth of the
currency; nothing is rounded silently.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec

from modelyard.control.api.access import find_tenant, missing
from modelyard.control.context import Context
from modelyard.domain.billing import AuditEntry
from modelyard.domain.tenants import Identity, Scope
from modelyard.errors import idempotency_key_reused, invalid_value
from modelyard.ids import digest_text, new_id
from modelyard.metering.prices import exact_nano
from modelyard.web.routes import Call

IDEMPOTENCY_KEY_MAX = 255
UNIX_MAX = 253_402_300_799
"""The last second of the year 9999."""

Amount = Annotated[
    str | int | float, msgspec.Meta(description='An amount of the currency: a number, or exact text like "0.15".')
]
Moment = Annotated[
    str | int, msgspec.Meta(description="Unix seconds, or an ISO 8601 date or time (UTC unless it says).")
]
N = TypeVar("N", bound="_Named")
TenantRef = Annotated[str, msgspec.Meta(description="Id or name of a tenant; admins only, others have their own.")]


def nano(param: str, amount: Amount, *, most: int, least: int = 0) -> int:
    """Return an amount in whole nano-units.

    Raises:
        ApiError: 400; it is none, has more than nine digits behind the point, or is out of bounds (in whole units).
    """
    text = amount if isinstance(amount, str) else f"{amount:.9f}" if isinstance(amount, float) else str(amount)
    if isinstance(amount, float) and float(text) != amount:
        raise invalid_value(param, 'it has more than nine digits behind the point; send it as text, like "0.15"')
    found = exact_nano(text)
    if found is None or not least <= found <= most * 10**9:
        raise invalid_value(param, f"give an amount up to {most}, with at most nine digits behind the point")
    return found


def moment(param: str, given: Moment) -> int:
    """Return an instant in whole unix seconds.

    Raises:
        ApiError: 400.
    """
    found = given if isinstance(given, int) else _read(param, given)
    if not 0 <= found <= UNIX_MAX:
        raise invalid_value(param, "it is out of range")
    return found


def _read(param: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 12:
        return int(text)
    try:
        read = datetime.fromisoformat(text)
        return int((read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise invalid_value(param, "give unix seconds or an ISO 8601 date, like 2026-12-01") from None


def instant(unix_s: int | None) -> str | None:
    """Return unix seconds as an ISO 8601 time in UTC."""
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def tenant_of(context: Context, identity: Identity, wanted: str) -> str | None:
    """Return the id of the tenant that is asked for; None is every one, which admins see who ask for none.

    Raises:
        ApiError: 404, also for who exists but is none of the caller's business.
    """
    if not wanted:
        return identity.visible_tenant
    if identity.may(Scope.ADMIN):
        return (await find_tenant(context.store, wanted)).id
    if wanted != identity.tenant_id:
        raise missing("tenant", wanted)
    return wanted


async def owner_of(context: Context, identity: Identity, wanted: str) -> str:
    """Return the id of the tenant that is asked for, the caller's own without one.

    Raises:
        ApiError: 404.
    """
    return await tenant_of(context, identity, wanted or identity.tenant_id) or identity.tenant_id


def audit(context: Context, identity: Identity, action: str, subject: str) -> AuditEntry:
    """Return who does what, now."""
    return AuditEntry(context.clock.unix_s(), identity.key_id, identity.tenant_id, action, subject)


class Once(NamedTuple):
    """The id of what a request makes. One with an idempotency key has the same id each time."""

    id: str
    stem: str
    """What the ids of all that this key may have made begin with; "": it came without one."""


class _Named(Protocol):
    @property
    def id(self) -> str: ...


def once(call: Call[Any, Any], prefix: str, subject: str = "") -> Once:
    """Return the id of what ``call`` makes: by its ``Idempotency-Key`` and its body, where it has one.

    So nothing beside the object has to be kept for it to be made once, and the key is good for as long as that is.

    Raises:
        ApiError: 400; it is no key.
    """
    keys = call.request.headers.getlist("idempotency-key")
    if not keys:
        return Once(new_id(prefix), "")
    key = keys[0]
    if len(keys) > 1 or not 0 < len(key) <= IDEMPOTENCY_KEY_MAX or not key.isascii() or not key.isprintable():
        reason = f"send it once, with 1 to {IDEMPOTENCY_KEY_MAX} printable ASCII characters"
        raise invalid_value("Idempotency-Key", reason)
    stem = prefix + digest_text(f"{call.identity.key_id}/{key}".encode(), 20)
    return Once(stem + digest_text(subject.encode() + b"/" + msgspec.json.encode(call.body), 6), stem)


def repeated(wanted: Once, objects: Iterable[N]) -> N | None:
    """Return what the idempotency key of ``wanted`` made before, of these; None: nothing.

    Raises:
        ApiError: 400; it made something else.
    """
    if not wanted.stem:
        return None
    known = next((one for one in objects if one.id.startswith(wanted.stem)), None)
    if known is not None and known.id != wanted.id:
        raise idempotency_key_reused()
    return known


class AuditView(msgspec.Struct, frozen=True, kw_only=True):
    """A change about money. ``before`` and ``after`` are what was and what is, null for nothing."""

    id: str
    object: str = "billing.change"
    at: int
    key_id: str
    tenant_id: str
    action: str
    subject: str
    before: msgspec.Raw | None
    after: msgspec.Raw | None


def change_after(after: str) -> int:
    """Return the place of the change after which a page begins.

    Raises:
        ApiError: 400; it is no id of a change.
    """
    if not after:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) < 19):
        raise invalid_value("after", "no object of this list has this id")
    return int(after)


def audit_view(entry: AuditEntry) -> AuditView:
    """Return an entry as it is shown."""
    return AuditView(
        id=str(entry.sequence),
        at=int(entry.at),
        key_id=entry.key_id,
        tenant_id=entry.tenant_id,
        action=entry.action,
        subject=entry.subject,
        before=_raw(entry.before),
        after=_raw(entry.after),
    )


def _raw(text: str) -> msgspec.Raw | None:
    if not text:
        return None
    # A number of an invoice is plain text; all else is JSON already.
    return msgspec.Raw(text.encode() if text[0] in "{[" else msgspec.json.encode(text))
