"""``config.pbtxt`` of a Triton model: read with bounds, judged by what is known to be harmless, and written again.

The file is text in protocol buffers' form. It can name libraries to load,
programs, environments and files of the server; so what is not on a list here
is refused, whatever it may be. Only as much of the grammar is known as such
files use.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from modelyard.formats import ArtifactInvalidError

BYTES_MAX = 256 * 1024
_TOKENS_MAX = 40_000
_DEPTH_MAX = 16
_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<word>[A-Za-z0-9_.+-]+)|(?P<mark>[{}\[\]<>:,;])"""
)
_FIELDS = frozenset(
    {
        "name", "platform", "backend", "version_policy", "max_batch_size", "input", "output", "batch_input",
        "batch_output", "optimization", "dynamic_batching", "instance_group", "default_model_filename", "parameters",
        "response_cache", "model_transaction_policy",
    }
)  # fmt: skip
"""What a configuration may say. Not: agents, warm-up from files, custom operators, other runtimes, ensembles."""
_KEYS = frozenset(
    {
        "intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern",
        "arena_extend_strategy", "gpu_mem_limit", "cudnn_conv_algo_search", "do_copy_in_default_stream",
        "precision_mode", "max_workspace_size_bytes", "max_cached_engines", "minimum_segment_size",
        "num_of_threads", "thread_count",
    }
)  # fmt: skip
"""Parameters that are numbers or modes, for the ONNX Runtime backend and its accelerators. Paths are none of them."""
_BACKENDS = frozenset({"", "onnxruntime", "openvino"})
_PLATFORMS = frozenset({"", "onnxruntime_onnx"})
_ENDS = {"{": "}", "<": ">"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Message = list[tuple[str, "Value"]]
Value = str | Message
"""A scalar as it is written, or a message."""


def parse(text: str) -> Message:
    """Return the fields of a configuration in their order; a list is one field for each of its values.

    Raises:
        ArtifactInvalidError: it is not of this form, or larger than any configuration is.
    """
    if len(text) > BYTES_MAX:
        raise _invalid(f"it has {len(text):,} characters; the most is {BYTES_MAX:,}")
    tokens = list(_tokens(text))
    fields, at = _message(tokens, 0, end="", depth=0)
    assert at == len(tokens), "a message without an end takes everything"
    return fields


def check(fields: Message) -> None:
    """Refuse what names a library, a program, a file or another model, or is not known.

    Raises:
        ArtifactInvalidError: naming it.
    """
    for name, _ in fields:
        if name not in _FIELDS:
            raise _invalid(f"it says '{name[:64]}', which is not let through: it may name what would be run or read")
    backend, platform = scalar(fields, "backend"), scalar(fields, "platform")
    if backend not in _BACKENDS or platform not in _PLATFORMS:
        raise _invalid(
            f"it is for the backend '{(backend or platform)[:64]}'; ONNX models are taken (backend 'onnxruntime'). "
            "Python models and compiled engines are code"
        )
    if (file := scalar(fields, "default_model_filename")) and not _PLAIN_NAME.fullmatch(file):
        raise _invalid("default_model_filename is no plain name")
    for key in _keys(fields):
        if key not in _KEYS:
            raise _invalid(f"it sets the parameter '{key[:64]}', which is not let through")


def scalar(fields: Message, name: str) -> str:
    """Return the last value of a scalar field without its quotation marks; "" where it is not given."""
    found = [value for field, value in fields if field == name and isinstance(value, str)]
    return found[-1].strip("\"'") if found else ""


def write(fields: Message, depth: int = 0) -> str:
    """Return ``fields`` as text."""
    lines: list[str] = []
    for name, value in fields:
        indent = "  " * depth
        if isinstance(value, str):
            lines.append(f"{indent}{name}: {value}\n")
        else:
            lines.append(f"{indent}{name} {{\n{write(value, depth + 1)}{indent}}}\n")
    return "".join(lines)


def read(file: Path) -> Message:
    """Return the fields of a configuration file that was checked.

    Raises:
        ArtifactInvalidError: it is none, or says what is not let through.
    """
    with file.open("rb") as reader:
        content = reader.read(BYTES_MAX + 1)
    try:
        fields = parse(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise _invalid("it is no text") from None
    check(fields)
    return fields


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = count = 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise _invalid(f"character {at:,} is none that such a file has")
        at = match.end()
        if match.lastgroup is not None:
            count += 1
            if count > _TOKENS_MAX:
                raise _invalid(f"it has more than {_TOKENS_MAX:,} words")
            yield match.lastgroup, match.group()


def _message(tokens: list[tuple[str, str]], at: int, *, end: str, depth: int) -> tuple[Message, int]:
    """Read fields up to ``end``; return them and the place behind it."""
    if depth > _DEPTH_MAX:
        raise _invalid(f"it is more than {_DEPTH_MAX} levels deep")
    fields: Message = []
    while True:
        kind, token = _at(tokens, at, or_end=not end)
        if token == end:
            return fields, at + 1 if end else at
        if token in (",", ";"):
            at += 1
            continue
        if kind != "word":
            raise _invalid(f"'{token[:32]}' stands where the name of a field should")
        at += 1
        if _at(tokens, at)[1] == ":":
            at += 1
        values, at = _values(tokens, at, depth)
        fields += [(token, value) for value in values]


def _values(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[list[Value], int]:
    if _at(tokens, at)[1] != "[":
        value, at = _value(tokens, at, depth)
        return [value], at
    values: list[Value] = []
    at += 1
    while (mark := _at(tokens, at)[1]) != "]":
        if mark == ",":
            at += 1
            continue
        value, at = _value(tokens, at, depth)
        values.append(value)
    return values, at + 1


def _value(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[Value, int]:
    kind, word = _at(tokens, at)
    if word in _ENDS:
        return _message(tokens, at + 1, end=_ENDS[word], depth=depth + 1)
    if kind == "mark":
        raise _invalid(f"'{word}' stands where a value should")
    return word, at + 1


def _at(tokens: list[tuple[str, str]], at: int, *, or_end: bool = False) -> tuple[str, str]:
    if at < len(tokens):
        return tokens[at]
    if or_end:
        return "", ""
    raise _invalid("it ends in the middle")


def _keys(fields: Message) -> Iterator[str]:
    for name, value in fields:
        if isinstance(value, str):
            if name == "key":
                yield value.strip("\"'")
        else:
            yield from _keys(value)


def _invalid(reason: str) -> ArtifactInvalidError:
    return ArtifactInvalidError(f"The file 'config.pbtxt' cannot be used: {reason}.")
