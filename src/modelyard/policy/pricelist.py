"""Which price applies: the ladder of price lists.

    tenant and model and version  >  tenant and model  >  tenant and "*"  >  model@version  >  model  >  "*"

The first of these that has an entry for the instant decides; among entries of
one kind the one that began last. Configured prices are on the same ladder as
if they had begun before all time, so a stored entry of the same kind goes
before them, and a configured price of a model before a stored one of ``"*"``.

The instant is the arrival of the request: what it can cost is known before it
begins, and a change touches nothing that has begun. Gateways are told all
entries, those to come too, and need nobody when one begins.

Pure: no clock.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from modelyard.domain.prices import ANY_MODEL, PriceEntry, Tariff
from modelyard.domain.usage import Price
from modelyard.policy.pricing import batch_price, dearest

NEVER = float("inf")


class Sheet(NamedTuple):
    """The prices of an endpoint for a tenant, as they are from ``since`` to ``until`` (unix seconds)."""

    base: Price
    by_version: Mapping[str, Price]
    """Of the versions that have one of their own."""
    most: Price
    """A price that none is above: which release will answer is not known before."""
    since: float
    until: float

    def of(self, version_id: str) -> Price:
        """Return what an answer of this version costs."""
        return self.by_version.get(version_id, self.base)

    def for_batch(self, factor_micro: int) -> "Sheet":
        """Return the same for lines of a batch; prices without a factor of their own have this one."""
        by_version = {version_id: batch_price(price, factor_micro) for version_id, price in self.by_version.items()}
        base = batch_price(self.base, factor_micro)
        return Sheet(base, by_version, most_of(base, by_version), self.since, self.until)


def most_of(base: Price, by_version: Mapping[str, Price]) -> Price:
    """Return a price that none of these is above."""
    for price in by_version.values():
        base = dearest(base, price)
    return base


def in_force(entry: PriceEntry, now_unix_s: float) -> bool:
    """Say whether an entry applies now, if nothing stronger does."""
    until = entry.effective_until
    return entry.effective_from <= now_unix_s and (until is None or now_unix_s < until)


def strength(entry: PriceEntry) -> tuple[bool, bool, bool, int, int]:
    """Return what entries are ordered by: the strongest is the greatest."""
    is_bound = entry.tenant_id != "", entry.version != "", entry.model != ANY_MODEL
    # Of two that begin together, which a store never has, the one that was written last.
    return (*is_bound, entry.effective_from, entry.created_at)


def best(
    entries: Iterable[PriceEntry], *, tenant_id: str, model: str, version: str, now_unix_s: float
) -> PriceEntry | None:
    """Return the entry that prices a request which arrives now, None where none does."""
    fitting = (
        entry
        for entry in entries
        if entry.tenant_id in ("", tenant_id)
        and entry.model in (ANY_MODEL, model)
        and entry.version in ("", version)
        and in_force(entry, now_unix_s)
    )
    return max(fitting, key=strength, default=None)


def line_price(
    entries: Iterable[PriceEntry],
    *,
    tenant_id: str,
    model: str,
    version: str = "",
    factor_micro: int,
    now_unix_s: float,
) -> Price:
    """Return what a line of a batch costs that would arrive now and that ``version`` answers, "" if any."""
    entry = best(entries, tenant_id=tenant_id, model=model, version=version, now_unix_s=now_unix_s)
    return batch_price(Price() if entry is None else entry.price, factor_micro)


def tariffs(
    entries: Sequence[PriceEntry],
    configured: Sequence[PriceEntry],
    *,
    name: str,
    versions: Mapping[str, Sequence[str]],
    owner: str,
) -> tuple[Tariff, ...]:
    """Return all prices of the endpoint ``name``, the strongest first; empty where nothing stored concerns it.

    ``versions`` has the ids by version label, ``owner`` is the only tenant that may call it, "" where all may.
    ``configured`` stand below stored ones of their kind.
    """

    def concerns(entry: PriceEntry) -> bool:
        is_asked = entry.model in (ANY_MODEL, name) and (not entry.version or entry.version in versions)
        return is_asked and (not owner or entry.tenant_id in ("", owner))

    stored = [entry for entry in entries if concerns(entry)]
    if not stored:
        return ()
    ordered = sorted([*(one for one in configured if concerns(one)), *stored], key=strength, reverse=True)
    return tuple(
        Tariff(one.tenant_id, version_id, one.effective_from, one.effective_until or 0, one.price)
        for one in ordered
        for version_id in (versions[one.version] if one.version else ("",))
    )


def sheet(listed: Sequence[Tariff], *, tenant_id: str, version_ids: Iterable[str], now_unix_s: float) -> Sheet:
    """Return the prices that apply to requests of a tenant now, and for how long they do."""
    mine = [one for one in listed if one.tenant_id in ("", tenant_id)]
    edges = [float(one.since) for one in mine] + [float(one.until) for one in mine if one.until]
    valid = [one for one in mine if one.since <= now_unix_s and (not one.until or now_unix_s < one.until)]

    def first(version_id: str) -> Price:
        return next((one.price for one in valid if one.version_id in ("", version_id)), Price())

    base = first("")
    by_version = {one: price for one in version_ids if (price := first(one)) != base}
    since = max((edge for edge in edges if edge <= now_unix_s), default=-NEVER)
    until = min((edge for edge in edges if edge > now_unix_s), default=NEVER)
    return Sheet(base, by_version, most_of(base, by_version), since, until)
