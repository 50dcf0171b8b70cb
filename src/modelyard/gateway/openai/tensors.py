"""``POST /v2/models/{model}/infer``: the Open Inference Protocol (KServe v2), with tensors as JSON.

Tensors in binary behind the JSON (``Inference-Header-Content-Length``) are
refused, and so are parameters, which in real servers name shared memory,
sequences and priorities. The one that is taken says that outputs are wanted as
JSON, as they are anyway; clients like ``tritonclient`` send it.
"""

import math
from typing import Annotated, Literal
from urllib.parse import unquote

import msgspec

from modelyard import errors
from modelyard.domain.usage import Unit
from modelyard.gateway.openai.call import MODEL_LENGTH_MAX, Call, Incoming, Meter, decode_strict

PREFIX, SUFFIX = "/v2/models/", "/infer"
ROUTE = "/v2/models/{model}/infer"
"""What an engine declares, and where it is called; its own name of the model takes the place of ``{model}``."""

TENSORS_MAX = 64
ELEMENTS_MAX = 2**31 - 1
_BINARY_HEADER = b"inference-header-content-length"
_encode = msgspec.json.Encoder().encode

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16",
    "BYTES",
]  # fmt: skip
Size = Annotated[int, msgspec.Meta(ge=0, le=ELEMENTS_MAX)]


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """One input; ``data`` is an array, nested or flat."""

    name: Name
    shape: Annotated[list[Size], msgspec.Meta(max_length=32)]
    datatype: Datatype
    data: msgspec.Raw


class OutputParameters(msgspec.Struct, forbid_unknown_fields=True):
    """How an output is wanted."""

    binary_data: bool = False


class RequestParameters(msgspec.Struct, forbid_unknown_fields=True):
    """How all outputs are wanted."""

    binary_data_output: bool = False


class OutputTensor(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """An output that is wanted."""

    name: Name
    parameters: OutputParameters | None = None


class InferRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body."""

    id: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    inputs: Annotated[list[InputTensor], msgspec.Meta(min_length=1, max_length=TENSORS_MAX)]
    outputs: Annotated[list[OutputTensor], msgspec.Meta(max_length=TENSORS_MAX)] | None = None
    parameters: RequestParameters | None = None


_decoder = msgspec.json.Decoder(InferRequest)


def is_infer(path: str) -> bool:
    """Say whether ``path`` is the route's, for one model."""
    return path.startswith(PREFIX) and path.endswith(SUFFIX) and len(path) > len(PREFIX) + len(SUFFIX)


def decode_infer(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    model = unquote(incoming.path[len(PREFIX) : -len(SUFFIX)])
    if len(model) > MODEL_LENGTH_MAX:
        raise errors.invalid_value("model", f"it is longer than {MODEL_LENGTH_MAX} characters")
    if incoming.header(_BINARY_HEADER) is not None:
        reason = "tensors are taken as JSON only; send them in 'data'"
        raise errors.unsupported_parameter("Inference-Header-Content-Length", reason)
    request, ignored = decode_strict(_decoder, incoming.body)
    for place, tensor in enumerate(request.inputs):
        if not bytes(tensor.data).startswith(b"["):
            raise errors.invalid_value(f"inputs[{place}].data", "it is no array", code="invalid_type")
        if math.prod(tensor.shape) > ELEMENTS_MAX:
            raise errors.invalid_value(f"inputs[{place}].shape", f"it has more than {ELEMENTS_MAX} elements")
    _refuse_binary(request)
    body = _encode(request)
    return Call(
        model=model,
        request=request,
        text_length=0,
        output_tokens=0,
        ignored=ignored,
        engine_route=ROUTE,
        payload=body,
        payload_for=lambda _name: body,
        meter=Meter(Unit.REQUESTS, 1, lambda _answer: 1),
    )


def _refuse_binary(request: InferRequest) -> None:
    """Refuse outputs in binary, and forget that JSON was asked for: not every engine knows the parameter."""
    reason = "tensors are given as JSON only; leave it out, or say false"
    if request.parameters is not None:
        if request.parameters.binary_data_output:
            raise errors.unsupported_parameter("parameters.binary_data_output", reason)
        request.parameters = None
    for place, output in enumerate(request.outputs or ()):
        if output.parameters is not None:
            if output.parameters.binary_data:
                raise errors.unsupported_parameter(f"outputs[{place}].parameters.binary_data", reason)
            output.parameters = None
