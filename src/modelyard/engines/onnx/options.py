"""What a deploy of the engine ``onnx`` may set, and which routes each task serves."""

from typing import Annotated, Literal

import msgspec

Task = Literal["auto", "embeddings", "classify", "token_classify", "rerank", "image_classify", "tensors"]

TENSORS_ROUTE = "/v2/models/{model}/infer"
TASK_ROUTES: dict[str, frozenset[str]] = {
    "embeddings": frozenset({"/v1/embeddings", "/v1/rerank", "/v1/score"}),
    "rerank": frozenset({"/v1/rerank", "/v1/score"}),
    "classify": frozenset({"/v1/classify"}),
    "token_classify": frozenset({"/v1/token_classify"}),
    "image_classify": frozenset({"/v1/classify"}),
    "tensors": frozenset(),
}
"""Beside ``TENSORS_ROUTE``, which every model serves."""

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1000)]


class OnnxOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of the process come first; the others are of one model, so a guest has its own."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    """Requests at once; what they hold is batched together."""
    guests: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """Further models that a running replica takes in."""
    guests_mib: Annotated[int, msgspec.Meta(ge=16, le=1_048_576)] = 512
    """Memory for all of them together; those unused for longest leave it, and come back with their next request."""
    parallel: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Batches computed at once, each on its share of the cores; 0: one batch on all of them."""
    task: Task = "auto"
    """What the model is for; ``auto``: as its configuration and its outputs say."""
    file: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Which of a folder's ONNX files; "": ``model.onnx``, ``onnx/model.onnx``, or the only one."""
    context_length: Annotated[int, msgspec.Meta(ge=1, le=131_072)] = 512
    """Most tokens of a text, its special tokens among them; the model's own limit where that is lower."""
    truncate: bool = True
    """Cut longer texts, as most libraries do; without it they are refused."""
    pooling: Literal["", "mean", "cls", "last"] = ""
    """How token vectors become one; "": as ``1_Pooling/config.json`` says, else the mean."""
    normalize: Literal["", "yes", "no"] = ""
    """Scale vectors to length 1; "": as ``modules.json`` says, and yes without that file."""
    token_ids: bool = False
    """Take arrays of token ids for texts. Off: a client's tokenizer is rarely the model's."""
    function: Literal["", "softmax", "sigmoid", "none"] = ""
    """What makes scores of the outputs; "": as ``problem_type`` says, and none where the graph ends in one."""
    batch_max: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Most texts, pictures or tensors computed together."""
    batch_tokens_max: Annotated[int, msgspec.Meta(ge=16, le=1_048_576)] = 1024
    """Most tokens of a batch, padding among them: they cost memory, and more of them gain a CPU nothing."""
    delay_ms: Milliseconds = 0.0
    """How long a batch that is not full waits for more. 0: it starts when a core is free, since waiting gains a CPU
    nothing."""
    batch_tensors: bool = False
    """Join tensor requests along their first axis; only for models whose rows do not touch each other."""
    queue_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2048
    """Texts, pictures or tensors that may wait for one model; more are refused with 429."""
    pixels_max: Annotated[int, msgspec.Meta(ge=1, le=200_000_000)] = 40_000_000
    """Most pixels of a picture, as its header says."""


def routes_of(task: str) -> frozenset[str]:
    """Return the API paths of a task; of ``auto`` all, since only the model knows."""
    if task == "auto":
        return frozenset().union(*TASK_ROUTES.values(), {TENSORS_ROUTE})
    return TASK_ROUTES[task] | {TENSORS_ROUTE}
