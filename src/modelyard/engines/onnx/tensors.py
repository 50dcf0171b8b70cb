"""Tensors of the Open Inference Protocol (KServe v2), JSON to numpy and back."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from modelyard.engines.onnx.refusals import Refused, wrong_request

if TYPE_CHECKING:
    from numpy.typing import NDArray

ELEMENTS_MAX = 64 * 1024 * 1024

DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "BYTES": "object",
}  # fmt: skip
"""Of numpy. BF16 has no form in JSON that numpy reads."""
_OF_ONNX = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}  # fmt: skip


class InputTensor(msgspec.Struct):
    """One input; ``data`` is flat or nested."""

    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    datatype: str
    data: list[Any]


class WantedTensor(msgspec.Struct):
    """An output that is asked for."""

    name: str


class InferRequest(msgspec.Struct):
    """``POST /v2/models/{model}/infer``."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[WantedTensor] | None = None


def datatype_of(onnx_type: str) -> str | None:
    """Return the protocol's name of a type of ONNX Runtime; None for what is no tensor, or none it can carry."""
    return _OF_ONNX.get(onnx_type)


def metadata_of(nodes: list[Any]) -> list[dict[str, Any]]:
    """Return inputs or outputs as the protocol describes them; -1 is a size of any value."""
    return [
        {
            "name": node.name,
            "datatype": datatype_of(node.type) or node.type,
            "shape": [size if isinstance(size, int) else -1 for size in node.shape],
        }
        for node in nodes
    ]


def read_feeds(request: InferRequest, nodes: list[Any]) -> "dict[str, NDArray[Any]]":
    """Return the arrays of a request, checked against the model's inputs.

    Raises:
        Refused: 400 naming the tensor that is wrong or missing.
    """
    known = {node.name: node for node in nodes}
    feeds: dict[str, NDArray[Any]] = {}
    for place, tensor in enumerate(request.inputs):
        where = f"inputs[{place}]"
        node = known.get(tensor.name)
        if node is None:
            raise wrong_request(f"The model has no input '{tensor.name[:100]}'; it has {', '.join(known)}.", where)
        if tensor.name in feeds:
            raise wrong_request(f"The input '{tensor.name}' is given twice.", where)
        feeds[tensor.name] = _array(tensor, node, where)
    if missing := [name for name in known if name not in feeds]:
        raise wrong_request(f"The input '{missing[0]}' is missing.", "inputs", "missing_parameter")
    return feeds


def written(name: str, array: "NDArray[Any]") -> dict[str, Any]:
    """Return an output tensor."""
    datatype = next((key for key, value in DATATYPES.items() if array.dtype == value), "FP32")
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.reshape(-1).tolist()}


def _array(tensor: InputTensor, node: Any, where: str) -> "NDArray[Any]":
    import numpy as np

    wanted = datatype_of(node.type)
    if tensor.datatype != wanted:
        raise wrong_request(f"The input '{tensor.name}' is {wanted}, not {tensor.datatype[:16]}.", f"{where}.datatype")
    if len(node.shape) != len(tensor.shape) and node.shape:
        raise wrong_request(f"The input '{tensor.name}' has {len(node.shape)} axes.", f"{where}.shape")
    for given, size in zip(tensor.shape, node.shape, strict=False):
        if isinstance(size, int) and given != size:
            raise wrong_request(f"The input '{tensor.name}' has the shape {list(node.shape)}.", f"{where}.shape")
    count = math.prod(tensor.shape)
    if count > ELEMENTS_MAX:
        raise wrong_request(f"The input '{tensor.name}' has more than {ELEMENTS_MAX:,} elements.", f"{where}.shape")
    kind = np.dtype(DATATYPES[wanted])
    flat = _flat(tensor.data, tensor, where)
    if len(flat) != count:
        raise wrong_request(
            f"The input '{tensor.name}' has {len(flat)} elements, and its shape says {count}.", f"{where}.data"
        )
    _check_elements(flat, wanted, tensor, where)
    try:
        return np.array(flat, dtype=kind).reshape(tensor.shape)
    except (ValueError, OverflowError, TypeError):
        raise wrong_request(f"The input '{tensor.name}' has elements that are no {wanted}.", f"{where}.data") from None


def _flat(data: list[Any], tensor: InputTensor, where: str) -> list[Any]:
    depth = 0
    while data and isinstance(data[0], list):
        depth += 1
        if depth >= len(tensor.shape) or not all(isinstance(one, list) for one in data):
            raise _not_nested(tensor, where)
        data = [one for row in data for one in row]
    if depth not in (0, len(tensor.shape) - 1):
        raise _not_nested(tensor, where)
    return data


def _not_nested(tensor: InputTensor, where: str) -> Refused:
    return wrong_request(f"The input '{tensor.name}' is neither flat nor nested as its shape says.", f"{where}.data")


def _check_elements(flat: list[Any], wanted: str, tensor: InputTensor, where: str) -> None:
    """Refuse what numpy would turn into something else without a word."""
    right: tuple[type, ...] = (int,)
    if wanted == "BYTES":
        right = (str,)
    elif wanted == "BOOL":
        right = (bool,)
    elif wanted.startswith("FP"):
        right = (int, float)
    if not {type(one) for one in flat} <= set(right):
        raise wrong_request(f"The input '{tensor.name}' has elements that are no {wanted}.", f"{where}.data")
