"""Files, as OpenAI's SDKs send, list, read and delete them."""

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from modelyard import errors
from modelyard.control.api.access import missing
from modelyard.control.context import Context
from modelyard.control.files import FileDesk, Sender
from modelyard.domain.files import FILES_PATH, UPLOADABLE, File, FilePurpose
from modelyard.domain.tenants import Identity, Scope
from modelyard.stores import ContentMissingError
from modelyard.web.app import error_response
from modelyard.web.paging import After
from modelyard.web.ranges import Span, UnsatisfiableError, span_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

LIMIT_MAX = 10_000
IDEMPOTENCY_KEY_MAX = 255

_NEVER_HERE = frozenset({"assistants_output", "fine-tune-results"})
"""Purposes of OpenAI's that nothing here makes: a list of them is empty, and no mistake."""
_TYPES = {
    ".jsonl": "application/jsonl",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/markdown; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".parquet": "application/vnd.apache.parquet",
}
"""By the ending of the name. Nothing that a browser would run is among them, whatever its sender called it."""
_BINARY = "application/octet-stream"

_log = logging.getLogger(__name__)


class FileOwner(msgspec.Struct, frozen=True):
    """Whose a file is."""

    tenant_id: str


class FileView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file, in OpenAI's fields."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | msgspec.UnsetType = msgspec.UNSET
    """When it stops to exist; left out of one that does not."""
    filename: str
    purpose: str
    status: str
    """``processed``: it can be used."""
    modelyard: FileOwner | msgspec.UnsetType = msgspec.UNSET
    """What is beyond OpenAI's object: for admins, who see every tenant's files."""


class FilePage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the list; ``has_more`` says that more follows after ``last_id``."""

    object: str = "list"
    data: list[FileView]
    first_id: str
    last_id: str
    has_more: bool


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: str = "file"
    deleted: bool = True


class FilesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which files."""

    purpose: Annotated[str, msgspec.Meta(description="Only those of this purpose.")] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="Most files to return.")] = LIMIT_MAX
    order: Annotated[Literal["asc", "desc"], msgspec.Meta(description="By the time of their creation.")] = "desc"
    after: After = ""


class ExpiresAfter(msgspec.Struct, frozen=True):
    """When a file is to expire; sent as ``expires_after[anchor]`` and ``expires_after[seconds]``."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class FileForm(msgspec.Struct, frozen=True):
    """A file to be kept."""

    file: Annotated[str, msgspec.Meta(description="The file.", extra_json_schema={"format": "binary"})]
    purpose: Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
    expires_after: ExpiresAfter | msgspec.UnsetType = msgspec.UNSET


class Files:
    """The routes of files."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, one, scope = FILES_PATH, f"{FILES_PATH}/{{file_id}}", Scope.INFERENCE
        content = "Get the content of a file, or a range of it"
        return [
            Route("POST", every, scope, "Upload a file", self.upload, Empty, Empty, FileView, form=FileForm),
            Route("GET", every, scope, "List files", self.page, Empty, FilesQuery, FilePage),
            Route("GET", one, scope, "Get what is known of a file", self.get, Empty, Empty, FileView),
            Route("GET", f"{one}/content", scope, content, self.content, Empty, Empty, str, media_type=_BINARY),
            Route("DELETE", one, scope, "Delete a file", self.delete, Empty, Empty, DeletedFile),
        ]

    @property
    def _desk(self) -> FileDesk:
        return self._context.files

    async def upload(self, call: Call[Empty, Empty]) -> FileView:
        """Take a file in, while it comes."""
        request = call.request
        length = request.headers.get("content-length", "")
        file = await self._desk.receive(
            Sender(call.identity.tenant_id, call.identity.key_id, _idempotency_key(request)),
            request.stream(),
            content_type=request.headers.get("content-type", ""),
            length=int(length) if re.fullmatch(r"[0-9]{1,15}", length, re.ASCII) else None,
        )
        return view(file, call.identity)

    async def page(self, call: Call[Empty, FilesQuery]) -> FilePage:
        """Return the files of the caller's tenant, or all for an admin."""
        query, tenant_id, store = call.query, call.identity.visible_tenant, self._desk.store
        if query.purpose in _NEVER_HERE:
            return FilePage(data=[], first_id="", last_id="", has_more=False)
        after = None
        if query.after:
            after = await self._desk.find(query.after, tenant_id=tenant_id)
            if after is None:
                raise errors.invalid_value("after", "no file of this list has this id")
        rows = await store.files(
            tenant_id=tenant_id,
            now=self._context.clock.unix_s(),
            limit=query.limit + 1,
            purpose=_purpose(query.purpose),
            after=after,
            order=query.order,
        )
        shown = [view(row, call.identity) for row in rows[: query.limit]]
        first_id, last_id = (shown[0].id, shown[-1].id) if shown else ("", "")
        return FilePage(data=shown, first_id=first_id, last_id=last_id, has_more=len(rows) > query.limit)

    async def get(self, call: Call[Empty, Empty]) -> FileView:
        """Return one."""
        return view(await self._find(call), call.identity)

    async def content(self, call: Call[Empty, Empty]) -> Response:
        """Return the bytes, all or one range, as what cannot harm a browser that opens them."""
        file = await self._find(call)
        request = call.request
        tag = f'"{file.digest.removeprefix("sha256:")}"'
        headers = _content_headers(file, tag)
        if _matches(request.headers.get("if-none-match", ""), tag):
            return Response(None, 304, headers)
        try:
            span = _wanted_span(request, file, tag)
        except UnsatisfiableError:
            return _unsatisfiable(file)
        status = 200 if span is None else 206
        start, length = span or Span(0, file.bytes)
        if span is not None:
            headers["content-range"] = f"bytes {start}-{start + length - 1}/{file.bytes}"
        headers["content-length"] = str(length)
        if request.method == "HEAD":
            return Response(None, status, headers)
        return await self._streamed(file, start, length, status, headers)

    async def _streamed(self, file: File, start: int, length: int, status: int, headers: dict[str, str]) -> Response:
        blocks = self._desk.contents.read(file.id, start=start, length=length)
        try:
            # Before the head goes out: what is gone must not be an answer that breaks off.
            first = await anext(blocks, b"")
        except ContentMissingError:
            if await self._desk.find(file.id, tenant_id=file.tenant_id) is None:
                raise missing("file", file.id) from None
            _log.error("%s: its content is missing in the data directory", file.id)
            raise errors.content_missing(file.id) from None
        return StreamingResponse(_chained(first, blocks), status, headers)

    async def delete(self, call: Call[Empty, Empty]) -> DeletedFile:
        """Delete one for good."""
        file = await self._find(call)
        if not await self._desk.remove(file):
            raise missing("file", file.id)
        return DeletedFile(id=file.id)

    async def _find(self, call: Call[Empty, Empty]) -> File:
        file_id = call.path("file_id")
        file = await self._desk.find(file_id, tenant_id=call.identity.visible_tenant)
        if file is None:
            raise missing("file", file_id)
        return file


