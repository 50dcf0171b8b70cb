"""``POST /v1/embeddings``: the request."""

from typing import Annotated, Literal

import msgspec

from modelyard.gateway.openai.call import Call, ModelName, decode_strict
from modelyard.gateway.openai.completions import Prompt, measure

INPUTS_MAX = 2048


class EmbeddingRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body. The official SDKs ask for ``base64`` unless told otherwise."""

    model: ModelName
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None
    user: Annotated[str, msgspec.Meta(max_length=512)] | None = None


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def decode_embedding(body: bytes) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_decoder, body)
    inputs, length = measure(request.input, "input", inputs_max=INPUTS_MAX)
    request.user = None
    needs = [("dimensions", "dimensions")] if request.dimensions is not None else []
    if not isinstance(request.input, str) and not isinstance(request.input[0], str):
        # The client's tokenizer need not be the model's; an engine that cannot know must not embed garbage.
        needs.append(("token_arrays", "input"))
    return Call(
        model=request.model,
        request=request,
        text_length=length,
        choices=inputs,
        output_tokens=0,
        ignored=ignored,
        needs=tuple(needs),
    )
