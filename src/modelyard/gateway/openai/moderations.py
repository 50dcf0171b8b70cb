"""``POST /v1/moderations``: the request."""

from typing import Annotated

import msgspec

from modelyard import errors
from modelyard.gateway.openai.call import Call, Incoming, ModelName, decode_strict, not_counted
from modelyard.gateway.openai.chat import ImagePart, TextPart

INPUTS_MAX = 2048
MODEL_DEFAULT = "omni-moderation-latest"
"""What OpenAI calls without a model; an endpoint of this name answers here."""


class ModerationRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body: a text, texts, or the parts of one message."""

    input: str | Annotated[list[str | TextPart | ImagePart], msgspec.Meta(min_length=1, max_length=INPUTS_MAX)]
    model: ModelName = MODEL_DEFAULT


class _Sent(msgspec.Struct):
    model: str
    input: object


_decoder = msgspec.json.Decoder(ModerationRequest)


def decode_moderation(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_decoder, incoming.body)
    given = request.input if isinstance(request.input, list) else [request.input]
    if len({isinstance(item, str) for item in given}) > 1:
        raise errors.invalid_value("input", "it mixes texts and parts", code="invalid_type")
    length = 0
    for place, item in enumerate(given):
        if isinstance(item, ImagePart):
            if not item.image_url.url.startswith("data:"):
                where = f"input[{place}].image_url.url"
                raise errors.invalid_value(where, "only data: URLs are accepted; links are not fetched")
        else:
            length += len(item if isinstance(item, str) else item.text)
    return Call(
        model=request.model,
        request=_Sent(request.model, request.input),
        text_length=length,
        output_tokens=0,
        ignored=ignored,
        meter=not_counted(),
    )
