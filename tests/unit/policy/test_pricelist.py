"""The ladder of price lists: what applies to whom, when; gateways find the same as a plain search does."""

import itertools
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.prices import PriceEntry
from modelyard.domain.usage import Price
from modelyard.policy.pricelist import NEVER, Sheet, best, line_price, sheet, tariffs

NOW = 1_800_000_000
OWNER = "ten-a"


def an_entry(number: int, **more: object) -> PriceEntry:
    given: dict[str, object] = {"model": "chat", "effective_from": NOW - 10, **more}
    return PriceEntry(id=f"price-{number}", **{"price": Price(input=number), **given})  # type: ignore[arg-type]


LADDER = [
    {"tenant_id": OWNER, "version": "v2"},
    {"tenant_id": OWNER},
    {"tenant_id": OWNER, "model": "*"},
    {"version": "v2"},
    {},
    {"model": "*"},
]


def test_each_rung_goes_before_all_below_it_however_old_it_is() -> None:
    for above in range(len(LADDER)):
        entries = [
            an_entry(rung + 1, **LADDER[rung], effective_from=NOW - 100 + rung) for rung in range(above, len(LADDER))
        ]
        found = best(reversed(entries), tenant_id=OWNER, model="chat", version="v2", now_unix_s=NOW)
        assert found is entries[0]


def test_of_one_kind_the_latest_that_has_begun_applies_and_an_ended_one_gives_way() -> None:
    old = an_entry(1, effective_from=NOW - 100)
    special = an_entry(2, effective_from=NOW - 50, effective_until=NOW + 50)
    later = an_entry(3, effective_from=NOW + 100)
    entries = [later, special, old]

    def at(instant: int) -> PriceEntry | None:
        return best(entries, tenant_id="", model="chat", version="", now_unix_s=instant)

    assert [at(NOW - 101), at(NOW - 100), at(NOW - 51)] == [None, old, old]
    assert [at(NOW - 50), at(NOW + 49)] == [special, special]
    assert [at(NOW + 50), at(NOW + 99)] == [old, old]
    assert at(NOW + 100) is later


@pytest.mark.parametrize(
    "foreign",
    [{"tenant_id": "ten-b"}, {"model": "other"}, {"version": "v3"}, {"effective_from": NOW + 1}],
)
def test_an_entry_for_somebody_or_something_else_prices_nothing(foreign: dict[str, object]) -> None:
    entries = [an_entry(1, **foreign)]
    assert best(entries, tenant_id=OWNER, model="chat", version="v2", now_unix_s=NOW) is None


def test_a_stored_price_goes_before_a_configured_one_of_its_kind_and_not_before_a_closer_one() -> None:
    configured = [an_entry(1, effective_from=0), an_entry(2, model="*", effective_from=0)]
    versions = {"v1": ["ver-1"]}
    listed = tariffs([an_entry(3, model="*")], configured, name="chat", versions=versions, owner="")
    assert sheet(listed, tenant_id=OWNER, version_ids=["ver-1"], now_unix_s=NOW).base == Price(input=1)
    listed = tariffs([an_entry(3)], configured, name="chat", versions=versions, owner="")
    assert sheet(listed, tenant_id=OWNER, version_ids=["ver-1"], now_unix_s=NOW).base == Price(input=3)


def test_an_endpoint_that_no_stored_price_concerns_has_no_tariffs() -> None:
    entries = [an_entry(1, model="other"), an_entry(2, version="v9"), an_entry(3, tenant_id="ten-b")]
    assert tariffs(entries, [an_entry(4)], name="chat", versions={"v1": ["ver-1"]}, owner=OWNER) == ()
    assert tariffs(entries, [an_entry(4)], name="chat", versions={"v1": ["ver-1"]}, owner="") != ()


