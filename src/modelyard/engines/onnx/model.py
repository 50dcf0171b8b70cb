"""One loaded model: a session of ONNX Runtime, its tokenizer, and what a batch through it gives.

Everything here blocks and runs in threads; ONNX Runtime and the tokenizer let go of the interpreter's lock.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.engines.onnx import pictures, scores, tensors
from modelyard.engines.onnx.artifact import Artifact, read_artifact
from modelyard.engines.onnx.judge import TEXT_TASKS, Judgement, judge
from modelyard.engines.onnx.options import OnnxOptions
from modelyard.engines.onnx.refusals import Refused, bad_output, wrong_request
from modelyard.formats import ArtifactInvalidError

if TYPE_CHECKING:
    from numpy.typing import NDArray

WARM_S_MAX = 90.0
"""Longest that a first input may take: a graph can loop for ever, and the next load waits for this one."""
_WARM_TOKENS = 512
_LABELS_MADE_MAX = 10_000


class Encoded(msgspec.Struct):
    """A text, or a pair of them, as tokens."""

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int]]
    words: list[int | None]


class Model:
    """A model that is ready to compute. Its name is what callers give."""

    def __init__(self, name: str, artifact: Artifact, options: OnnxOptions, session: Any, judged: Judgement) -> None:
        self.name = name
        self.options = options
        self.artifact = artifact
        self.task = judged.task
        self.judged = judged
        self.inputs: list[Any] = session.get_inputs()
        self.outputs: list[Any] = session.get_outputs()
        self.labels: tuple[str, ...] = ()
        self.dimensions = 0
        self.preparation: pictures.Preparation | None = None
        self._session = session
        self._kinds = {node.name: tensors.DATATYPES.get(tensors.datatype_of(node.type) or "") for node in self.inputs}
        self._padding_id = int(artifact.config.get("pad_token_id") or 0)
        self._fixed_tokens = _fixed(self.inputs, "input_ids", 1)
        self.max_tokens = min(
            [one for one in (options.context_length, artifact.max_tokens, self._fixed_tokens) if one > 0]
        )
        self._tokenizer: Any = _open_tokenizer(artifact, self.max_tokens) if self.task in TEXT_TASKS else None
        if self.task == "image_classify":
            self.preparation = _preparation(artifact, self.inputs[0].shape)
        self._running: set[Any] = set()

    def __repr__(self) -> str:
        return f"<Model {self.name}: {self.task}, {self.max_tokens} tokens>"

    @property
    def batch_fixed(self) -> int:
        """Return the size of a batch that the graph insists on, 0 for any."""
        return _fixed(self.inputs, self.inputs[0].name, 0) if self.inputs else 0

    def encode(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[Encoded]:
        """Return texts as tokens.

        Raises:
            Refused: one is too long and the model was deployed with ``truncate = false``.
        """
        found = self._tokenizer.encode_batch(list(texts))
        for place, one in enumerate(found):
            if one.overflowing and not self.options.truncate:
                raise wrong_request(
                    f"Text {place} is longer than {self.max_tokens} tokens; cut it, or deploy with truncate = true.",
                    "input",
                    "context_length_exceeded",
                )
        return [Encoded(one.ids, one.type_ids, one.offsets, one.word_ids) for one in found]

    def encode_ids(self, ids: list[int]) -> Encoded:
        """Return token ids of a caller as they are.

        Raises:
            Refused: they are none of this model's, or too many.
        """
        if not self.options.token_ids:
            raise wrong_request(
                "Token ids are not taken: a client's tokenizer is rarely the model's. Send texts, or deploy with "
                "token_ids = true.",
                "input",
                "unsupported_parameter",
            )
        if len(ids) > self.max_tokens:
            raise wrong_request(f"A text has {len(ids)} tokens; the most is {self.max_tokens}.", "input")
        if max(ids, default=0) >= self._tokenizer.get_vocab_size():
            raise wrong_request("A token id is beyond the model's vocabulary.", "input")
        return Encoded(list(ids), [0] * len(ids), [(0, 0)] * len(ids), [None] * len(ids))

    def cut(self, text: str, tokens_max: int) -> str:
        """Return the begin of a text, of at most so many tokens."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= tokens_max else text[: offsets[tokens_max - 1][1]]

    def picture(self, content: bytes) -> "NDArray[Any]":
        """Return a picture as the model takes it.

        Raises:
            Refused: it is none, too large, or broken.
        """
        assert self.preparation is not None, "only of image_classify"
        return pictures.prepared(content, self.preparation, self.options.pixels_max)

    def run(self, payloads: Sequence[Any], options: Any = None) -> list[Any]:
        """Return what the model makes of each of a batch: an array, a dict of arrays, or the ``Refused`` that it is.

        A batch that fails is computed one by one, so that a bad item fails alone. Whoever has the ``options``
        (``run_options``) can end it from another thread.
        """
        options = run_options() if options is None else options
        self._running.add(options)
        try:
            return self._each(payloads, options)
        finally:
            self._running.discard(options)

    def _each(self, payloads: Sequence[Any], options: Any) -> list[Any]:
        try:
            return _one_each(self._run(payloads, options), len(payloads))
        except Refused as refusal:
            return [refusal] * len(payloads)
        except Exception as error:  # noqa: BLE001 - boundary: ONNX Runtime's own classes, whatever the graph does
            if len(payloads) > 1:
                return [result for one in payloads for result in self._each([one], options)]
            text = str(error).rpartition("Status Message: ")[2].strip() or type(error).__name__
            return [Refused(400, "inference_failed", f"The model '{self.name}' cannot compute this: {text[:300]}")]

    def stop(self) -> None:
        """Make what is computed now end at the next operator."""
        for options in list(self._running):
            options.terminate = True

    def warm_up(self) -> None:
        """Compute something, as long as a request may be: memory is taken and caches are filled before the first.

        Raises:
            ArtifactInvalidError: the model cannot compute, or does not give what its task needs.
        """
        if self.task == "tensors":
            return
        for payload in self._samples():
            result = self.run([payload])[0]
            if isinstance(result, Refused):
                raise ArtifactInvalidError(f"The model cannot compute a first input: {result}")
            if self.task == "embeddings":
                self.dimensions = len(result)
            else:
                self._name_labels(1 if result.ndim == 0 else result.shape[-1])

    def _samples(self) -> list[Any]:
        if self.task == "image_classify":
            import numpy as np

            assert self.preparation is not None
            how = self.preparation
            shape = (how.height, how.width, 3) if how.is_channels_last else (3, how.height, how.width)
            return [np.zeros(shape, np.float32)]
        [short] = self._tokenizer.encode_batch(["warm up"])
        length = max(1, min(self.max_tokens, _WARM_TOKENS))
        ids = (short.ids * length)[:length]
        blank: list[int | None] = [None] * length
        long = Encoded(ids, [0] * length, [(0, 0)] * length, blank)
        return [Encoded(short.ids, short.type_ids, short.offsets, short.word_ids), long]

    def _name_labels(self, count: int) -> None:
        labels = self.artifact.labels
        if labels and len(labels) != count:
            raise ArtifactInvalidError(f"config.json names {len(labels)} labels, and the graph gives {count}.")
        if count > _LABELS_MADE_MAX and not labels:
            raise ArtifactInvalidError(f"The graph gives {count} classes without names.")
        self.labels = labels or tuple(f"LABEL_{index}" for index in range(count))

    def _run(self, payloads: Sequence[Any], options: Any) -> list[Any]:
        if self.task == "tensors" or isinstance(payloads[0], dict):
            return self._run_tensors(payloads, options)
        import numpy as np

        if self.task == "image_classify":
            feeds: dict[str, Any] = {self.inputs[0].name: np.stack(payloads)}
            mask = None
        else:
            feeds, mask = self._text_feeds(payloads)
        [raw] = self._session.run([self.judged.output], feeds, options)
        raw = raw.astype(np.float32, copy=False)
        return [row if np.isfinite(row).all() else bad_output(self.name) for row in self._results(raw, mask, payloads)]

    def _results(self, raw: "NDArray[Any]", mask: Any, payloads: Sequence[Any]) -> list[Any]:
        if self.task == "embeddings":
            vectors = scores.pool(raw, mask, self.judged.pooling) if raw.ndim == 3 else raw
            return list(scores.normalised(vectors) if self.judged.is_normalised else vectors)
        scored = scores.scored(raw, self.judged.function)
        if self.task == "token_classify":
            return [row[: len(one.ids)] for row, one in zip(scored, payloads, strict=True)]
        if self.task == "rerank":
            rows = scored.reshape(len(payloads), -1)
            if rows.shape[1] != 1:
                raise Refused(400, "no_reranker", f"a reranker has one label, and this model has {rows.shape[1]}")
            return list(rows[:, 0])
        return list(scored.reshape(len(payloads), -1))

    def _text_feeds(self, payloads: Sequence[Encoded]) -> tuple[dict[str, Any], "NDArray[Any]"]:
        import numpy as np

        length = self._fixed_tokens or max(len(one.ids) for one in payloads)
        ids = np.full((len(payloads), length), self._padding_id, np.int64)
        types = np.zeros_like(ids)
        mask = np.zeros_like(ids)
        for row, one in enumerate(payloads):
            ids[row, : len(one.ids)] = one.ids
            types[row, : len(one.ids)] = one.types
            mask[row, : len(one.ids)] = 1
        given = {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": types,
            "position_ids": np.broadcast_to(np.arange(length), ids.shape),
        }
        return {name: given[name].astype(kind, copy=False) for name, kind in self._kinds.items()}, mask

    def _run_tensors(self, payloads: Sequence[dict[str, Any]], options: Any) -> list[Any]:
        import numpy as np

        names = [node.name for node in self.outputs]
        rows = [len(next(iter(one.values()))) for one in payloads] if len(payloads) > 1 else [1]
        feeds = payloads[0]
        if len(payloads) > 1:
            feeds = {name: np.concatenate([one[name] for one in payloads]) for name in feeds}
        outputs = dict(zip(names, self._session.run(names, feeds, options), strict=True))
        if len(payloads) == 1:
            return [self._checked(outputs)]
        if any(len(array) != sum(rows) for array in outputs.values()):
            raise RuntimeError("the outputs do not have a row for each row of the inputs")  # each is computed alone
        cuts = np.cumsum(rows)[:-1]
        parts = {name: np.split(array, cuts) for name, array in outputs.items()}
        return [self._checked({name: parts[name][place] for name in names}) for place in range(len(payloads))]

    def _checked(self, outputs: dict[str, Any]) -> Any:
        import numpy as np

        for array in outputs.values():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return bad_output(self.name)
        return outputs


