"""Invoices: their exact sum is the ledger's, their lines add up to the cent, tax and credit come off in their order."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from modelyard.domain.invoices import Invoice, Party, Tax, UsageSum
from modelyard.domain.usage import MICRO_PER_UNIT, Price
from modelyard.policy import invoicing
from modelyard.policy.invoicing import Terms, credited_tax, draft, taxed
from modelyard.policy.money import minor
from modelyard.policy.pricing import cost

NO_TAX = Tax()
PRICE = Price(input=1_500_000_000, cached_input=750_000_000, output=6_000_000_000)


def a_sum(**more: object) -> UsageSum:
    """Return what 1000 requests of 1000 + 500 cached tokens in and 200 out came to."""
    given: dict[str, object] = {
        "month": "2026-11",
        "model": "chat",
        "price": PRICE,
        "unit": "",
        "requests": 1000,
        "input_tokens": 1_000_000,
        "cached_tokens": 500_000,
        "output_tokens": 200_000,
        "units_micro": 0,
        "cost_nanousd": 1_500_000_000 + 375_000_000 + 1_200_000_000,
        **more,
    }
    return UsageSum(**given)  # type: ignore[arg-type]


def made(*sums: UsageSum, credit: int = 0, tax: Tax = NO_TAX, currency: str = "USD") -> Invoice:
    terms = Terms(currency, Party("us"), Party("them"), tax)
    return draft(
        sums, terms, invoice_id="inv-1", tenant_id="ten-a", month="2026-11", credit_nanousd=credit, now=1_800_000_000
    )


def test_a_line_for_each_model_unit_and_price_and_late_ones_say_so() -> None:
    speech = a_sum(
        model="whisper", unit="seconds", price=Price(unit=100_000 * MICRO_PER_UNIT), requests=3,
        input_tokens=0, cached_tokens=0, output_tokens=0, units_micro=90_500_000, cost_nanousd=9_050_000,
    )  # fmt: skip
    late = a_sum(month="2026-10", price=Price(request=2_000_000), requests=7, cost_nanousd=14_000_000)
    invoice = made(a_sum(), speech, late)
    assert [(one.month, one.model, one.unit, one.quantity_micro, one.is_adjustment) for one in invoice.lines] == [
        ("2026-10", "chat", "requests", 7_000_000, True),
        ("2026-11", "chat", "input tokens", 10**12, False),
        ("2026-11", "chat", "cached input tokens", 5 * 10**11, False),
        ("2026-11", "chat", "output tokens", 2 * 10**11, False),
        ("2026-11", "whisper", "seconds", 90_500_000, False),
    ]
    assert [one.amount_nanousd for one in invoice.lines] == [
        14_000_000,
        1_500_000_000,
        375_000_000,
        1_200_000_000,
        9_050_000,
    ]
    assert (invoice.subtotal_nanousd, invoice.subtotal) == (3_098_050_000, 310)
    assert [one.amount for one in invoice.lines] == [1, 150, 38, 120, 1]


def test_credit_comes_off_before_tax_and_tax_is_rounded_once() -> None:
    invoice = made(a_sum(), credit=1_000_000_000, tax=Tax("VAT", 190_000))
    assert (invoice.subtotal, invoice.credit, invoice.tax, invoice.total) == (308, 100, 40, 248)
    invoice = made(a_sum(), credit=10**12, tax=Tax("VAT", 190_000))
    assert (invoice.credit, invoice.credit_nanousd, invoice.tax, invoice.total) == (308, 3_075_000_000, 0, 0)


def test_a_tax_in_the_price_is_told_and_adds_nothing_and_the_exempt_pay_none() -> None:
    assert taxed(11_900, Tax("VAT", 190_000, is_inclusive=True)) == (1900, 11_900)
    assert taxed(10_000, Tax("VAT", 190_000)) == (1900, 11_900)
    assert taxed(10_000, Tax("VAT", 190_000, is_exempt=True)) == (0, 10_000)
    assert taxed(10_000, Tax()) == (0, 10_000)
    assert taxed(50, Tax("T", 10_000)) == (0, 50), "half a cent goes to the even one"
    assert taxed(150, Tax("T", 10_000)) == (2, 152)


def test_what_requests_were_rounded_by_is_on_the_lines_and_none_goes_below_nothing() -> None:
    # Ten requests of 0.2 + 0.2 nano each are nothing to the ledger, and 2 + 2 to whoever multiplies at the end.
    price = Price(input=200_000, output=200_000)
    nothing = a_sum(price=price, input_tokens=10, cached_tokens=0, output_tokens=10, requests=10, cost_nanousd=0)
    assert [one.amount_nanousd for one in made(nothing).lines] == [0, 0]
    free = a_sum(price=Price(), cost_nanousd=0)
    assert made(free).lines == ()


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=6), st.integers(0, 10**6), st.booleans())
def test_credit_notes_of_a_whole_invoice_take_back_its_tax_to_the_cent(
    shares: list[int], rate: int, is_inclusive: bool
) -> None:
    tax, total = taxed(sum(shares) + 7, Tax("T", rate, is_inclusive))
    invoice = msgspec.structs.replace(made(a_sum()), tax=tax, total=total)
    parts = [*shares[:-1], total - sum(shares[:-1])]
    credited = back = 0
    for part in parts:
        if part <= 0:
            continue
        note_tax = credited_tax(invoice, part, credited=credited, credited_tax=back)
        assert 0 <= note_tax <= part
        credited, back = credited + part, back + note_tax
    assert (credited, back) == (total, tax)


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["chat", "whisper"]),
        st.sampled_from(["2026-10", "2026-11"]),
        st.builds(
            Price,
            st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 10**10),
            st.integers(0, 10**13), st.integers(0, 10**8),
        ),
        st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**8),
    ),
    max_size=20,
)  # fmt: skip


@given(ROWS, st.integers(0, 10**13), st.integers(0, 10**6), st.sampled_from(["USD", "JPY", "KWD"]))
def test_the_sum_of_the_lines_is_the_subtotal_and_the_exact_sum_is_the_ledgers(
    rows: list[tuple[str, str, Price, int, int, int, int]], credit: int, rate: int, currency: str
) -> None:
    """Each row is a request, rounded as the ledger rounds; they are summed as the roll-up sums."""
    ledger = 0
    sums: dict[tuple[str, str, Price], list[int]] = {}
    for model, month, price, fresh, cached, output, units in rows:
        if not fresh + cached + output + units:
            continue
        nano = cost(price, fresh + cached, cached, output, units)
        ledger += nano
        total = sums.setdefault((month, model, price), [0] * 6)
        total[:] = [have + more for have, more in zip(total, (1, fresh, cached, output, units, nano), strict=True)]
    rolled = [UsageSum(month, model, price, "seconds", *total) for (month, model, price), total in sums.items()]
    invoice = made(*rolled, credit=credit, tax=Tax("T", rate), currency=currency)
    assert sum(line.amount_nanousd for line in invoice.lines) == invoice.subtotal_nanousd == ledger
    assert sum(line.amount for line in invoice.lines) == invoice.subtotal == minor(ledger, currency)
    assert all(line.amount >= 0 and line.amount_nanousd >= 0 for line in invoice.lines)
    assert invoice.credit_nanousd == min(credit, ledger)
    assert 0 <= invoice.credit <= invoice.subtotal
    assert invoice.total == invoice.subtotal - invoice.credit + invoice.tax
    assert invoicing.taxed(invoice.subtotal - invoice.credit, Tax("T", rate)) == (invoice.tax, invoice.total)
