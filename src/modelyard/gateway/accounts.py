"""Who may ask, and how much: keys and tenants as the gateway holds them.

A new routing table replaces records; what a key or tenant has left of its
limits stays. Everything here is in memory: nobody is asked while a request
waits.
"""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from modelyard.domain.tenants import ApiKey, Identity, Limits, Scope, Tenant
from modelyard.ids import hash_secret, parse_api_key
from modelyard.policy.limits import Allowance, share


@dataclass(slots=True)
class TenantState:
    """A tenant with what is left of its limits."""

    record: Tenant
    allowance: Allowance


@dataclass(slots=True)
class KeyState:
    """A key with what is left of its limits; ``allowances`` are the key's and its tenant's."""

    record: ApiKey
    tenant: TenantState
    allowance: Allowance
    allowances: tuple[Allowance, ...]
    models: frozenset[str] | None
    identity: Identity
    may_infer: bool
    proven: bytes = b""
    """The last token that proved this key, in memory only: comparing it costs a tenth of a hash."""


class Accounts:
    """All keys and tenants. ``workers`` gateway workers divide every limit; this is number ``worker``."""

    def __init__(self, *, worker: int, workers: int) -> None:
        self._worker = worker
        self._workers = workers
        self._keys: dict[bytes, KeyState] = {}
        self._tenants: dict[str, TenantState] = {}

    def take(self, tenants: Iterable[Tenant], keys: Iterable[ApiKey], *, now_s: float) -> None:
        """Replace all records; what was used of a limit stays used."""
        self._tenants = {tenant.id: self._tenant(tenant, now_s) for tenant in tenants}
        found: dict[bytes, KeyState] = {}
        for record in keys:
            if (tenant := self._tenants.get(record.tenant_id)) is not None:
                found[record.id.encode()] = self._key(record, tenant, now_s)
        self._keys = found

    def key(self, token: bytes, pepper: bytes, *, now_unix_s: float) -> tuple[KeyState | None, bool]:
        """Return the key that ``token`` proves (or None), and whether its id is known at all.

        After a rotation the secret before it counts too, until it expires. An unknown id goes through the same
        comparison as a wrong secret, so that time tells nothing (S16).
        """
        state = self._keys.get(token[3:11])
        if state is not None and state.proven and hmac.compare_digest(token, state.proven):
            return state, True
        text = token.decode("latin-1")
        digest = hash_secret(pepper, text[12:55])
        record = state.record if state is not None else None
        is_new = hmac.compare_digest(digest, record.secret_hash if record is not None else _NOBODY)
        is_proven = is_new or (record is not None and _proves_previous(record, digest, now_unix_s))
        if not is_proven or state is None or parse_api_key(text) is None:
            return None, state is not None
        if is_new:
            state.proven = token
        return state, True

    def _tenant(self, record: Tenant, now_s: float) -> TenantState:
        known = self._tenants.get(record.id)
        limits = self._share(record.limits)
        if known is None:
            return TenantState(record, Allowance.full(limits, now_s=now_s))
        if known.record.limits != record.limits:
            known.allowance.change(limits, now_s=now_s)
        known.record = record
        return known

    def _key(self, record: ApiKey, tenant: TenantState, now_s: float) -> KeyState:
        known = self._keys.get(record.id.encode())
        limits = self._share(record.limits)
        if known is None:
            allowance = Allowance.full(limits, now_s=now_s)
        else:
            allowance = known.allowance
            if known.record.limits != record.limits:
                allowance.change(limits, now_s=now_s)
        models = frozenset(record.models) if record.models is not None else None
        identity = Identity(record.id, record.tenant_id, record.scopes)
        return KeyState(
            record,
            tenant,
            allowance,
            (allowance, tenant.allowance),
            models,
            identity,
            identity.may(Scope.INFERENCE),
        )

    def _share(self, limits: Limits) -> Limits:
        return share(limits, index=self._worker, of=self._workers)


def _proves_previous(record: ApiKey, digest: bytes, now_unix_s: float) -> bool:
    previous = record.previous_hash
    if previous is None or not hmac.compare_digest(digest, previous):
        return False
    return now_unix_s < (record.previous_expires_at or 0)


_NOBODY = bytes(32)
