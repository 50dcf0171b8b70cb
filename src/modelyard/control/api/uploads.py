"""Uploads by parts: announce, send each part (again), ask what is there, complete."""

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from starlette.requests import Request

from modelyard import errors
from modelyard.control.api.access import missing
from modelyard.control.api.faults import Fault, refusal
from modelyard.control.artifacts.names import FILES_MAX, is_plain
from modelyard.control.context import Context
from modelyard.control.uploads import UploadDesk, uri_of
from modelyard.domain.catalog import NAME_PATTERN
from modelyard.domain.tenants import Scope
from modelyard.domain.uploads import (
    FOLDERS_PATH,
    PART_BYTES_MAX,
    PART_BYTES_MIN,
    PARTS_MAX,
    UPLOADS_PATH,
    Upload,
    UploadStatus,
    part_bytes_for,
)
from modelyard.web.paging import LIMIT_DEFAULT, After, Limit, Page, page_of
from modelyard.web.routes import AnyRoute, Call, Empty, Route

EXAMPLE = {
    "name": "my-model",
    "size_bytes": 386404992,
    "digest": "sha256:8f3c2a0de5f5a0d9f2b5c26b7c1d8e4f60718293a4b5c6d7e8f9012345678abc",
}
FOLDER_EXAMPLE = {
    "name": "my-adapter",
    "files": [
        {"path": "adapter_config.json", "digest": EXAMPLE["digest"]},
        {"path": "adapter_model.safetensors", "digest": EXAMPLE["digest"]},
    ],
}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]{64}")


class NewUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An artifact to be uploaded."""

    name: Annotated[str, msgspec.Meta(description="What it is; shown in listings, never a path.")]
    size_bytes: Annotated[int, msgspec.Meta(description="Bytes of the whole file.")]
    digest: Annotated[str, msgspec.Meta(description="sha256:<hex> that it must have; left out: not checked.")] = ""
    part_bytes: Annotated[
        int | None, msgspec.Meta(description="Bytes of each part but the last, at most 64 MiB; left out: 16 MiB.")
    ] = None


class UploadView(msgspec.Struct, frozen=True, kw_only=True):
    """An upload; ``uri`` is what a deployment takes as ``model_artifact`` once it is complete."""

    id: str
    object: str = "upload"
    name: str
    status: str
    """``open``, ``completing`` (ask again) or ``complete``."""
    size_bytes: int
    part_bytes: int
    part_count: int
    parts: list[int]
    """Numbers, from 1, of the parts that are here whole; empty once it is complete."""
    received_bytes: int
    digest: str
    uri: str
    owner_id: str
    created_at: int
    expires_at: int


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    """A part that is here whole."""

    object: str = "upload.part"
    upload_id: str
    number: int
    size_bytes: int


class DeletedUpload(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: str = "upload"
    deleted: bool = True


class FolderFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a folder: the content of a complete upload of yours."""

    path: Annotated[str, msgspec.Meta(description="Its path in the folder, like adapter_config.json.")]
    digest: Annotated[str, msgspec.Meta(description="sha256:<hex> of the upload.")]


class NewFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder to be made of uploads."""

    name: Annotated[str, msgspec.Meta(description="What it is; shown in listings.")]
    files: list[FolderFile]


class UploadsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which uploads."""

    limit: Limit = LIMIT_DEFAULT
    after: After = ""
    digest: Annotated[str, msgspec.Meta(description="Only those of this content: to go on with one, or reuse it.")] = ""


