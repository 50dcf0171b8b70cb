"""``/v1/images/generations`` and ``/v1/images/edits``: billed by the picture.

Engines are asked for the pictures themselves: a link would name the engine's
own address. Who asks for links gets ``data:`` URLs.
"""

from typing import Annotated, Any, Literal

import msgspec

from modelyard.domain.usage import Unit
from modelyard.gateway.dialects import StreamTranslation
from modelyard.gateway.openai.call import Call, Incoming, Meter, ModelName, decode_strict
from modelyard.gateway.openai.forms import decode_form
from modelyard.gateway.sse import Usage

PROMPT_MAX = 32_000
_INLINE: Literal["b64_json"] = "b64_json"

_encode = msgspec.json.Encoder().encode
_any = msgspec.json.Decoder()

Short = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ImageRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body; of an edit, the fields beside the files."""

    model: ModelName
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=PROMPT_MAX)]
    n: Annotated[int, msgspec.Meta(ge=1, le=10)] | None = None
    size: Short | None = None
    quality: Short | None = None
    background: Short | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    response_format: Literal["url", "b64_json"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = None
    user: Annotated[str, msgspec.Meta(max_length=512)] | None = None


class GenerationRequest(ImageRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A picture from words."""

    style: Short | None = None
    moderation: Literal["low", "auto"] | None = None


class EditRequest(ImageRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A picture from pictures and words."""

    input_fidelity: Literal["high", "low"] | None = None


class _Pictures(msgspec.Struct):
    data: list[msgspec.Raw] = []


_generation = msgspec.json.Decoder(GenerationRequest)
_pictures = msgspec.json.Decoder(_Pictures)


def decode_generation(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_generation, incoming.body)
    return _call(request, ignored)


def decode_edit(incoming: Incoming) -> Call:
    """Return the decoded form.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, given = decode_form(incoming, EditRequest, {"image": True, "mask": False})
    call = _call(request, given.ignored)
    given.form = given.with_field("response_format", _INLINE)
    call.payload_for = given.payload_for()
    call.content_type = given.form.content_type
    return call


def _call(request: ImageRequest, ignored: tuple[str, ...]) -> Call:
    wanted = request.n or 1
    wants_links = request.response_format == "url"
    user = request.user or ""
    request.response_format = _INLINE
    call = Call(
        model=request.model,
        request=request,
        text_length=len(request.prompt),
        choices=wanted,
        output_tokens=0,
        ignored=ignored,
        translation=LinksTranslation(request.output_format or "png") if wants_links else None,
        needs=(("images.stream", "stream"),) if request.stream else (),
        user=user,
        meter=Meter(Unit.IMAGES, wanted, _count),
    )
    request.stream = request.partial_images = request.user = None
    return call


def _count(answer: bytes) -> float:
    try:
        return len(_pictures.decode(answer).data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return 0.0


class LinksTranslation:
    """Pictures on their way back as links that hold them."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def answer(self, chat: bytes, usage: Usage, request_id: str) -> bytes:
        """Return the answer with ``url`` in place of ``b64_json``.

        Raises:
            ValueError: it holds no pictures.
        """
        body = _any.decode(chat)
        pictures: Any = body.get("data") if isinstance(body, dict) else None
        if not isinstance(pictures, list) or not all(isinstance(p, dict) and _INLINE in p for p in pictures):
            raise ValueError("no pictures")
        for picture in pictures:
            picture["url"] = f"data:image/{self._kind};base64,{picture.pop(_INLINE)}"
        return _encode(body)

    def stream(self, request_id: str) -> StreamTranslation:
        """Refuse: pictures are not streamed."""
        raise AssertionError("pictures are not streamed")
