"""What a model is for: by the option, else by what its configuration and its graph say."""

from typing import Any, NamedTuple

from modelyard.engines.onnx.artifact import Artifact, ends_in_scores
from modelyard.engines.onnx.options import OnnxOptions
from modelyard.formats import ArtifactInvalidError

TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
POOLED = ("sentence_embedding", "text_embeds", "embeddings")
HIDDEN = ("last_hidden_state", "token_embeddings")
TEXT_TASKS = frozenset({"embeddings", "classify", "token_classify", "rerank"})
_BY_CLASS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForImageClassification": "image_classify",
}


class Judgement(NamedTuple):
    """What a model is for, and how its answers are made."""

    task: str
    output: str
    """The output that is read; "" for tensors."""
    pooling: str = ""
    is_normalised: bool = False
    function: str = "none"


def judge(artifact: Artifact, options: OnnxOptions, inputs: list[Any], outputs: list[Any]) -> Judgement:
    """Return what the model does; ``inputs`` and ``outputs`` are ONNX Runtime's descriptions.

    Raises:
        ArtifactInvalidError: the asked task is none that this model can do.
    """
    task = options.task if options.task != "auto" else _task(artifact, inputs, outputs)
    if task == "tensors":
        return Judgement(task, "")
    _check(task, artifact, inputs)
    output = _output(task, outputs)
    if task == "embeddings":
        return Judgement(
            task, output, options.pooling or _pooling(artifact), is_normalised=_normalises(artifact, options)
        )
    return Judgement(task, output, function=options.function or _function(task, artifact, output))


def _task(artifact: Artifact, inputs: list[Any], outputs: list[Any]) -> str:
    names = {node.name for node in inputs}
    is_text = artifact.tokenizer is not None and "input_ids" in names and names <= TEXT_INPUTS
    is_picture = len(inputs) == 1 and len(inputs[0].shape) == 4
    for ending, task in _BY_CLASS.items():
        if artifact.architecture.endswith(ending) and (is_picture if task == "image_classify" else is_text):
            return "rerank" if task == "classify" and _label_count(artifact, outputs) == 1 else task
    if is_picture and artifact.preprocessor and artifact.labels:
        return "image_classify"
    if not is_text:
        return "tensors"
    ranks = {node.name: len(node.shape) for node in outputs}
    if any(name in ranks for name in (*POOLED, *HIDDEN)):
        return "embeddings"
    if "logits" in ranks and artifact.labels:
        return "token_classify" if ranks["logits"] == 3 else "classify"
    return "embeddings" if artifact.architecture.endswith("Model") or artifact.modules else "tensors"


def _check(task: str, artifact: Artifact, inputs: list[Any]) -> None:
    names = {node.name for node in inputs}
    if task in TEXT_TASKS:
        if artifact.tokenizer is None:
            raise ArtifactInvalidError(
                f"The task '{task}' needs a tokenizer.json beside the ONNX file, in one folder; 'tensors' does not."
            )
        if "input_ids" not in names or not names <= TEXT_INPUTS:
            raise ArtifactInvalidError(
                f"The task '{task}' cannot be done by a graph with the inputs {', '.join(sorted(names))[:200]}; "
                "the task 'tensors' can."
            )
    elif len(inputs) != 1 or len(inputs[0].shape) != 4:
        raise ArtifactInvalidError("The task 'image_classify' needs a graph with one input of four axes.")


def _output(task: str, outputs: list[Any]) -> str:
    names = [str(node.name) for node in outputs]
    wanted = (*POOLED, *HIDDEN) if task == "embeddings" else ("logits",)
    for name in wanted:
        if name in names:
            return name
    rank = 3 if task == "token_classify" else 2
    fitting = [node.name for node in outputs if len(node.shape) == rank]
    if task == "embeddings":
        fitting = [node.name for node in outputs if len(node.shape) == 3] or fitting
    return str(fitting[0]) if fitting else names[0]


def _label_count(artifact: Artifact, outputs: list[Any]) -> int:
    if artifact.labels:
        return len(artifact.labels)
    last = outputs[0].shape[-1] if outputs and outputs[0].shape else None
    if isinstance(last, int):
        return last
    named = artifact.config.get("num_labels")
    return named if isinstance(named, int) else 2  # the default of transformers


def _pooling(artifact: Artifact) -> str:
    said = artifact.pooling
    for key, how in (
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_lasttoken", "last"),
        ("pooling_mode_mean_tokens", "mean"),
    ):
        if said.get(key) is True:
            return how
    others = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    if others:
        raise ArtifactInvalidError(f"1_Pooling/config.json asks for '{others[0][:64]}', which is not known here.")
    return "mean"


def _normalises(artifact: Artifact, options: OnnxOptions) -> bool:
    if options.normalize:
        return options.normalize == "yes"
    return "Normalize" in artifact.modules if artifact.modules else True


def _function(task: str, artifact: Artifact, output: str) -> str:
    if ends_in_scores(artifact.model, output):
        return "none"
    if task == "rerank":
        said = artifact.config.get("sentence_transformers")
        activation = str(said.get("activation_fn", "")) if isinstance(said, dict) else ""
        return "none" if activation.endswith("Identity") else "sigmoid"
    is_multiple = artifact.config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if is_multiple and task == "classify" else "softmax"
