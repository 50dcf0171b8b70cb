"""Which requests a question to the ledger is about: its time, and what its caller may see."""

import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Annotated, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from modelyard.control.api.access import find_endpoint, find_key, find_tenant, missing
from modelyard.control.context import Context
from modelyard.domain.tenants import Identity, Scope
from modelyard.domain.usage import UsageBucket, UsageFilter
from modelyard.errors import ApiError, invalid_value
from modelyard.stores import TooManyGroupsError, UsageStore

GROUPS = (
    "tenant", "key", "model", "endpoint", "version", "route", "status", "batch", "minute", "hour", "day", "month",
)  # fmt: skip
SPAN_DEFAULT_S = 86400
ENDPOINT_ID = "ep-"
"""How ids of endpoints begin."""
UNIX_MAX = 253_402_300_799
"""The last second of the year 9999."""

Moment = Annotated[str, msgspec.Meta(description="Unix seconds, or an ISO 8601 date or time (of 'tz' unless it says).")]
Tz = Annotated[str, msgspec.Meta(max_length=64, description="IANA time zone of days and months, like Asia/Kolkata.")]


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests."""

    since: Moment = ""
    until: Moment = ""
    tz: Tz = "UTC"
    key: Annotated[str, msgspec.Meta(description="Only this key's.")] = ""
    model: Annotated[str, msgspec.Meta(description="Only this model's.")] = ""
    endpoint: Annotated[str, msgspec.Meta(description="Only this endpoint's, by its name, or by its id.")] = ""
    tenant: Annotated[
        str, msgspec.Meta(description="Only this tenant's, by its id or name (admin; others see their own).")
    ] = ""
    batch: Annotated[bool | None, msgspec.Meta(description="Only lines of batches, or only others.")] = None


class Chosen(NamedTuple):
    """Rows to ask for."""

    where: UsageFilter
    since: float
    until: float
    zone: ZoneInfo
    rows_since: int


async def choose(context: Context, identity: Identity, asked: Selection) -> Chosen:
    """Return what ``identity`` may see of what it asks for.

    Raises:
        ApiError: 400 for a bad time, 404 for what is not there or not the caller's.
    """
    zone, now = zone_of(asked.tz), context.clock.unix_s()
    until = moment_of("until", asked.until, now, zone)
    since = moment_of("since", asked.since, max(until - SPAN_DEFAULT_S, 0.0), zone)
    if since > until:
        raise invalid_value("since", "it is after 'until'")
    where = await visible(
        context,
        identity,
        tenants=(asked.tenant,) if asked.tenant else (),
        keys=(asked.key,) if asked.key else (),
        models=(asked.model,) if asked.model else (),
        endpoints=(await _endpoint_id(context, identity, asked.endpoint),) if asked.endpoint else (),
        is_batch=asked.batch,
    )
    kept = await context.usage.kept_since()
    return Chosen(where, exact(since, kept), exact(until, kept), zone, kept)


async def _endpoint_id(context: Context, identity: Identity, reference: str) -> str:
    """Return an endpoint's id; one that is gone has no name any more, and its id is taken as it is.

    Raises:
        ApiError: 404, there is none of this name.
    """
    try:
        return (await find_endpoint(context.store, identity, reference)).id
    except ApiError as error:
        if error.status == 404 and reference.startswith(ENDPOINT_ID):
            return reference
        raise


async def visible(
    context: Context,
    identity: Identity,
    *,
    tenants: tuple[str, ...],
    keys: tuple[str, ...],
    models: tuple[str, ...] = (),
    endpoints: tuple[str, ...] = (),
    is_batch: bool | None = None,
) -> UsageFilter:
    """Return a filter by what is asked, within what ``identity`` may see.

    Raises:
        ApiError: 404 for another's tenant or key, and for one that is not there.
    """
    tenants = tuple([await _tenant_id(context, identity, tenant) for tenant in tenants])
    if not identity.may(Scope.MANAGE):
        if foreign := [key for key in keys if key != identity.key_id]:
            raise missing("key", foreign[0])
        keys = (identity.key_id,)
    elif keys:
        owners = {(await find_key(context.store, identity, key)).tenant_id for key in keys}
        # A key's requests lie among its tenant's, and are found there.
        tenants = tenants or tuple(sorted(owners))
    if not tenants and not identity.may(Scope.ADMIN):
        tenants = (identity.tenant_id,)
    return UsageFilter(tenants, keys, models, endpoints, is_batch=is_batch)


async def _tenant_id(context: Context, identity: Identity, reference: str) -> str:
    """Return the id of a tenant that is named by it, or by its name: its rows have nothing else."""
    if reference == identity.tenant_id:
        return reference
    if not identity.may(Scope.ADMIN):
        own = await find_tenant(context.store, identity.tenant_id)
        if reference != own.name:
            raise missing("tenant", reference)
        return own.id
    return (await find_tenant(context.store, reference)).id


async def sums_of(store: UsageStore, chosen: Chosen, groups: Sequence[str]) -> list[UsageBucket]:
    """Return the sums of what was chosen.

    Raises:
        ApiError: 400 for an answer that would be too large, and for minutes of rows that are not kept any more.
    """
    if "minute" in groups and chosen.since < chosen.rows_since:
        raise too_old("since", chosen.rows_since, "minutes are counted from them: ask for hours")
    return await sums_within(store, chosen.where, chosen.since, chosen.until, groups, tz=chosen.zone.key)


async def sums_within(
    store: UsageStore,
    where: UsageFilter,
    since: float,
    until: float,
    groups: Sequence[str],
    *,
    tz: str = "UTC",
    counts: Collection[str] | None = None,
) -> list[UsageBucket]:
    """Return sums; ``counts`` names what is wanted of each.

    Raises:
        ApiError: 400 for an answer that would be too large.
    """
    try:
        return await store.usage(
            tenant_id=None,
            key_id=None,
            model=None,
            since=since,
            until=until,
            group_by=groups,
            where=where,
            tz=tz,
            counts=counts,
        )
    except TooManyGroupsError as error:
        raise invalid_value("group_by", f"{error}; ask for a shorter time or fewer groups") from None


def too_old(param: str, rows_since: int, why: str) -> ApiError:
    """Return the 400 for a time whose rows are gone."""
    date = datetime.fromtimestamp(rows_since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return invalid_value(param, f"rows of single requests are kept since {date}, and {why}")


def exact(moment: float, rows_since: int) -> float:
    """Return the moment, or the start of its hour where no rows are left that could divide that."""
    return moment if moment >= rows_since else moment // 3600 * 3600


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone.

    Raises:
        ApiError: 400, there is none of this name.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise invalid_value("tz", "give an IANA time zone, like Europe/Berlin or Asia/Kolkata") from None


def groups_of(text: str) -> list[str]:
    """Return the dimensions that stand in ``text``, with commas between them.

    Raises:
        ApiError: 400 for an unknown or repeated one.
    """
    groups = [group.strip() for group in text.split(",") if group.strip()]
    for group in groups:
        if group not in GROUPS:
            raise invalid_value("group_by", f"'{group[:40]}' is none of {', '.join(GROUPS)}")
    if len(set(groups)) != len(groups):
        raise invalid_value("group_by", "a group is named twice")
    return groups


def moment_of(param: str, text: str, default: float, zone: tzinfo) -> float:
    """Return a moment as unix seconds; a date or time that names no zone is one of ``zone``.

    Raises:
        ApiError: 400.
    """
    if not text:
        return default
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
        moment = float(text)
    else:
        try:
            # A "+" of a time zone arrives as a space when the caller did not quote it.
            read = datetime.fromisoformat(re.sub(r" (\d\d:?\d\d)$", r"+\1", text) if "T" in text else text)
            moment = (read if read.tzinfo else read.replace(tzinfo=zone)).timestamp()
        except (ValueError, OverflowError):
            raise invalid_value(param, "give unix seconds or an ISO 8601 date, like 2026-11-29") from None
    if not 0 <= moment <= UNIX_MAX:
        raise invalid_value(param, "it is out of range")
    return moment
