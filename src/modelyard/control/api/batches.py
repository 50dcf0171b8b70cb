"""``/v1/batches`` as OpenAI has it: make, list, look at, cancel.

What is wrong with the request is refused here; what is wrong with the file is
found by whoever checks it (``batch/flow.py``) and told in the batch. A batch
that was made or cancelled is announced by a touch of a file, so that its
workers, processes of their own, look at once.
"""

import asyncio
import hashlib
import re
from typing import Annotated, Literal

import msgspec

from modelyard.control.context import Context
from modelyard.domain.batches import ENDPOINTS, Batch, BatchStatus, BatchView, view
from modelyard.domain.files import EXPIRES_AFTER_S_MAX, EXPIRES_AFTER_S_MIN
from modelyard.domain.tenants import Scope
from modelyard.errors import ApiError, batches_full, conflict, idempotency_key_reused, invalid_value
from modelyard.ids import new_id
from modelyard.stores import AlreadyExistsError, BatchesFullError
from modelyard.web.paging import LIMIT_DEFAULT, After, Limit
from modelyard.web.routes import AnyRoute, Call, Empty, Route

BATCHES_PATH = "/v1/batches"
METADATA_MAX = 16
METADATA_KEY_MAX, METADATA_VALUE_MAX = 64, 512
KEY_LENGTH_MAX = 255
EXAMPLE = {"input_file_id": "file-abc123", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
_ID = re.compile(r"batch_[a-z0-9]{1,64}")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_encode = msgspec.json.Encoder(order="deterministic").encode


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long output and error files are kept, from when they are made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=EXPIRES_AFTER_S_MIN, le=EXPIRES_AFTER_S_MAX)]


class NewBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch to be made."""

    input_file_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    idempotency_key: str | None = None
    """The same as the header ``Idempotency-Key``, for clients that cannot set one."""


class BatchesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which batches."""

    limit: Limit = LIMIT_DEFAULT
    after: After = ""