class Uploads:
    """The routes of uploads."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        every, manage = UPLOADS_PATH, Scope.MANAGE
        one, part = f"{every}/{{upload}}", f"{every}/{{upload}}/parts/{{number}}"
        begin, complete = "Begin an upload", "Put the parts together"
        folder = "Make a folder of uploads, as a PEFT adapter is one"
        return [
            Route("POST", every, manage, begin, self.begin, NewUpload, Empty, UploadView, 201, EXAMPLE),
            Route("GET", every, manage, "List uploads", self.page, Empty, UploadsQuery, Page[UploadView]),
            Route("GET", one, manage, "Get an upload with the parts it has", self.get, Empty, Empty, UploadView),
            Route("PUT", part, manage, "Send a part (its raw bytes)", self.put_part, Empty, Empty, PartView),
            Route("POST", f"{one}/complete", manage, complete, self.complete, Empty, Empty, UploadView),
            Route("POST", FOLDERS_PATH, manage, folder, self.folder, NewFolder, Empty, UploadView, 201, FOLDER_EXAMPLE),
            Route("DELETE", one, manage, "Delete an upload", self.delete, Empty, Empty, DeletedUpload),
        ]

    @property
    def _desk(self) -> UploadDesk:
        return self._context.uploads

    async def begin(self, call: Call[NewUpload, Empty]) -> UploadView:
        """Announce an upload; its parts may come in any order, several at once."""
        wanted = call.body
        if faults := list(_faults(wanted, self._context.config.control.upload_bytes_max)):
            raise refusal("This upload cannot begin.", faults)
        upload = await self._desk.announce(
            tenant_id=call.identity.tenant_id,
            name=wanted.name,
            size_bytes=wanted.size_bytes,
            part_bytes=wanted.part_bytes or part_bytes_for(wanted.size_bytes),
            digest=wanted.digest,
        )
        return self._view(upload)

    async def page(self, call: Call[Empty, UploadsQuery]) -> Page[UploadView]:
        """Return the uploads of the caller's tenant, or all for an admin."""
        query = call.query
        uploads = await self._desk.uploads(tenant_id=call.identity.visible_tenant)
        wanted = [one for one in uploads if query.digest in ("", one.digest)]
        rows, has_more = page_of(wanted, limit=query.limit, after=query.after, id_of=lambda one: one.id)
        return Page([self._view(one) for one in rows], has_more)

    async def get(self, call: Call[Empty, Empty]) -> UploadView:
        """Return one upload."""
        return self._view(await self._find(call))

    async def put_part(self, call: Call[Empty, Empty]) -> PartView:
        """Take a part in; the same one may be sent again, and the last whole one counts."""
        request = call.request
        upload = await self._find(call)
        number = _number(call.path("number"), upload)
        _check_length(request, upload.size_of(number))
        digest = request.headers.get("x-content-sha256", "").lower()
        if digest and _HEX.fullmatch(digest) is None:
            raise errors.invalid_value("x-content-sha256", "write the SHA-256 of this part as 64 hex digits")
        await self._desk.receive(upload, number, request.stream(), digest=digest)
        return PartView(upload_id=upload.id, number=number, size_bytes=upload.size_of(number))

    async def complete(self, call: Call[Empty, Empty]) -> UploadView:
        """Put the parts together; of a big file the answer is ``completing``, and the same call is made again."""
        return self._view(await self._desk.complete(await self._find(call)))

    async def folder(self, call: Call[NewFolder, Empty]) -> UploadView:
        """Make one artifact of several complete uploads; the same ones again give the same."""
        wanted = call.body
        if faults := list(_folder_faults(wanted)):
            raise refusal("This folder cannot be made.", faults)
        files = {file.path: file.digest for file in wanted.files}
        upload = await self._desk.make_folder(tenant_id=call.identity.tenant_id, name=wanted.name, files=files)
        return self._view(upload)

    async def delete(self, call: Call[Empty, Empty]) -> DeletedUpload:
        """Forget an upload; versions that were made of it stay."""
        upload = await self._find(call)
        await self._desk.drop(upload)
        return DeletedUpload(id=upload.id)

    async def _find(self, call: Call[Empty, Empty]) -> Upload:
        upload_id = call.path("upload")
        upload = await self._desk.upload(upload_id, tenant_id=call.identity.visible_tenant)
        if upload is None:
            raise missing("upload", upload_id)
        return upload

    def _view(self, upload: Upload) -> UploadView:
        is_complete = upload.status is UploadStatus.COMPLETE
        is_joining = not is_complete and self._desk.is_joining(upload.id)
        received = upload.size_bytes if is_complete else sum(upload.size_of(number) for number in upload.parts)
        return UploadView(
            id=upload.id,
            name=upload.name,
            status="completing" if is_joining else upload.status.value,
            size_bytes=upload.size_bytes,
            part_bytes=upload.part_bytes,
            part_count=upload.part_count,
            parts=list(upload.parts),
            received_bytes=received,
            digest=upload.digest,
            uri=uri_of(upload.digest) if is_complete else "",
            owner_id=upload.tenant_id,
            created_at=int(upload.created_at),
            expires_at=int(upload.expires_at),
        )


def _folder_faults(wanted: NewFolder) -> Iterator[Fault]:
    if NAME_PATTERN.fullmatch(wanted.name) is None:
        yield Fault("name", "use 1 to 96 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    if not 1 <= len(wanted.files) <= FILES_MAX:
        yield Fault("files", f"must be 1 to {FILES_MAX}")
    seen: set[str] = set()
    for at, file in enumerate(wanted.files[:FILES_MAX]):
        if not is_plain(file.path):
            yield Fault(f"files.{at}.path", "use a plain relative path, like adapter_config.json")
        elif file.path in seen:
            yield Fault(f"files.{at}.path", "is named twice")
        if _DIGEST.fullmatch(file.digest) is None:
            yield Fault(f"files.{at}.digest", "write sha256: and 64 lower-case hex digits")
        seen.add(file.path)


def _faults(wanted: NewUpload, bytes_max: int) -> list[Fault]:
    faults = []
    if NAME_PATTERN.fullmatch(wanted.name) is None:
        rule = "use 1 to 96 letters, digits, '.', '_' or '-', beginning with a letter or digit; one '/' may follow"
        faults.append(Fault("name", rule))
    if not 1 <= wanted.size_bytes <= bytes_max:
        faults.append(Fault("size_bytes", f"must be 1 to {bytes_max} (control.upload_bytes_max)"))
    if wanted.digest and _DIGEST.fullmatch(wanted.digest) is None:
        faults.append(Fault("digest", "write sha256: and 64 lower-case hex digits"))
    size, part = wanted.size_bytes, wanted.part_bytes
    if part is not None and not 1 <= part <= PART_BYTES_MAX:
        faults.append(Fault("part_bytes", f"must be 1 to {PART_BYTES_MAX}"))
    elif part is not None and part < min(size, PART_BYTES_MIN):
        faults.append(Fault("part_bytes", f"must be at least {PART_BYTES_MIN}, or the whole file"))
    elif part is not None and -(-size // part) > PARTS_MAX:
        faults.append(
            Fault("part_bytes", f"makes more than {PARTS_MAX} parts; choose at least {-(-size // PARTS_MAX)}")
        )
    return faults


def _number(text: str, upload: Upload) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0
    if not 1 <= number <= upload.part_count:
        raise errors.invalid_value("number", f"this upload has the parts 1 to {upload.part_count}")
    return number


def _check_length(request: Request, wanted: int) -> None:
    """Refuse a part whose announced length is wrong before any of it is written."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) != wanted:
        raise errors.invalid_value("content-length", f"this part has {wanted} bytes, and {length} are announced")
