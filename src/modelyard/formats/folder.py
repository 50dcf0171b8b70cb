"""Facts of an artifact: one file, or a list of files as in a Hugging Face repository.

All files are looked at, and one that could run code, or that nobody can say
what it is, refuses the artifact: pickles, archives, scripts, programs, and
``auto_map`` in a configuration (S6 to S8). An operator who has pinned the digest
may let code through; archives and programs never pass.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from modelyard.domain.facts import ModelFacts
from modelyard.formats import ArtifactInvalidError, gguf, huggingface, onnx, safetensors
from modelyard.formats.cursor import Cursor, opened
from modelyard.formats.sniff import BESIDE, HEAD_BYTES, WEIGHTS, Kind, kind_of

FILES_MAX = 4096
INDEX_BYTES_MAX = 32 * 1024 * 1024
_INDEX_TENSORS_MAX = 300_000
_CODE_ENDINGS = (".py", ".pyc", ".pyi", ".so", ".sh")
_CODE_KINDS = frozenset({Kind.PICKLE, Kind.ZIP, Kind.SCRIPT})
_INDEX = "model.safetensors.index.json"
_LARGE_JSON = ("tokenizer.json", "vocab.json", "tekken.json", ".index.json")
"""What is not configuration: no library looks for ``auto_map`` in it, and it may have any size."""
_TEXTS = ("README.md", "chat_template.jinja")
_TEXT_BYTES = 256 * 1024


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_decode_index = msgspec.json.Decoder(_Index).decode


def facts_of(files: Mapping[str, Path], *, may_run_code: bool = False) -> ModelFacts:
    """Return what ``files``, by their plain paths inside of the artifact, say of the model. Blocks.

    Raises:
        ArtifactInvalidError: they are no model, or one that must not be loaded.
        OSError: a file cannot be read.
    """
    if not 1 <= len(files) <= FILES_MAX:
        raise ArtifactInvalidError(f"The artifact has {len(files):,} files; there must be 1 to {FILES_MAX:,}.")
    if len(files) == 1:
        return _of_one(next(iter(files.values())))
    kinds = {name: _checked_kind(name, file, may_run_code=may_run_code) for name, file in files.items()}
    _check_beside(kinds, _external(kinds, files), may_run_code=may_run_code)
    configs = _configs(files, kinds, may_run_code=may_run_code)
    said = huggingface.facts_from(configs)
    for kind, read in ((Kind.SAFETENSORS, _of_safetensors), (Kind.GGUF, _of_gguf), (Kind.ONNX, _of_onnx)):
        if named := sorted(name for name, one in kinds.items() if one is kind):
            return _merged(said, read({name: files[name] for name in named}, files))
    raise ArtifactInvalidError("The artifact holds no weights: none of its files is GGUF, safetensors or ONNX.")


def kind_of_file(file: Path) -> Kind:
    """Return what ``file`` is, by content."""
    with opened(file) as cursor:
        return kind_of(cursor.take(min(HEAD_BYTES, cursor.size)), cursor.size)


def _of_one(file: Path) -> ModelFacts:
    kind = kind_of_file(file)
    if kind is Kind.GGUF:
        with opened(file, "GGUF file") as cursor:
            return gguf.read(cursor)
    if kind is Kind.SAFETENSORS:
        with opened(file, "safetensors file") as cursor:
            return safetensors.read(cursor).facts
    if kind is Kind.ONNX:
        return _of_onnx({"model.onnx": file}, {})
    raise ArtifactInvalidError(f"The artifact is no model: it is {kind}. GGUF, safetensors and ONNX are read.")


def _checked_kind(name: str, file: Path, *, may_run_code: bool) -> Kind:
    if not onnx.is_plain_path(name):
        raise ArtifactInvalidError(f"The artifact has a file of the name {ascii(name)[:200]}, which is no plain path.")
    if name.lower().endswith(_CODE_ENDINGS) and not may_run_code:
        raise _may_run_code(name, "a script")
    return kind_of_file(file)


def _check_beside(kinds: Mapping[str, Kind], data: Iterable[str], *, may_run_code: bool) -> None:
    """Refuse what nobody can say what it is; ``data`` are numbers that an ONNX file has outside of itself."""
    for name, kind in kinds.items():
        if kind in WEIGHTS or kind in BESIDE or name in data:
            continue
        if kind in _CODE_KINDS:
            if may_run_code:
                continue
            raise _may_run_code(name, str(kind))
        raise ArtifactInvalidError(f"The artifact has the file '{name}', which is {kind}. Leave it out.")


def _may_run_code(name: str, what: str) -> ArtifactInvalidError:
    return ArtifactInvalidError(
        f"The artifact has the file '{name}', which is {what}: loading it could run code. "
        "Leave it out, or let an operator pin the artifact's digest."
    )


def _external(kinds: Mapping[str, Kind], files: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    for name, kind in kinds.items():
        if kind is Kind.ONNX:
            with opened(files[name], "ONNX file") as cursor:
                folder = name.rpartition("/")[0]
                found |= {f"{folder}/{one}" if folder else one for one in onnx.read(cursor).external}
    return found


def _configs(files: Mapping[str, Path], kinds: Mapping[str, Kind], *, may_run_code: bool) -> dict[str, bytes]:
    """Return the contents of what says something of the model; of all configuration, that it runs no code."""
    found: dict[str, bytes] = {}
    for name, file in files.items():
        if name in _TEXTS and kinds[name] in BESIDE:
            with opened(file) as cursor:
                found[name] = cursor.take(min(_TEXT_BYTES, cursor.size))
        if not name.lower().endswith(".json") or name.lower().endswith(_LARGE_JSON):
            continue
        content = _content(file, huggingface.CONFIG_BYTES_MAX, name)
        if (key := huggingface.named_code(content, name)) and not may_run_code:
            raise _may_run_code(name, f"a configuration with '{key}'")
        if "/" not in name and len(content) and sum(map(len, found.values())) < 2 * huggingface.CONFIG_BYTES_MAX:
            found[name] = content
    return found


def _content(file: Path, most: int, name: str) -> bytes:
    with opened(file) as cursor:
        if cursor.size > most:
            raise ArtifactInvalidError(f"The file '{name}' has {cursor.size:,} bytes; the most is {most:,}.")
        content = bytearray()
        while cursor.left:
            content += cursor.take(min(cursor.left, 1024 * 1024))
        return bytes(content)


def _of_safetensors(parts: Mapping[str, Path], files: Mapping[str, Path]) -> ModelFacts:
    wanted = _indexed(files, parts)
    facts: list[ModelFacts] = []
    for name, file in parts.items():
        with opened(file, f"file '{name}'") as cursor:
            header = safetensors.read(cursor)
        if wanted is None:
            facts.append(header.facts)
        elif name in wanted:
            if missing := wanted[name] - header.names:
                raise ArtifactInvalidError(f"The file '{name}' lacks the tensor '{min(missing)[:200]}' of '{_INDEX}'.")
            facts.append(header.facts)
    main = max(facts, key=lambda one: one.weights_bytes)
    return replace(
        main,
        parameters=sum(one.parameters for one in facts),
        weights_bytes=sum(one.weights_bytes for one in facts),
        adapter_rank=max(one.adapter_rank for one in facts),
    )


def _indexed(files: Mapping[str, Path], parts: Mapping[str, Path]) -> dict[str, set[str]] | None:
    """Return which tensors the index wants of which file, None without an index."""
    if _INDEX not in files:
        return None
    content = _content(files[_INDEX], INDEX_BYTES_MAX, _INDEX)
    if content.count(b":") > 2 * _INDEX_TENSORS_MAX:
        raise ArtifactInvalidError(f"The file '{_INDEX}' has more than {_INDEX_TENSORS_MAX:,} tensors.")
    try:
        index = _decode_index(content)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ArtifactInvalidError(f"The file '{_INDEX}' is no index: {error}.") from error
    wanted: dict[str, set[str]] = {}
    for tensor, name in index.weight_map.items():
        if name not in parts:
            raise ArtifactInvalidError(f"The file '{_INDEX}' names '{name[:200]}', which is not there.")
        wanted.setdefault(name, set()).add(tensor)
    if not wanted:
        raise ArtifactInvalidError(f"The file '{_INDEX}' names no tensors.")
    return wanted


def _of_gguf(parts: Mapping[str, Path], files: Mapping[str, Path]) -> ModelFacts:
    if len(parts) > 1:
        raise ArtifactInvalidError(
            f"The artifact has several GGUF files: {', '.join(parts)}. Give the one that is meant."
        )
    with opened(next(iter(parts.values())), "GGUF file") as cursor:
        return gguf.read(cursor)


def _of_onnx(parts: Mapping[str, Path], files: Mapping[str, Path]) -> ModelFacts:
    """Return the facts of the largest of ``parts``; each must have its numbers in the file or beside it."""
    found: list[ModelFacts] = []
    for name, file in parts.items():
        with opened(file, "ONNX file") as cursor:
            header = onnx.read(cursor)
        folder = name.rpartition("/")[0]
        for location, size in header.external.items():
            beside = files.get(f"{folder}/{location}" if folder else location)
            if beside is None:
                raise ArtifactInvalidError(f"The ONNX file has tensors in '{location}', which is not there.")
            with opened(beside) as data:
                _check_size(data, location, size)
        found.append(header.facts)
    return max(found, key=lambda one: one.weights_bytes)


def _check_size(cursor: Cursor, name: str, size: int) -> None:
    if cursor.size < size:
        raise ArtifactInvalidError(
            f"The file '{name}' has {cursor.size:,} bytes; the ONNX file reads {size:,}. Fetch it again."
        )


def _merged(said: ModelFacts, weights: ModelFacts) -> ModelFacts:
    """Return what the configuration says, with what the tensors are."""
    if weights.format == "gguf":
        return weights
    # Packed numbers hold several parameters each: of those the shape knows better.
    parameters = said.parameters if huggingface.is_packed(said) else weights.parameters
    idle = said.parameters - said.active_parameters if said.active_parameters else 0
    return replace(
        said,
        format=weights.format,
        name=weights.name or said.name,
        parameters=parameters,
        active_parameters=parameters - idle if 0 < idle < parameters else 0,
        weights_bytes=weights.weights_bytes,
        inputs=weights.inputs,
        outputs=weights.outputs,
        quantisation=said.quantisation if said.quantisation and not _is_plain(said) else weights.quantisation,
        is_adapter=said.is_adapter or weights.is_adapter,
        adapter_rank=said.adapter_rank or weights.adapter_rank,
    )


def _is_plain(said: ModelFacts) -> bool:
    """Say whether the configuration names a type of numbers only, which the tensors know better."""
    return said.quantisation in ("BF16", "F16", "F32")
