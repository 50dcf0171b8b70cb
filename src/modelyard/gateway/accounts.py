"""Who may ask, and how much: keys and tenants as the gateway holds them.

``Accounts.reserve`` is the one admission by limits: every way in, whatever its
route, goes through it. It looks at all limits and quotas of key and tenant
first and then takes from all of them together, so that a refused request costs
nothing; ``Reservation.settle`` puts what was used in the place of the worst case.

A new routing table replaces records; what a key or tenant has left of its
limits stays. Everything here is in memory: nobody is asked while a request
waits.
"""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from modelyard.domain.routing_table import Tidings
from modelyard.domain.tenants import ApiKey, Identity, Limits, Scope, Tenant, model_subject
from modelyard.domain.usage import Price
from modelyard.gateway.refusals import limited, out_of_quota
from modelyard.gateway.shares import Shares
from modelyard.ids import hash_secret, parse_api_key
from modelyard.metering.journal import Journal
from modelyard.policy.limits import Allowance, reserve, settle
from modelyard.policy.pricing import billed, cost, micro_units
from modelyard.policy.quotas import Hold, Quota, QuotaBook

SET_BACK_S = 1.0
"""A clock that shows so much less than before was set back; less than that is how clocks are kept right."""
_NO_MODELS: Mapping[str, Allowance] = {}
_NO_BUDGETS: Mapping[str, Quota] = {}
_NOTHING: Mapping[str, Any] = {}
T = TypeVar("T")


@dataclass(slots=True)
class TenantState:
    """A tenant with what is left of its limits."""

    record: Tenant
    allowance: Allowance
    models: Mapping[str, Allowance]
    quota: Quota | None
    budgets: Mapping[str, Quota]
    """Of single models, by name."""


@dataclass(slots=True)
class KeyState:
    """A key with what is left of its limits.

    ``allowances`` are the key's and its tenant's; ``by_model`` has them together with those for a model, for the models
    that the key or the tenant has limits for. ``quotas`` are the key's and its tenant's, as far as there are any, and
    ``quotas_by_model`` these together with those of a model, for models that have a budget.
    """

    record: ApiKey
    tenant: TenantState
    allowance: Allowance
    allowances: tuple[Allowance, ...]
    by_model: Mapping[str, tuple[Allowance, ...]]
    own_models: Mapping[str, Allowance]
    quotas: tuple[Quota, ...]
    quotas_by_model: Mapping[str, tuple[Quota, ...]]
    models: frozenset[str] | None
    identity: Identity
    may_infer: bool
    proven: bytes = b""
    """The last token that proved this key, in memory only: comparing it costs a tenth of a hash."""

    @property
    def has_quotas(self) -> bool:
        """Say whether any quota bounds its requests."""
        return bool(self.quotas or self.quotas_by_model)

    def quotas_for(self, model: str) -> tuple[Quota, ...]:
        """Return the quotas that bound a request for a model."""
        return self.quotas_by_model.get(model, self.quotas) if self.quotas_by_model else self.quotas


class Reservation:
    """What one request holds of its key's and tenant's limits, from its admission to its end.

    ``at_unix_s`` is the arrival that the request must be billed by: the day and month in which it counts.
    """

    __slots__ = ("_accounts", "_begun_s", "_hold", "_price", "allowances", "at_unix_s", "tokens")

    def __init__(
        self,
        accounts: "Accounts",
        allowances: tuple[Allowance, ...],
        tokens: int,
        hold: Hold | None,
        price: Price,
        begun_s: float,
        at_unix_s: float,
    ) -> None:
        self._accounts = accounts
        self._hold = hold
        self._price = price
        self._begun_s = begun_s
        self.allowances = allowances
        self.tokens = tokens
        self.at_unix_s = at_unix_s

    def __repr__(self) -> str:
        return f"<Reservation of {self.tokens} tokens from {len(self.allowances)} allowances>"

    def settle(
        self,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        *,
        now_s: float,
        units: float = 0.0,
        price: Price | None = None,
    ) -> None:
        """Give back what was not used; exactly once, in the turn in which the settlement goes to the journal.

        ``price`` is of the release that answered; None: what was reserved for.
        """
        used = prompt_tokens + completion_tokens
        settle(self.allowances, reserved_tokens=self.tokens, used_tokens=used, seconds=now_s - self._begun_s)
        if self._hold is not None:
            self._accounts.settle(
                self._hold, billed(price or self._price, prompt_tokens, cached_tokens, completion_tokens, units)
            )


