"""Ledger and Stripe: what was used, what was reported, and what Stripe's own summaries have, hour by hour."""

from collections.abc import Mapping

from modelyard.config.books import Quantity
from modelyard.domain.books import LedgerSum, MeterEvent, MeterStatus
from modelyard.domain.tenants import PLATFORM
from modelyard.metering.reconcile import Check, Difference, Findings
from modelyard.metering.stripe_reports import HOUR_S, SINK, quantity_of
from modelyard.stores import BookStore, MeterRefusedError, Meters, SinkError

_Key = tuple[str, str, int]


async def ledger_and_stripe(
    books: BookStore, meters: Meters, counted: Mapping[str, Quantity], *, since: int, until: int
) -> Check:
    """Compare the hours that were reported."""
    findings = Findings("ledger and Stripe", "hours of customers and meters")
    cursors = await books.cursors(SINK)
    since = max(since // HOUR_S * HOUR_S, cursors.get("begun", ("", until))[1])
    until = min(until // HOUR_S * HOUR_S, cursors.get("ledger", ("", since))[1])
    if since >= until:
        findings.notes.append("no hour of this time was reported yet")
        return findings.check()
    used = await books.hourly(since=since, until=until)
    told: dict[_Key, list[MeterEvent]] = {}
    for event in await books.meter_events(since=since, until=until):
        told.setdefault((event.tenant_id, event.meter, event.hour), []).append(event)
    try:
        has = await _summaries(books, meters, counted, since, until)
    except (SinkError, MeterRefusedError) as error:
        findings.problem = f"Stripe's summaries cannot be read: {error}"
        has = None
    keys = {(tenant, meter, hour) for tenant, hour in used if tenant != PLATFORM for meter in counted}
    keys |= told.keys() | (has.keys() if has is not None else set())
    findings.compared = len(keys)
    for key in sorted(keys):
        sums = used.get((key[0], key[2]), LedgerSum())
        quantity = counted.get(key[1])
        _judge(key, sums, quantity, told.get(key, []), has, findings)
    return findings.check()


async def _summaries(
    books: BookStore, meters: Meters, counted: Mapping[str, Quantity], since: int, until: int
) -> dict[_Key, int]:
    found: dict[_Key, int] = {}
    for tenant_id, customer_id in (await books.customers()).items():
        for meter in counted:
            for hour, value in (await meters.hourly(meter, customer_id, since=since, until=until)).items():
                found[tenant_id, meter, hour] = value
    return found


def _judge(
    key: _Key,
    sums: LedgerSum,
    quantity: Quantity | None,
    events: list[MeterEvent],
    has: dict[_Key, int] | None,
    findings: Findings,
) -> None:
    tenant, meter, hour = key
    subject = f"{tenant}, {meter}, hour {hour}"
    by_status = {status: sum(one.value for one in events if one.status is status) for status in MeterStatus}
    wanted = quantity_of(sums, quantity) if quantity is not None else 0
    missing = wanted - sum(by_status.values())
    if missing > 0 and by_status[MeterStatus.PENDING]:
        # What settled late becomes a further part once it is known whether the last one arrived.
        findings.notes.append(f"{subject}: {missing} more waits for what is under way")
    elif missing:
        findings.add(_of(subject, f"{missing} more is in the ledger than was ever to be reported", missing, quantity))
    for event in events:
        if event.status is MeterStatus.ALARM:
            then = f"modelyard reconcile --billed {event.identifier}"
            what = f"{event.value} cannot be reported by itself: {event.reason}; bill it by hand, then: {then}"
            findings.add(_of(subject, what, event.value, quantity))
    if by_status[MeterStatus.PENDING]:
        findings.notes.append(f"{subject}: {by_status[MeterStatus.PENDING]} waits to be reported")
    if has is None or any(one.status in (MeterStatus.ALARM, MeterStatus.BY_HAND) for one in events):
        return  # who billed by hand may have done so in Stripe
    # One that waits may have arrived; it is looked up before it is sent again.
    told, stripe = by_status[MeterStatus.EXPORTED], has.get(key, 0)
    if stripe not in (told, told + by_status[MeterStatus.PENDING]):
        findings.add(_of(subject, f"{told} was reported, and Stripe has {stripe}", told - stripe, quantity))


def _of(subject: str, what: str, amount: int, quantity: Quantity | None) -> Difference:
    is_money = quantity == "cost_nanousd"
    is_tokens = quantity is not None and quantity.endswith("_tokens")
    return Difference(subject=subject, what=what, tokens=amount if is_tokens else 0, nanousd=amount if is_money else 0)