def view(file: File, caller: Identity) -> FileView:
    """Return what ``caller`` sees of a file."""
    return FileView(
        id=file.id,
        object="file",
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=msgspec.UNSET if file.expires_at is None else int(file.expires_at),
        filename=file.filename,
        purpose=file.purpose.value,
        status=file.status.value,
        modelyard=FileOwner(file.tenant_id) if caller.may(Scope.ADMIN) else msgspec.UNSET,
    )


async def _chained(first: bytes, blocks: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(blocks):
        yield first
        async for block in blocks:
            yield block


def _purpose(text: str) -> FilePurpose | None:
    if not text:
        return None
    try:
        return FilePurpose(text)
    except ValueError:
        known = ", ".join((*UPLOADABLE, FilePurpose.BATCH_OUTPUT))
        raise errors.invalid_value("purpose", f"it must be one of {known}") from None


def _idempotency_key(request: Request) -> str | None:
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return None
    key = keys[0]
    if len(keys) > 1 or not 0 < len(key) <= IDEMPOTENCY_KEY_MAX or not key.isascii() or not key.isprintable():
        reason = f"send it once, with 1 to {IDEMPOTENCY_KEY_MAX} printable ASCII characters"
        raise errors.invalid_value("Idempotency-Key", reason)
    return key


def _content_headers(file: File, tag: str) -> dict[str, str]:
    ending = file.filename[file.filename.rfind(".") :].lower() if "." in file.filename else ""
    plain = re.sub(r'[^\x20-\x7e]|["\\%]', "_", file.filename)
    return {
        "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
        "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(file.filename, safe='')}",
        "content-security-policy": "sandbox; default-src 'none'",
        "content-type": _TYPES.get(ending, _BINARY),
        "etag": tag,
        "x-content-type-options": "nosniff",
    }


def _matches(header: str, tag: str) -> bool:
    return header.strip() == "*" or tag in (one.strip().removeprefix("W/") for one in header.split(","))


def _wanted_span(request: Request, file: File, tag: str) -> Span | None:
    ranges = request.headers.getlist("range")
    if len(ranges) != 1 or request.headers.get("if-range", tag) != tag:
        return None
    return span_of(ranges[0], file.bytes)


def _unsatisfiable(file: File) -> Response:
    answer = error_response(errors.range_not_satisfiable(file.bytes))
    answer.headers["content-range"] = f"bytes */{file.bytes}"
    return answer