class Accounts:
    """All keys and tenants. ``workers`` gateway workers divide every limit; this is number ``worker``.

    ``source`` is the name of its journal, another than usual when it relieves a worker that still runs. ``currency`` is
    what refusals name amounts in.
    """

    def __init__(self, *, worker: int, workers: int, source: str = "", currency: str = "USD") -> None:
        self._currency = currency
        self._keys: dict[bytes, KeyState] = {}
        self._tenants: dict[str, TenantState] = {}
        self._journal: Journal | None = None
        self._latest_unix_s = 0.0
        self._lapsed: set[tuple[str, int]] = set()
        """Keys, and secrets before a rotation, that had expired when the clock was set back: id and end."""
        self.shares = Shares(worker, workers)
        self.quotas = QuotaBook(worker=worker, workers=workers)
        self.quotas.source = source or self.quotas.source

    # --- records ---

    def attach(self, journal: Journal) -> None:
        """Follow where settlements stand in ``journal``; until then, requests that a quota bounds are refused."""
        self._journal = journal
        self.quotas.source, self.quotas.required = journal.source, journal.position

    def take(self, tenants: Iterable[Tenant], keys: Iterable[ApiKey], *, now_s: float) -> None:
        """Replace all records; what was used of a limit stays used."""
        self.shares.begin(now_s)
        self._tenants = {tenant.id: self._tenant(tenant, now_s) for tenant in tenants}
        found: dict[bytes, KeyState] = {}
        for record in keys:
            if (tenant := self._tenants.get(record.tenant_id)) is not None:
                found[record.id.encode()] = self._key(record, tenant, now_s)
        self._keys = found
        if self._lapsed:
            self._lapsed = {one for one in self._lapsed if one[0].encode() in found}
        owners: list[Tenant | ApiKey] = [state.record for state in self._tenants.values()]
        owners += [state.record for state in found.values()]
        of_models = {model_subject(owner.id, model) for owner in owners for model in owner.limits.model_budgets}
        self.quotas.keep_only(frozenset(of_models | {owner.id for owner in owners}))

    def hear(self, tidings: Tidings, *, now_unix_s: float) -> None:
        """Take the ledger's sums for keys and tenants that have quotas."""
        if self._journal is None:
            return
        position = self._journal.position
        if self.quotas.required is None:
            self.quotas.required = position
        if position is not None and self.quotas.has_unplaced:
            # Their own write had failed; they stand somewhere before this place.
            self._place()
        self.seen(now_unix_s)
        self.quotas.advance(now_unix_s)
        self.quotas.hear(tidings.spent, tidings.delivered)

    def seen(self, now_unix_s: float) -> float:
        """Return the time to judge by what has expired; what had, stays so when the clock is set back."""
        if now_unix_s >= self._latest_unix_s:
            self._latest_unix_s = now_unix_s
        elif now_unix_s < self._latest_unix_s - SET_BACK_S:
            self._lapse(self._latest_unix_s)
            self._latest_unix_s = now_unix_s
        return self._latest_unix_s

    def is_over(self, record: ApiKey, now_unix_s: float) -> bool:
        """Say whether a key has expired, now or before the clock was set back."""
        end = record.expires_at
        return end is not None and (end <= now_unix_s or (record.id, end) in self._lapsed)

    def _lapse(self, latest_unix_s: float) -> None:
        """Remember what had expired; keys that are made later, or prolonged, go by the clock as it is then."""
        for state in self._keys.values():
            record = state.record
            for end in (record.expires_at, record.previous_expires_at):
                if end is not None and end <= latest_unix_s:
                    self._lapsed.add((record.id, end))

    def arrival(self, key: KeyState, model: str, now_unix_s: float) -> float:
        """Return the time to bill a request by that arrives now: it has the price of that time, too."""
        return self.quotas.arrival(now_unix_s) if key.quotas_for(model) else now_unix_s

    def by_id(self, key_id: str) -> KeyState | None:
        """Return the key of this id, whoever asks."""
        return self._keys.get(key_id.encode())

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
        is_proven = is_new or (record is not None and self._proves_previous(record, digest, now_unix_s))
        if not is_proven or state is None or parse_api_key(text) is None:
            return None, state is not None
        if is_new:
            state.proven = token
        return state, True

    def _proves_previous(self, record: ApiKey, digest: bytes, now_unix_s: float) -> bool:
        previous, end = record.previous_hash, record.previous_expires_at or 0
        if previous is None or not hmac.compare_digest(digest, previous):
            return False
        return now_unix_s < end and (record.id, end) not in self._lapsed

    # --- requests ---

    def reserve(  # noqa: PLR0913 - everything that admission looks at
        self,
        key: KeyState,
        *,
        model: str,
        price: Price,
        prompt_tokens: int,
        output_tokens: int,
        now_s: float,
        now_unix_s: float,
        prompt_max: int = 0,
        output_max: int = 0,
        units: float = 0.0,
    ) -> Reservation:
        """Take a request at its worst case from everything that bounds it, or from nothing.

        ``model`` is the endpoint's name (not what the caller called it). ``output_tokens`` is the most that all choices
        together can generate. ``prompt_tokens`` is an estimate, which rates may use; quotas take ``prompt_max`` and
        ``output_max`` where these are more, since they must never be exceeded. ``units`` are the most seconds, pictures
        or the like.

        Raises:
            ApiError: 429 with ``limits`` set; 503 when nothing is known yet of a quota.
        """
        allowances = key.by_model.get(model, key.allowances) if key.by_model else key.allowances
        tokens = prompt_tokens + output_tokens
        quotas = key.quotas_for(model)
        hold = None
        quota_tokens = quota_nanousd = 0
        if quotas:
            prompt_max = max(prompt_max, prompt_tokens)
            output_max = max(output_max, output_tokens)
            quota_tokens = prompt_max + output_max
            quota_nanousd = _worst(price, prompt_max, output_max, units)
            refused = self.quotas.refusal(quotas, quota_tokens, quota_nanousd, now_unix_s=now_unix_s)
            if refused is not None:
                raise out_of_quota(refused, allowances, now_s, self._currency)
        if now_s >= self.shares.due_s:
            self.shares.recheck(now_s)
        refusal = reserve(allowances, needed_tokens=tokens, least_tokens=prompt_tokens, now_s=now_s)
        if refusal is not None:
            self.shares.refused(allowances, refusal, tokens)
            raise limited(refusal, prompt_tokens, allowances, now_s)
        if quotas:
            hold = self.quotas.hold(quotas, quota_tokens, quota_nanousd)
            now_unix_s = self.quotas.arrival(now_unix_s)
        return Reservation(self, allowances, tokens, hold, price, now_s, now_unix_s)

    def settle(self, hold: Hold, billed: tuple[int, int]) -> None:
        """End a request's hold on its quotas; ``billed`` are tokens and nano-dollars as the ledger will have them."""
        self.quotas.settle(hold, *billed)
        if self._journal is not None and self.quotas.has_unplaced:
            self._journal.on_written = self._place

    def _place(self) -> None:
        assert self._journal is not None, "only a journal calls this"
        if (position := self._journal.position) is not None:
            self.quotas.placed(position)
            self._journal.on_written = None

    # --- from records to states ---

    def _tenant(self, record: Tenant, now_s: float) -> TenantState:
        known = self._tenants.get(record.id)
        quota = self.quotas.quota(record.id, record.limits, is_tenants=True)
        allowance = self.shares.allowance(record.id, record.limits, known.allowance if known else None, now_s=now_s)
        models = self._models(record.id, record.limits, known.models if known else _NO_MODELS, now_s)
        budgets = self._budgets(record.id, record.limits, is_tenants=True)
        if known is None:
            return TenantState(record, allowance, models, quota, budgets)
        known.record, known.models, known.quota, known.budgets = record, models, quota, budgets
        return known

    def _key(self, record: ApiKey, tenant: TenantState, now_s: float) -> KeyState:
        known = self._keys.get(record.id.encode())
        allowance = self.shares.allowance(record.id, record.limits, known.allowance if known else None, now_s=now_s)
        own_models = self._models(record.id, record.limits, known.own_models if known else _NO_MODELS, now_s)
        allowances = (allowance, tenant.allowance)
        quota = self.quotas.quota(record.id, record.limits, is_tenants=False)
        quotas = tuple(one for one in (quota, tenant.quota) if one is not None)
        own_budgets = self._budgets(record.id, record.limits, is_tenants=False)
        identity = Identity(record.id, record.tenant_id, record.scopes)
        return KeyState(
            record=record,
            tenant=tenant,
            allowance=allowance,
            allowances=allowances,
            by_model=_by_model(allowances, own_models, tenant.models),
            own_models=own_models,
            quotas=quotas,
            quotas_by_model=_by_model(quotas, own_budgets, tenant.budgets),
            models=frozenset(record.models) if record.models is not None else None,
            identity=identity,
            may_infer=identity.may(Scope.INFERENCE),
        )

    def _models(
        self, owner_id: str, limits: Limits, known: Mapping[str, Allowance], now_s: float
    ) -> Mapping[str, Allowance]:
        """Return the allowances for single models; those that there were keep what was used of them."""
        if not limits.models:
            return _NO_MODELS
        return {
            name: self.shares.allowance(f"{owner_id}/{name}", rates, known.get(name), now_s=now_s)
            for name, rates in limits.models.items()
        }

    def _budgets(self, owner_id: str, limits: Limits, *, is_tenants: bool) -> Mapping[str, Quota]:
        """Return the budgets of single models, as quotas of their own."""
        if not limits.model_budgets:
            return _NO_BUDGETS
        found = {
            name: self.quotas.quota(
                model_subject(owner_id, name), Limits(nanousd_per_month=most), is_tenants=is_tenants, model=name
            )
            for name, most in limits.model_budgets.items()
        }
        return {name: quota for name, quota in found.items() if quota is not None}


def _by_model(every: tuple[T, ...], of_key: Mapping[str, T], of_tenant: Mapping[str, T]) -> Mapping[str, tuple[T, ...]]:
    """Return ``every`` together with what there is for a model, for the models that there is something for."""
    if not of_key and not of_tenant:
        return _NOTHING
    return {
        name: (*every, *(models[name] for models in (of_key, of_tenant) if name in models))
        for name in {*of_key, *of_tenant}
    }


def _worst(price: Price, prompt_tokens: int, output_tokens: int, units: float) -> int:
    """Return what this can cost at most, whether a cached prompt is cheaper than a new one or dearer."""
    micro = micro_units(units)
    return max(cost(price, prompt_tokens, cached, output_tokens, micro) for cached in (0, prompt_tokens))


_NOBODY = bytes(32)
