"""``/v1/classify`` for texts and pictures, and ``/v1/token_classify`` for what is named in a text.

Classify takes and gives what vLLM does, with OpenAI's ``image_url`` parts (or a form with files) for pictures; tagging
has no route at OpenAI or Cohere, so its entities have the form of Hugging Face's ``token-classification``. A
picture that is a link is fetched by the gateway (``gateway/links.py``), never by an engine.
"""

import base64
from typing import Annotated, Literal

import msgspec

from modelyard import errors
from modelyard.domain.usage import Unit
from modelyard.gateway.openai.call import Call, Incoming, Link, Meter, ModelName, decode_strict, not_counted
from modelyard.gateway.openai.chat_request import ImagePart, ImageUrl, TextPart
from modelyard.gateway.openai.forms import decode_form
from modelyard.gateway.openai.ranking import DOCUMENTS_MAX, Texts, listed

PICTURES_MAX = 16
PICTURES = "classify.pictures"
"""What an engine declares that takes pictures."""
_PICTURE_TYPES = (b"image/png", b"image/jpeg", b"image/webp")


class ClassifyRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is to be classified: each item gets its classes."""

    model: ModelName
    input: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[list[str | TextPart | ImagePart], msgspec.Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    )


class ClassifyForm(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields of a form beside its files."""

    model: ModelName


class TokenClassifyRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Texts to tag; the strategies are those of ``transformers``."""

    model: ModelName
    input: Texts
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = None


_classify = msgspec.json.Decoder(ClassifyRequest)
_tag = msgspec.json.Decoder(TokenClassifyRequest)


def decode_classify(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    if (incoming.header(b"content-type") or b"").lower().startswith(b"multipart/form-data"):
        request, ignored = _of_form(incoming)
    else:
        request, ignored = decode_strict(_classify, incoming.body)
    given = request.input if isinstance(request.input, list) else [request.input]
    pictures = [(place, item) for place, item in enumerate(given) if isinstance(item, ImagePart)]
    if len(pictures) > PICTURES_MAX:
        raise errors.invalid_value("input", f"it has more than {PICTURES_MAX} pictures")
    texts = [item if isinstance(item, str) else item.text for item in given if not isinstance(item, ImagePart)]
    if pictures and texts:
        raise errors.invalid_value("input", "it mixes texts and pictures", code="invalid_type")
    if not pictures:
        listed(texts, "input")
        if isinstance(request.input, list):
            request.input = list(texts)
    for _, item in pictures:
        item.image_url.detail = None
    return Call(
        model=request.model,
        request=request,
        text_length=sum(map(len, texts)),
        choices=len(given),
        output_tokens=0,
        ignored=ignored,
        engine_route="/v1/classify",
        needs=((PICTURES, "input"),) if pictures else (),
        meter=Meter(Unit.IMAGES, len(pictures), lambda _answer: len(pictures)) if pictures else not_counted(),
        links=tuple(
            Link(f"input[{place}].image_url.url", item.image_url)
            for place, item in pictures
            if not item.image_url.url.startswith("data:")
        ),
    )


def decode_token_classify(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_tag, incoming.body)
    texts = listed(request.input, "input")
    return Call(
        model=request.model,
        request=request,
        text_length=sum(map(len, texts)),
        choices=len(texts),
        output_tokens=0,
        ignored=ignored,
        engine_route="/v1/token_classify",
        meter=not_counted(),
    )


def _of_form(incoming: Incoming) -> tuple[ClassifyRequest, tuple[str, ...]]:
    """Return a form with pictures as the request that it stands for."""
    fields, form = decode_form(incoming, ClassifyForm, {"file": True})
    parts: list[str | TextPart | ImagePart] = []
    for file in form.files["file"]:
        kind = file.content_type if file.content_type in _PICTURE_TYPES else _PICTURE_TYPES[0]
        url = b"data:%b;base64,%b" % (kind, base64.b64encode(file.content))
        parts.append(ImagePart(ImageUrl(url.decode())))
    return ClassifyRequest(model=fields.model, input=parts), form.ignored