class BatchPage(msgspec.Struct, frozen=True):
    """A part of the list, newest first, as OpenAI has it."""

    data: list[BatchView]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Batches:
    """The routes of batches."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, scope = BATCHES_PATH, f"{BATCHES_PATH}/{{batch_id}}", Scope.INFERENCE
        return [
            Route("POST", every, scope, "Make a batch", self.create, NewBatch, Empty, BatchView, 200, EXAMPLE),
            Route("GET", every, scope, "List batches", self.page, Empty, BatchesQuery, BatchPage),
            Route("GET", one, scope, "Get a batch", self.get, Empty, Empty, BatchView),
            Route("POST", f"{one}/cancel", scope, "Cancel a batch", self.cancel, Empty, Empty, BatchView),
        ]

    async def create(self, call: Call[NewBatch, Empty]) -> BatchView:
        """Take a batch on; the same idempotency key gives the same batch."""
        wanted = call.body
        settings, now = self._context.config.batch, self._context.clock.unix_s()
        _check(wanted, settings.completion_windows)
        key = _idempotency_key(wanted.idempotency_key, call.request.headers.get("idempotency-key"))
        expires_after = wanted.output_expires_after
        batch = Batch(
            id=new_id("batch_"),
            tenant_id=call.identity.tenant_id,
            key_id=call.identity.key_id,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            created_at=now,
            expires_at=now + window_s(wanted.completion_window),
            metadata=wanted.metadata,
            output_expires_s=None if expires_after is None else expires_after.seconds,
            idempotency_key=key,
            fingerprint=hashlib.sha256(_encode(msgspec.structs.replace(wanted, idempotency_key=None))).hexdigest(),
        )
        earlier = await self._add(batch)
        if earlier is not None and earlier.fingerprint != batch.fingerprint:
            raise idempotency_key_reused()
        await self._announce()
        return self._view(earlier or batch)

    async def _add(self, batch: Batch) -> Batch | None:
        """Add a batch, or return the one that the same idempotency key has made."""
        most = self._context.config.batch.open_max
        try:
            try:
                return await self._context.batches.add_batch(batch, open_max=most)
            except AlreadyExistsError:  # another controller of this database took the same key at this moment
                return await self._context.batches.add_batch(batch, open_max=most)
        except BatchesFullError:
            raise batches_full(most) from None

    async def page(self, call: Call[Empty, BatchesQuery]) -> BatchPage:
        """Return the newest first."""
        query, store = call.query, self._context.batches
        tenant_id = call.identity.visible_tenant
        after = None
        if query.after:
            after = await store.batch(query.after, tenant_id=tenant_id) if _ID.fullmatch(query.after) else None
            if after is None:
                raise invalid_value("after", "no object of this list has this id")
        rows = await store.batches(tenant_id=tenant_id, limit=query.limit + 1, after=after)
        shown = rows[: query.limit]
        first_id, last_id = (shown[0].id, shown[-1].id) if shown else (None, None)
        return BatchPage([self._view(batch) for batch in shown], first_id, last_id, len(rows) > query.limit)

    async def get(self, call: Call[Empty, Empty]) -> BatchView:
        """Return one."""
        return self._view(await self._find(call))

    async def cancel(self, call: Call[Empty, Empty]) -> BatchView:
        """Begin nothing more of it: what is under way ends, and what is done stays."""
        batch = await self._find(call)
        if not await self._context.batches.cancel(batch.id, now=self._context.clock.unix_s()):
            batch = await self._find(call)
            if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                raise conflict(f"Cannot cancel a batch with status '{batch.status.value}'.")
        await self._announce()
        return self._view(await self._find(call))

    async def _find(self, call: Call[Empty, Empty]) -> Batch:
        batch_id = call.path("batch_id")
        batch = None
        if _ID.fullmatch(batch_id):
            batch = await self._context.batches.batch(batch_id, tenant_id=call.identity.visible_tenant)
        if batch is None:
            raise ApiError(404, code="not_found", message=f"No batch found with id '{batch_id[:100]}'.")
        return batch

    async def _announce(self) -> None:
        await asyncio.to_thread(self._context.data.batches_wanted.touch, 0o600)

    def _view(self, batch: Batch) -> BatchView:
        factor = self._context.config.batch.price_factor
        return view(batch, price_factor=factor, now=self._context.clock.unix_s())


def window_s(window: str) -> float:
    """Return the seconds of a completion window like ``24h``.

    Raises:
        ApiError: 400, it is none.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})([smhd])", window)
    if match is None:
        raise invalid_value("completion_window", f"'{window[:100]}' is no window; use one like 24h")
    return float(match[1]) * _UNITS[match[2]]


def _check(wanted: NewBatch, windows: tuple[str, ...]) -> None:
    if wanted.endpoint not in ENDPOINTS:
        supported = ", ".join(f"'{endpoint}'" for endpoint in ENDPOINTS)
        raise invalid_value("endpoint", f"'{wanted.endpoint[:100]}'. Supported values are: {supported}")
    if wanted.completion_window not in windows:
        supported = ", ".join(f"'{window}'" for window in windows)
        raise invalid_value(
            "completion_window", f"'{wanted.completion_window[:100]}'. Supported values are: {supported}"
        )
    if not wanted.input_file_id.isprintable():
        raise invalid_value("input_file_id", "it is no id of a file")
    metadata = wanted.metadata or {}
    if len(metadata) > METADATA_MAX:
        raise invalid_value("metadata", f"it has {len(metadata)} pairs, at most {METADATA_MAX} are kept")
    for name, value in metadata.items():
        if len(name) > METADATA_KEY_MAX or len(value) > METADATA_VALUE_MAX:
            reason = f"keys have at most {METADATA_KEY_MAX} characters, values {METADATA_VALUE_MAX}"
            raise invalid_value("metadata", reason)


def _idempotency_key(of_body: str | None, of_header: str | None) -> str | None:
    key = of_header if of_header is not None else of_body
    if key is not None and not (0 < len(key) <= KEY_LENGTH_MAX and key.isprintable()):
        reason = f"use 1 to {KEY_LENGTH_MAX} printable characters"
        raise invalid_value("Idempotency-Key" if of_header is not None else "idempotency_key", reason)
    return key