def test_a_sheet_says_how_long_it_holds_and_what_the_dearest_is() -> None:
    entries = [
        an_entry(5, effective_from=NOW - 100),
        an_entry(7, version="v2", effective_from=NOW - 30, effective_until=NOW + 20),
        an_entry(2, effective_from=NOW + 60),
        an_entry(9, tenant_id="ten-b", effective_from=NOW + 5),
    ]
    listed = tariffs(entries, [], name="chat", versions={"v1": ["ver-1"], "v2": ["ver-2"]}, owner="")
    found = sheet(listed, tenant_id=OWNER, version_ids=["ver-1", "ver-2"], now_unix_s=NOW)
    assert (found.since, found.until) == (NOW - 30, NOW + 20), "what another tenant pays changes nothing here"
    assert (found.of("ver-1"), found.of("ver-2"), found.of("")) == (Price(5), Price(7), Price(5))
    assert found.most == Price(7)


SUBJECTS = st.fixed_dictionaries(
    {
        "tenant_id": st.sampled_from(["", OWNER, "ten-b"]),
        "model": st.sampled_from(["*", "chat", "other"]),
        "version": st.sampled_from(["", "v1", "v2"]),
        "effective_from": st.integers(NOW - 5, NOW + 5),
        "effective_until": st.none() | st.integers(NOW - 5, NOW + 6),
    }
)


@given(
    stored=st.lists(SUBJECTS, max_size=8),
    configured=st.lists(st.sampled_from([("*", ""), ("chat", ""), ("chat", "v1")]), unique=True),
    tenant=st.sampled_from([OWNER, "ten-b"]),
)
def test_gateways_find_what_a_plain_search_finds_at_every_second(
    stored: list[dict[str, object]], configured: list[tuple[str, str]], tenant: str
) -> None:
    unique = {tuple(v for k, v in one.items() if k != "effective_until"): one for one in stored}
    entries = [an_entry(number, **one) for number, one in enumerate(unique.values(), 1)]
    defaults = [
        an_entry(100 + n, model=model, version=version, effective_from=0)
        for n, (model, version) in enumerate(configured)
    ]
    versions = {"v1": ["ver-1"], "v2": ["ver-2", "ver-3"]}
    listed = tariffs(entries, defaults, name="chat", versions=versions, owner="")
    for instant, (label, ids) in itertools.product(range(NOW - 6, NOW + 8), versions.items()):
        found = best([*entries, *defaults], tenant_id=tenant, model="chat", version=label, now_unix_s=instant)
        expected = found.price if found is not None else Price()
        if not listed:
            continue
        told = sheet(listed, tenant_id=tenant, version_ids=["ver-1", "ver-2", "ver-3"], now_unix_s=instant)
        assert told.since <= instant < told.until
        assert {told.of(one) for one in ids} == {expected}
        # What is told to hold until then does.
        last = min(told.until, NOW + 20) - 1
        again = sheet(listed, tenant_id=tenant, version_ids=["ver-1", "ver-2", "ver-3"], now_unix_s=last)
        assert [again.of(one) for one in ids] == [told.of(one) for one in ids]


def test_lines_of_batches_pay_the_factor_of_their_price_else_the_platforms() -> None:
    priced = [
        an_entry(1, model="chat", price=Price(1_000, batch_micro=200_000)),
        an_entry(2, model="*", price=Price(1_000)),
    ]
    ask = partial(line_price, priced, tenant_id=OWNER, factor_micro=500_000, now_unix_s=NOW)
    assert ask(model="chat") == Price(200, batch_micro=200_000)
    assert ask(model="other") == Price(500, batch_micro=500_000)


def test_no_price_of_a_batch_is_above_its_most() -> None:
    dear = Sheet(Price(1_000, batch_micro=900_000), {"ver-1": Price(1_200)}, Price(1_200), -NEVER, NEVER)
    lines = dear.for_batch(500_000)
    assert (lines.base.input, lines.of("ver-1").input, lines.most.input) == (900, 600, 900)