def run_options() -> Any:
    """Return what one call is made with; to set its ``terminate`` ends it at the next operator."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # what fails is told to the caller; the log of the process is for its operator
    return options


def _one_each(results: list[Any], count: int) -> list[Any]:
    if len(results) != count:
        raise RuntimeError("the output does not have a row for each input")
    return results


def load_model(name: str, place: Path, options: OnnxOptions, threads: int) -> Model:
    """Read, judge, load and warm up a model. Blocks for as long as that takes.

    Raises:
        ArtifactInvalidError: it is no model for this engine; the text says why.
        OSError: it cannot be read.
    """
    artifact = read_artifact(place, options)
    session = _open(artifact.model, threads)
    if bad := [node.name for node in session.get_outputs() if tensors.datatype_of(node.type) is None]:
        raise ArtifactInvalidError(f"The output '{bad[0][:100]}' of the graph is no tensor.")
    if bad := [node.name for node in session.get_inputs() if tensors.datatype_of(node.type) is None]:
        raise ArtifactInvalidError(f"The input '{bad[0][:100]}' of the graph is no tensor that JSON can carry.")
    judged = judge(artifact, options, session.get_inputs(), session.get_outputs())
    model = Model(name, artifact, options, session, judged)
    watch = threading.Timer(WARM_S_MAX, model.stop)
    watch.start()
    try:
        model.warm_up()
    finally:
        watch.cancel()
    return model


def _preparation(artifact: Artifact, shape: list[Any]) -> pictures.Preparation:
    try:
        return pictures.preparation_of(artifact.preprocessor, shape)
    except (ValueError, TypeError) as error:
        raise ArtifactInvalidError(f"Pictures cannot be prepared for it: {error}.") from error


def _open(file: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A thread that spins takes a core from whoever has it next: other replicas, other models, the event loop.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # boundary: their libraries raise nothing narrower
        text = str(error).replace(str(file), file.name)
        raise ArtifactInvalidError(f"ONNX Runtime does not load it: {text[:400]}") from error


def _open_tokenizer(artifact: Artifact, max_tokens: int) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(artifact.tokenizer))
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length=max_tokens)
    except Exception as error:  # boundary: their libraries raise nothing narrower
        raise ArtifactInvalidError(f"The file 'tokenizer.json' is no tokenizer: {str(error)[:200]}") from error
    return tokenizer


def _fixed(nodes: list[Any], name: str, axis: int) -> int:
    """Return the size of an axis where the graph fixes it, else 0."""
    for node in nodes:
        if node.name == name and len(node.shape) > axis and isinstance(node.shape[axis], int):
            return max(0, int(node.shape[axis]))
    return 0
