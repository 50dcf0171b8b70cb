"""The settings of money: prices, the currency, invoices, notices. A part of ``config``, which see."""

from typing import Annotated, Literal

import msgspec

Usd = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Pause = Annotated[float, msgspec.Meta(gt=0, le=3600)]
Grace = Annotated[float, msgspec.Meta(ge=0, le=2_592_000)]
Days = Annotated[int, msgspec.Meta(ge=0, le=365)]
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
Currency = Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]


class PriceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """US dollars per one million tokens, and per unit."""

    input: Usd = 0.0
    """Prompt tokens that the engine had to compute."""
    cached_input: Usd | None = None
    """Prompt tokens that the engine had in its cache; unset: the price of ``input``."""
    output: Usd = 0.0
    """Generated tokens."""
    unit: Usd = 0.0
    """One unit of what is not counted in tokens: a second of sound, a picture, a character of speech, a search; not
    per million."""
    request: Usd = 0.0
    """One request in which anything was counted."""
    batch_factor: Share | None = None
    """What a line of a batch pays of all that: 0.5 is half; unset: ``batch.price_factor``."""


class SmtpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mail server that notices go out by."""

    host: str = ""
    """Empty: no e-mail is sent."""
    port: Port = 587
    """587 for ``starttls``, 465 for ``tls``."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is encrypted; with ``none``, no password is sent."""
    username: str = ""
    """Empty: without signing in."""
    password: str = ""
    """Better given as ``MODELYARD__BILLING__SMTP__PASSWORD``."""
    sender: str = ""
    """The address that e-mail comes from; a ``host`` needs one."""
    timeout_s: Pause = 20.0
    """Longest wait for each answer of the server."""

    def __post_init__(self) -> None:
        """Refuse a mail server without a sender: no e-mail would ever be taken.

        Raises:
            ValueError: there is none.
        """
        if self.host and "@" not in self.sender:
            raise ValueError("with a 'host', 'sender' must be the address that e-mail comes from")

    def __repr__(self) -> str:
        """Return it without its password."""
        return f"SmtpConfig(host={self.host!r}, port={self.port}, sender={self.sender!r})"


class BillingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Money: the currency, who sells, what is invoiced, and how notices go out."""

    currency: Currency = "USD"
    """ISO 4217 code of all prices and amounts, whatever the names of fields say; never change it once something was
    billed."""
    free_usd_per_month: Usd = 0.0
    """What a tenant with the plan ``free`` may use in a month, in whole currency."""
    month_end: Literal["none", "draft", "issue"] = "draft"
    """What becomes of a month (UTC) that is over: nothing, drafts of invoices, or invoices."""
    grace_s: Grace = 86_400.0
    """How long after its end a month is invoiced: what comes later is an adjustment on the next invoice."""
    due_days: Days = 14
    """Days that an invoice may be paid in."""
    invoice_prefix: str = "INV-"
    """What numbers of invoices begin with."""
    credit_note_prefix: str = "CN-"
    """What numbers of credit notes begin with."""
    seller_name: str = ""
    """Who sells, as invoices say."""
    seller_address: str = ""
    """Its address; lines are parted by line ends."""
    seller_email: str = ""
    """Where questions go."""
    seller_tax_id: str = ""
    """Its tax number."""
    tax_name: str = ""
    """What the tax is called, like ``VAT``."""
    tax_percent: Percent = 0.0
    """The rate of the tax."""
    tax_is_inclusive: bool = False
    """Prices contain the tax already."""
    smtp: SmtpConfig = SmtpConfig()
    """The mail server that notices go out by."""
