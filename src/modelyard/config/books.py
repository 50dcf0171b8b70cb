"""Settings of where the books go: Kafka, Stripe, and what accelerators cost.

Secrets are no settings: Stripe's key is the environment's ``STRIPE_API_KEY`` or the file ``secrets/stripe`` in the data
directory, so that no configuration file, log or page can show it.
"""

from typing import Annotated, Literal

import msgspec

Quantity = Literal["cost_nanousd", "requests", "prompt_tokens", "cached_tokens", "completion_tokens"]
"""What a meter counts."""
MeterName = Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
"""An identifier holds it, with the tenant and the hour, and Stripe takes a hundred characters."""
_PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=31_536_000)]
_Pause = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]


class KafkaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Usage events for others; needs the extra ``kafka``."""

    brokers: tuple[str, ...] = ()
    """Brokers to begin with, like ``kafka-1.example.com:9092``; empty: no events are sent."""
    topic: str = "modelyard.usage"
    """Topic of usage events: JSON, one a request, keyed by request id, so that a compacted topic holds each once."""
    options: dict[str, str] = {}
    """Other settings of librdkafka, like ``"security.protocol" = "SASL_SSL"``. Never shown nor logged."""
    interval_s: _Positive = 1.0
    """Pause between two looks at the journal."""
    spool_bytes_max: _PositiveInt = 8 * 1024 * 1024 * 1024
    """Bytes of journal that are kept for Kafka while it is away. At half of it there is an alarm; beyond it the oldest
    segments go, and their events are sent from the ledger later."""

    def __repr__(self) -> str:
        """Return it without the options, which may hold passwords."""
        return f"KafkaConfig(brokers={self.brokers!r}, topic={self.topic!r})"


class StripeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Usage-based billing by Stripe; needs the extra ``stripe`` and a key."""

    enabled: bool = False
    """Whether usage is reported to Stripe."""
    api_base: str = ""
    """URL of the API, for a proxy of your own; empty: Stripe's."""
    meters: dict[MeterName, Quantity] = {}
    """Stripe's meters by their ``event_name``, and what each counts; empty: ``modelyard_cost`` counts ``cost_nanousd``.
    Money is in whole nano-dollars, so that nothing is rounded: price that meter at 0.0000001 cents a unit."""
    customers: dict[str, str] = {}
    """Stripe's customers of tenants that have one already, ``cus_…`` by tenant id, each another. Others get one at
    their first report, and keep it."""
    interval_s: _Positive = 300.0
    """Pause between two reports."""
    settle_s: _Pause = 600.0
    """Time after the end of an hour before it is reported; what settles later is reported as another part."""
