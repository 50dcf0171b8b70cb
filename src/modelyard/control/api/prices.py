"""Price lists: what a model costs, for whom, from when to when.

Admins change them; a tenant sees the prices that are for all, and its own. A
price that has begun is never changed, only followed or ended, so that the list
says for every day of the past what it cost.
"""

import asyncio
from typing import Annotated

import msgspec

from modelyard.control.api import money
from modelyard.control.api.access import find_tenant, missing
from modelyard.control.api.money import Amount, AuditView, Moment, TenantRef, audit_view, instant
from modelyard.control.context import Context
from modelyard.domain.catalog import NAME_PATTERN
from modelyard.domain.prices import ANY_MODEL, PriceEntry
from modelyard.domain.tenants import Scope
from modelyard.domain.usage import MICRO_PER_UNIT, Price
from modelyard.errors import conflict, invalid_value
from modelyard.ids import new_id
from modelyard.metering.prices import REQUEST_USD_MAX, UNIT_USD_MAX, USD_MAX, configured
from modelyard.policy.money import exact, shown
from modelyard.policy.pricelist import best, in_force
from modelyard.policy.pricing import TOKENS_PER_PRICE
from modelyard.stores import AlreadyExistsError
from modelyard.web.paging import LIMIT_DEFAULT, After, Limit, Page, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

_Model = Annotated[str, msgspec.Meta(description='Endpoint name; "*" prices all that have no price of their own.')]
_Version = Annotated[str, msgspec.Meta(description="Only what this version answers.")]


_Part = Amount | msgspec.UnsetType


class PutPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price to be set, per one million tokens, per unit and per request.

    What is left out is free, and may only be left out where it was free until then.
    """

    model: _Model
    version: _Version = ""
    tenant: Annotated[str, msgspec.Meta(description="Only for this tenant (id or name).")] = ""
    input: Annotated[_Part, msgspec.Meta(description="Prompt tokens that were computed. Left out: free.")] = (
        msgspec.UNSET
    )
    cached_input: Annotated[Amount | None, msgspec.Meta(description="Left out: as ``input``.")] = None
    output: Annotated[_Part, msgspec.Meta(description="Generated tokens, reasoning too. Left out: free.")] = (
        msgspec.UNSET
    )
    unit: Annotated[
        _Part, msgspec.Meta(description="A second, picture, character or search; not per million. Left out: free.")
    ] = msgspec.UNSET
    request: Annotated[
        _Part, msgspec.Meta(description="One request in which anything was counted. Left out: free.")
    ] = msgspec.UNSET
    batch_factor: Annotated[
        Amount | None,
        msgspec.Meta(description="What lines of batches pay of it, 0 to 1. Left out: ``batch.price_factor``."),
    ] = None
    effective_from: Annotated[Moment | None, msgspec.Meta(description="Not in the past. Left out: now.")] = None
    effective_until: Annotated[Moment | None, msgspec.Meta(description="Left out: for ever.")] = None


class PriceView(msgspec.Struct, frozen=True, kw_only=True):
    """A price. Amounts are exact decimals of the currency, as text."""

    id: str
    object: str = "price"
    source: str
    """``stored``, or ``configured`` in the settings file."""
    model: str
    version: str
    tenant_id: str
    """"": for all."""
    currency: str
    input: str
    cached_input: str
    output: str
    unit: str
    request: str
    batch_factor: str | None
    """None: ``batch.price_factor`` of the settings."""
    effective_from: int
    effective_until: int | None
    starts: str | None
    """``effective_from`` as ISO 8601."""
    ends: str | None
    is_in_force: bool
    """It applies now, where none that is closer does."""


class PricesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which prices."""

    model: Annotated[str, msgspec.Meta(description="Only this model's.")] = ""
    tenant: TenantRef = ""
    limit: Limit = LIMIT_DEFAULT
    after: After = ""


class ApplyingQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For which request."""

    model: Annotated[str, msgspec.Meta(description="Endpoint name.")] = ""
    version: _Version = ""
    tenant: TenantRef = ""
    at: Annotated[Moment | None, msgspec.Meta(description="When it arrives. Left out: now.")] = None


class ApplyingPrice(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a request, and those that it goes before."""

    object: str = "price.applying"
    at: int
    price: PriceView | None
    """null: metered and free."""
    others: list[PriceView]


class HistoryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of changes."""

    limit: Limit = LIMIT_DEFAULT
    after: After = ""


class Prices:
    """The routes of price lists."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._currency = context.config.billing.currency
        self._configured = configured(context.config.prices)
        self._changing = asyncio.Lock()

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, admin, manage = "/v1/prices", Scope.ADMIN, Scope.MANAGE
        example = {"model": "chat", "input": "0.15", "output": "0.60", "effective_from": "2027-01-01"}
        history, applying = f"{every}/history", f"{every}/applying"
        return [
            Route("GET", every, manage, "List prices", self.page, Empty, PricesQuery, Page[PriceView]),
            Route("PUT", every, admin, "Set a price", self.put, PutPrice, Empty, PriceView, 200, example),
            Route("GET", applying, manage, "Which price applies", self.applying, Empty, ApplyingQuery, ApplyingPrice),
            Route("GET", history, admin, "Who changed prices", self.history, Empty, HistoryQuery, Page[AuditView]),
            Route("DELETE", f"{every}/{{price}}", admin, "End a price", self.end, Empty, Empty, PriceView),
        ]

    async def page(self, call: Call[Empty, PricesQuery]) -> Page[PriceView]:
        """Return stored and configured prices: those for all, and the tenant's own."""
        query = call.query
        tenant_id = await money.tenant_of(self._context, call.identity, query.tenant)
        entries = [
            one
            for one in [*await self._context.billing.prices(), *self._configured]
            if (tenant_id is None or one.tenant_id in ("", tenant_id)) and query.model in ("", one.model)
        ]
        rows, has_more = page_of(entries, limit=query.limit, after=query.after, id_of=lambda one: one.id)
        return Page([self._view(one) for one in rows], has_more)

    async def put(self, call: Call[PutPrice, Empty]) -> PriceView:
        """Set a price from now or from a later moment on; at the gateways when the answer is sent."""
        context, body, identity = self._context, call.body, call.identity
        now = int(context.clock.unix_s())
        since = now if body.effective_from is None else money.moment("effective_from", body.effective_from)
        until = None if body.effective_until is None else money.moment("effective_until", body.effective_until)
        if since < now:
            raise invalid_value("effective_from", "a price cannot begin in the past: what was used then is billed")
        if until is not None and until <= since:
            raise invalid_value("effective_until", "it must be after 'effective_from'")
        model, version = _subject(body)
        tenant_id = (await find_tenant(context.store, body.tenant)).id if body.tenant else ""
        entry = PriceEntry(
            id=new_id("price-"),
            model=model,
            price=_price(body),
            effective_from=since,
            effective_until=until,
            tenant_id=tenant_id,
            version=version,
            created_at=now,
            created_by=identity.key_id,
        )
        change = money.audit(context, identity, "price.set", entry.id)
        async with self._changing:
            await self._check_left_out(body, entry)
            try:
                await context.billing.put_price(entry, change, now=now)
            except AlreadyExistsError:
                # One that was set in this very second has begun, and stays: this one follows it.
                entry = msgspec.structs.replace(entry, effective_from=now + 1)
                if until is not None and until <= entry.effective_from:
                    raise invalid_value("effective_until", "it must be after 'effective_from'") from None
                await context.billing.put_price(entry, change, now=now)
            await self._publish()
        return self._view(entry)

    async def end(self, call: Call[Empty, Empty]) -> PriceView:
        """End a price now, or forget one that is to come; what was used stays billed by it."""
        context, price_id = self._context, call.path("price")
        if any(one.id == price_id for one in self._configured):
            raise conflict("This price is configured: change [prices] in the settings file and restart.")
        now = context.clock.unix_s()
        async with self._changing:
            change = money.audit(context, call.identity, "price.end", price_id)
            before = await context.billing.end_price(price_id, change, now=now)
            if before is None:
                raise missing("price", price_id)
            await self._publish()
        if before.effective_from <= now:
            before = msgspec.structs.replace(before, effective_until=max(int(now), before.effective_from))
        return self._view(before)

    async def _check_left_out(self, body: PutPrice, entry: PriceEntry) -> None:
        """Refuse to make free, unsaid, what costs something until this price begins."""
        before = best(
            [*await self._context.billing.prices(), *self._configured],
            tenant_id=entry.tenant_id,
            model=entry.model,
            version=entry.version,
            now_unix_s=entry.effective_from,
        )
        if before is None:
            return
        for name in ("input", "output", "unit", "request"):
            if getattr(body, name) is msgspec.UNSET and (cost := getattr(before.price, name)):
                amount = shown(cost // TOKENS_PER_PRICE if name == "unit" else cost, self._currency)
                reason = f"a price is set whole, what is left out is free, and this costs {amount} until then; send it"
                raise invalid_value(name, f"{reason}, or 0 to make it free")

    async def applying(self, call: Call[Empty, ApplyingQuery]) -> ApplyingPrice:
        """Say which price a request would be billed by, and which others there are for it."""
        context, query = self._context, call.query
        at = int(context.clock.unix_s()) if query.at is None else money.moment("at", query.at)
        tenant_id = await money.owner_of(context, call.identity, query.tenant)
        model = query.model or ANY_MODEL
        entries = [*await context.billing.prices(), *self._configured]
        found: list[PriceEntry] = []
        while (
            one := best(entries, tenant_id=tenant_id, model=model, version=query.version, now_unix_s=at)
        ) is not None:
            found.append(one)
            entries = [other for other in entries if other.id != one.id]
        views = [self._view(one, at=at) for one in found]
        return ApplyingPrice(at=at, price=views[0] if views else None, others=views[1:])

    async def history(self, call: Call[Empty, HistoryQuery]) -> Page[AuditView]:
        """Return who set and ended which price, newest first."""
        query = call.query
        after = money.change_after(query.after)
        entries = await self._context.billing.audit(limit=query.limit + 1, after=after, prefix="price.")
        return Page([audit_view(one) for one in entries[: query.limit]], len(entries) > query.limit)

    async def _publish(self) -> None:
        self._context.terms.void()
        await self._context.refresh()

    def _view(self, entry: PriceEntry, *, at: float | None = None) -> PriceView:
        price = entry.price
        return PriceView(
            id=entry.id,
            source="configured" if entry.id.startswith("configured:") else "stored",
            model=entry.model,
            version=entry.version,
            tenant_id=entry.tenant_id,
            currency=self._currency,
            input=exact(price.input),
            cached_input=exact(price.cached_input),
            output=exact(price.output),
            unit=exact(price.unit // TOKENS_PER_PRICE),
            request=exact(price.request),
            batch_factor=None if price.batch_micro is None else exact(price.batch_micro * 1000),
            effective_from=entry.effective_from,
            effective_until=entry.effective_until,
            starts=instant(entry.effective_from) if entry.effective_from else None,
            ends=instant(entry.effective_until),
            is_in_force=in_force(entry, self._context.clock.unix_s() if at is None else at),
        )


def _subject(body: PutPrice) -> tuple[str, str]:
    """Return model and version; ``NAME@VERSION`` is both."""
    model, _, labelled = body.model.partition("@")
    version = body.version or labelled
    if labelled and body.version not in ("", labelled):
        raise invalid_value("version", "'model' names another one")
    if model != ANY_MODEL and NAME_PATTERN.fullmatch(model) is None:
        raise invalid_value("model", f"'{model[:100]}' is not a possible endpoint name, nor '*'")
    if model == ANY_MODEL and version:
        raise invalid_value("version", "a version needs the model that it is of")
    if len(version) > 100 or not version.isprintable():
        raise invalid_value("version", "it is no version")
    return model, version


def _price(body: PutPrice) -> Price:
    amount = _nano("input", body.input, most=USD_MAX)
    cached = amount if body.cached_input is None else money.nano("cached_input", body.cached_input, most=USD_MAX)
    factor = None if body.batch_factor is None else money.nano("batch_factor", body.batch_factor, most=1)
    if factor is not None and factor % 1000:
        raise invalid_value("batch_factor", "at most six digits behind the point")
    price = Price(
        input=amount,
        cached_input=cached,
        output=_nano("output", body.output, most=USD_MAX),
        unit=_nano("unit", body.unit, most=UNIT_USD_MAX) * TOKENS_PER_PRICE,
        request=_nano("request", body.request, most=REQUEST_USD_MAX),
        batch_micro=None if factor is None else factor * MICRO_PER_UNIT // 10**9,
    )
    if factor is not None and not any((price.input, price.cached_input, price.output, price.unit, price.request)):
        raise invalid_value("batch_factor", "a price is set whole, and this one would be free: send its amounts, too")
    return price


def _nano(param: str, amount: _Part, *, most: int) -> int:
    return 0 if isinstance(amount, msgspec.UnsetType) else money.nano(param, amount, most=most)
