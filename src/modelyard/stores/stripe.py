"""``Meters`` in Stripe, through its official SDK; needs the extra ``stripe``.

The SDK's own retries are off: whether a try may be made again is decided by
``metering/stripe_reports.py``, which knows when the first one was. The key is given to the SDK
and kept nowhere else; no error that leaves this file holds what Stripe said of it.
"""

import asyncio
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from modelyard.domain.books import MeterEvent
from modelyard.errors import StartupError
from modelyard.stores import MeterRefusedError, SinkError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
"""Between two bytes of an answer."""
CALL_TIMEOUT_S = 300.0
"""Of a call as a whole; a list of many pages is one."""
HOUR_S = 3600
PAGE = 100
TENANT_KEY = "modelyard_tenant"
_DUPLICATE, _ALREADY = "duplicate_meter_event", "event already exists with identifier"
"""How Stripe says that it has an event: it names the code in its reference, and answers with the words."""


def load_sdk() -> Any:
    """Return the SDK.

    Raises:
        StartupError: it is not installed.
    """
    try:
        return importlib.import_module("stripe")
    except ImportError as error:
        raise StartupError(
            "'stripe.enabled' is set, and Stripe's SDK is not installed. Run: pip install 'modelyard[stripe]'"
        ) from error


class StripeMeters:
    """A client. ``customers`` are those of tenants that the operator named."""

    def __init__(
        self,
        api_key: str,
        *,
        api_base: str = "",
        customers: Mapping[str, str] | None = None,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self._stripe = load_sdk()
        self._stripe.enable_telemetry = False
        http = self._stripe.RequestsClient(timeout=(CONNECT_TIMEOUT_S, timeout_s))
        bases = {"api": api_base} if api_base else {}
        self._client: Any = self._stripe.StripeClient(
            api_key, base_addresses=bases, http_client=http, max_network_retries=0
        )
        self._http = http
        self._customers = dict(customers or {})
        self._meter_ids: dict[str, str] = {}
        self._customer_tries: dict[str, int] = {}
        """How often a tenant's customer was asked for and refused."""

    def __repr__(self) -> str:
        return f"<StripeMeters: {len(self._meter_ids)} meters known>"

    async def ensure_customer(self, tenant_id: str, name: str) -> str:
        """Return the customer of a tenant; one that an earlier try made is found by its metadata."""
        if tenant_id in self._customers:
            return self._customers[tenant_id]
        query = f"metadata['{TENANT_KEY}']:'{tenant_id}'"
        found = await self._ask(lambda: self._client.v1.customers.search({"query": query, "limit": 1}))
        if found.data:
            return str(found.data[0].id)
        tries = self._customer_tries.get(tenant_id, 0)
        asked = {"name": name, "metadata": {TENANT_KEY: tenant_id}}
        options = {"idempotency_key": f"modelyard-customer-{tenant_id}" + (f"-{tries}" if tries else "")}
        try:
            made = await self._ask(lambda: self._client.v1.customers.create(asked, options))
        except (SinkError, MeterRefusedError) as error:
            # Stripe would say the same to this key for a day.
            if isinstance(error, MeterRefusedError) or error.is_answered:
                self._customer_tries[tenant_id] = tries + 1
            raise
        self._customer_tries.pop(tenant_id, None)
        return str(made.id)

    async def report(self, event: MeterEvent, customer_id: str, *, timestamp: int, attempt: int) -> None:
        """Report one event; see the contract.

        Stripe answers the same to the same idempotency key for a day, failures too: a try that was answered gets
        another key, one that was not keeps it. The identifier holds for all of them.
        """
        asked = {
            "event_name": event.meter,
            "identifier": event.identifier,
            "timestamp": timestamp,
            "payload": {"stripe_customer_id": customer_id, "value": str(event.value)},
        }
        options = {"idempotency_key": f"{event.identifier}-{attempt}"}
        try:
            await self._ask(lambda: self._client.v1.billing.meter_events.create(asked, options))
        except MeterRefusedError as refusal:
            if refusal.code != _DUPLICATE and _ALREADY not in str(refusal):
                raise

    async def total(self, meter: str, customer_id: str, *, since: int, until: int) -> int:
        """Return what a meter has of a customer between two full hours."""
        return sum((await self.hourly(meter, customer_id, since=since, until=until)).values())

    async def hourly(self, meter: str, customer_id: str, *, since: int, until: int) -> dict[int, int]:
        """Return the same by hour, those with something."""
        meter_id = await self._meter_id(meter)
        asked = {
            "customer": customer_id,
            "start_time": since,
            "end_time": until,
            "value_grouping_window": "hour",
            "limit": PAGE,
        }
        listed = functools.partial(self._client.v1.billing.meters.event_summaries.list, meter_id, asked)
        found: dict[int, int] = {}
        for summary in await self._ask(lambda: list(listed().auto_paging_iter())):
            hour = int(summary.start_time) // HOUR_S * HOUR_S
            found[hour] = found.get(hour, 0) + round(summary.aggregated_value)
        return {hour: value for hour, value in found.items() if value}

    async def close(self) -> None:
        """Give back connections."""
        await asyncio.to_thread(self._http.close)

    async def _meter_id(self, meter: str) -> str:
        if meter not in self._meter_ids:
            listed = functools.partial(self._client.v1.billing.meters.list, {"status": "active", "limit": PAGE})
            found = await self._ask(lambda: list(listed().auto_paging_iter()))
            self._meter_ids = {str(one.event_name): str(one.id) for one in found}
        if meter not in self._meter_ids:
            raise MeterRefusedError(f"Stripe has no active meter '{meter}'. Create it, or change 'stripe.meters'.")
        return self._meter_ids[meter]

    async def _ask(self, call: Callable[[], T]) -> T:
        """Call the SDK in a thread, with its errors in our words."""
        stripe = self._stripe
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await asyncio.to_thread(call)
        except TimeoutError:
            raise SinkError("Stripe did not answer in time") from None
        except (stripe.AuthenticationError, stripe.PermissionError):
            # Its message repeats a part of the key.
            raise SinkError("Stripe refuses the key: check STRIPE_API_KEY", is_answered=True) from None
        except stripe.APIConnectionError as error:
            raise SinkError("Stripe cannot be reached, or did not answer in time") from error
        except stripe.RateLimitError as error:
            raise SinkError("Stripe is asked too often (429)", is_answered=True) from error
        except stripe.IdempotencyError as error:
            reason = f"Stripe has another request of this key: {error.user_message}"
            raise SinkError(reason, is_answered=True) from error
        except stripe.InvalidRequestError as error:
            reason = error.user_message or f"HTTP status {error.http_status}"
            raise MeterRefusedError(reason, error.code or "") from error
        except stripe.StripeError as error:
            raise SinkError(f"Stripe failed (HTTP status {error.http_status})", is_answered=True) from error
