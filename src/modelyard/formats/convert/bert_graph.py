"""The graph of a BERT: embeddings, layers of attention and feed-forward, a head; in plain operators of ONNX."""

from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.formats.convert import ConvertError

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPSET = 20
"""The first with ``Gelu``."""
IR_VERSION = 10
_MASKED = -1e9
_ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}


class Shape(msgspec.Struct, frozen=True):
    """What of ``config.json`` the graph depends on."""

    family: str
    head: str
    """"", ``classify`` or ``token_classify``."""
    layers: int
    heads: int
    hidden: int
    activation: str
    epsilon: float
    first_position: int


def build(shape: Shape, tensors: "dict[str, NDArray[Any]]") -> Any:
    """Return the model (``onnx.ModelProto``).

    Raises:
        ConvertError: a tensor is missing, or an activation is none that is known.
    """
    from onnx import TensorProto, helper

    graph = _Graph(shape, tensors)
    graph.embed()
    for layer in range(shape.layers):
        graph.layer(layer)
    output, axes = graph.head()
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if graph.has_types else [])
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in names]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, axes)]
    made = helper.make_graph(graph.nodes, shape.family, inputs, outputs, graph.initializers)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION, producer_name="modelyard")


class _Graph:
    """Nodes and weights so far; ``at`` is the name of the hidden states."""

    def __init__(self, shape: Shape, tensors: "dict[str, NDArray[Any]]") -> None:
        self.shape = shape
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.at = ""
        self._tensors = tensors
        self._count = 0
        self._known: set[str] = set()
        self._prefix = f"{shape.family}." if any(name.startswith(f"{shape.family}.") for name in tensors) else ""
        self.has_types = f"{self._prefix}embeddings.token_type_embeddings.weight" in tensors

    def embed(self) -> None:
        """Add words, positions and types of tokens."""
        base = f"{self._prefix}embeddings"
        words = self._add("Gather", [self._weight(f"{base}.word_embeddings.weight"), "input_ids"])
        first = self.shape.first_position
        length = self._add("Shape", ["input_ids"], start=1, end=2)
        end = self._add("Add", [length, self._constant("first", [first])]) if first else length
        table = self._weight(f"{base}.position_embeddings.weight")
        axis = self._constant("axis", [0])
        positions = self._add("Slice", [table, self._constant("first", [first]), end, axis])
        total = self._add("Add", [words, positions])
        if self.has_types:
            kinds = self._add("Gather", [self._weight(f"{base}.token_type_embeddings.weight"), "token_type_ids"])
            total = self._add("Add", [total, kinds])
        self.at = self._normalised(total, f"{base}.LayerNorm")
        self._mask()

    def layer(self, number: int) -> None:
        """Add a layer."""
        if self.shape.family == "distilbert":
            base = f"{self._prefix}transformer.layer.{number}"
            names = [f"{base}.attention.{one}" for one in ("q_lin", "k_lin", "v_lin", "out_lin")]
            after, last = f"{base}.sa_layer_norm", f"{base}.output_layer_norm"
            inner, outer = f"{base}.ffn.lin1", f"{base}.ffn.lin2"
        else:
            base = f"{self._prefix}encoder.layer.{number}"
            names = [f"{base}.attention.self.{one}" for one in ("query", "key", "value")]
            names.append(f"{base}.attention.output.dense")
            after, last = f"{base}.attention.output.LayerNorm", f"{base}.output.LayerNorm"
            inner, outer = f"{base}.intermediate.dense", f"{base}.output.dense"
        attended = self._attention(names)
        middle = self._normalised(self._add("Add", [attended, self.at]), after)
        wide = self._activated(self._linear(middle, inner))
        self.at = self._normalised(self._add("Add", [self._linear(wide, outer), middle]), last)

    def head(self) -> tuple[str, list[Any]]:
        """Add what stands on the last layer; return its output's name and axes."""
        if not self.shape.head:
            self._add("Identity", [self.at], output="last_hidden_state")
            return "last_hidden_state", ["batch", "tokens", self.shape.hidden]
        if self.shape.head == "token_classify":
            labels = self._find("classifier.weight").shape[0]
            self._linear(self.at, "classifier", output="logits")
            return "logits", ["batch", "tokens", labels]
        first = self._add("Gather", [self.at, self._constant("zero", 0)], axis=1)
        if self.shape.family == "roberta":
            pooled, last = self._add("Tanh", [self._linear(first, "classifier.dense")]), "classifier.out_proj"
        elif self.shape.family == "distilbert":
            pooled, last = self._add("Relu", [self._linear(first, "pre_classifier")]), "classifier"
        else:
            pooled, last = self._add("Tanh", [self._linear(first, f"{self._prefix}pooler.dense")]), "classifier"
        labels = self._find(f"{last}.weight").shape[0]
        self._linear(pooled, last, output="logits")
        return "logits", ["batch", labels]

    def _mask(self) -> None:
        """Make what is added to the attention of each token: nothing, or for padding nearly minus infinity."""
        from onnx import TensorProto

        ones = self._add("Cast", ["attention_mask"], to=TensorProto.FLOAT)
        hidden = self._add("Sub", [self._constant("one", 1.0), ones])
        scaled = self._add("Mul", [hidden, self._constant("masked", _MASKED)])
        self._add("Unsqueeze", [scaled, self._constant("axes", [1, 2])], output="mask")

    def _attention(self, names: list[str]) -> str:
        heads, size = self.shape.heads, self.shape.hidden // self.shape.heads
        split = self._constant("split", [0, 0, heads, size])
        query, key, value = (self._add("Reshape", [self._linear(self.at, name), split]) for name in names[:3])
        query = self._add("Transpose", [query], perm=[0, 2, 1, 3])
        key = self._add("Transpose", [key], perm=[0, 2, 3, 1])
        value = self._add("Transpose", [value], perm=[0, 2, 1, 3])
        likeness = self._add("Div", [self._add("MatMul", [query, key]), self._constant("root", float(size) ** 0.5)])
        weights = self._add("Softmax", [self._add("Add", [likeness, "mask"])], axis=-1)
        mixed = self._add("Transpose", [self._add("MatMul", [weights, value])], perm=[0, 2, 1, 3])
        joined = self._add("Reshape", [mixed, self._constant("join", [0, 0, self.shape.hidden])])
        return self._linear(joined, names[3])

    def _activated(self, name: str) -> str:
        kind = self.shape.activation
        if kind == "relu":
            return self._add("Relu", [name])
        if kind not in _ACTIVATIONS:
            raise ConvertError(f"The activation '{kind[:64]}' is not converted.")
        return self._add("Gelu", [name], approximate=_ACTIVATIONS[kind])

    def _linear(self, name: str, base: str, output: str = "") -> str:
        product = self._add("MatMul", [name, self._weight(f"{base}.weight", is_turned=True)])
        return self._add("Add", [product, self._weight(f"{base}.bias")], output=output)

    def _normalised(self, name: str, base: str) -> str:
        # Old checkpoints call weight and bias by their letters.
        old = f"{base}.gamma" in self._tensors
        scale, shift = (f"{base}.gamma", f"{base}.beta") if old else (f"{base}.weight", f"{base}.bias")
        inputs = [name, self._weight(scale), self._weight(shift)]
        return self._add("LayerNormalization", inputs, axis=-1, epsilon=self.shape.epsilon)

    def _find(self, name: str) -> "NDArray[Any]":
        if name not in self._tensors:
            raise ConvertError(f"The model lacks the tensor '{name}' that its class needs.")
        return self._tensors[name]

    def _weight(self, name: str, *, is_turned: bool = False) -> str:
        array = self._find(name)
        return self._keep(name, array.T if is_turned else array)

    def _constant(self, name: str, value: Any) -> str:
        import numpy as np

        return self._keep(f"const.{name}", np.array(value, np.float32 if isinstance(value, float) else np.int64))

    def _keep(self, name: str, array: "NDArray[Any]") -> str:
        import numpy as np

        from onnx import numpy_helper

        if name not in self._known:
            self._known.add(name)
            dense = np.ascontiguousarray(array).reshape(array.shape)  # it would make a list of a single number
            self.initializers.append(numpy_helper.from_array(dense, name))
        return name

    def _add(self, kind: str, inputs: list[str], *, output: str = "", **attributes: Any) -> str:
        from onnx import helper

        self._count += 1
        output = output or f"{kind.lower()}_{self._count}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"{kind}_{self._count}", **attributes))
        return output
