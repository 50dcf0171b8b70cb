"""The tokenizer of a GGUF file as Hugging Face's libraries read it: ``tokenizer.json`` and what goes with it.

A GGUF file names the expression that cuts a text before the merges by a word
(``tokenizer.ggml.pre``), whose meaning is in llama.cpp's source. Those listed
here are written out; with another the same text would become other tokens, so
it is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.formats.convert import ConvertError
from modelyard.formats.convert.gguf_source import GgufSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Config = dict[str, Any]

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""llama.cpp's kinds of tokens."""
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BEGINS = frozenset({"llama-bpe"})
"""Whose texts begin with a token of their own unless the file says otherwise."""
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level() -> tuple[Any, ...]:
    from tokenizers.pre_tokenizers import ByteLevel

    return (ByteLevel(add_prefix_space=False, use_regex=True),)


def _digits_apart() -> tuple[Any, ...]:
    from tokenizers.pre_tokenizers import Digits

    return (Digits(individual_digits=True), *_byte_level())


def _tiktoken(digits: str) -> tuple[Any, ...]:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Split

    expression = Regex(_TIKTOKEN.format(digits=digits))
    return Split(expression, behavior="isolated", invert=False), ByteLevel(add_prefix_space=False, use_regex=False)


_CUTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_apart,
    "llama-bpe": lambda: _tiktoken("{1,3}"),
    "qwen2": lambda: _tiktoken(""),
}


def write(source: GgufSource, folder: Path) -> None:
    """Write the files of the tokenizer, and ``generation_config.json``.

    Raises:
        ConvertError: it is of a kind that is not converted.
    """
    kind = source.get("tokenizer.ggml.model", "")
    if kind != "gpt2":
        raise ConvertError(
            f"The GGUF file has a tokenizer of the kind '{kind}'; only byte-level BPE ('gpt2') is converted. "
            "Take the model from where its maker publishes it: modelyard deploy hf://OWNER/MODEL"
        )
    tokens: list[str] = source.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise ConvertError("The GGUF file has no vocabulary.")
    _tokenizer(source, tokens).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(source, tokens))
    _write_json(folder / "generation_config.json", _generation_config(source))


def ids_of(source: GgufSource) -> dict[str, int]:
    """Return the ids of the tokens with a role, by the name that ``config.json`` has for each."""
    found = {}
    for role, name in _ROLES.items():
        if (number := source.get(f"tokenizer.ggml.{name}_token_id")) is not None and role != "unk_token":
            found[f"{role}_id"] = int(number)
    return found


def _tokenizer(source: GgufSource, tokens: list[str]) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = str(source.get("tokenizer.ggml.pre", "gpt-2"))
    if pre not in _CUTS:
        raise ConvertError(f"The GGUF file cuts texts by '{pre}'; only {', '.join(_CUTS)} are converted.")
    kinds: list[int] = source.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: number for number, token in enumerate(tokens) if kinds[number] != _UNUSED}
    merges = [_pair(merge) for merge in source.get("tokenizer.ggml.merges", [])]
    # The library raises a plain Exception for it, with no word on what is wrong.
    if odd := next((m for m in merges if not {*m, "".join(m)} <= vocabulary.keys()), None):
        raise ConvertError(f"The GGUF file has the merge {odd}, which is not of tokens of its vocabulary.")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(_CUTS[pre]()))
    tokenizer.decoder = decoders.ByteLevel()
    if begin := _beginning(source, tokens, pre):
        tokenizer.post_processor = _beginning_with(begin, vocabulary[begin])
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for number, token in enumerate(tokens) if kinds[number] == kind]
        tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in added])
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _beginning(source: GgufSource, tokens: list[str], pre: str) -> str:
    number = source.get("tokenizer.ggml.bos_token_id")
    if number is None or not source.get("tokenizer.ggml.add_bos_token", pre in _BEGINS):
        return ""
    return tokens[int(number)]


def _beginning_with(token: str, number: int) -> Any:
    from tokenizers import processors

    first, second = f"{token} $A", f"{token} $A {token}:1 $B:1"
    template = processors.TemplateProcessing(single=first, pair=second, special_tokens=[(token, number)])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def _tokenizer_config(source: GgufSource, tokens: list[str]) -> Config:
    config: Config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.number("context_length"),
    }
    for role, name in _ROLES.items():
        if (number := source.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[role] = tokens[number]
    if template := source.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _generation_config(source: GgufSource) -> Config:
    config: Config = ids_of(source)
    ends = {config.get("eos_token_id"), source.get("tokenizer.ggml.eot_token_id")} - {None}
    if len(ends) > 1:
        config["eos_token_id"] = sorted(ends)
    return config


def _write_json(file: Path, content: Config) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
