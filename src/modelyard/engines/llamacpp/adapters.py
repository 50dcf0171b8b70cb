"""Admitting a LoRA adapter: read by our own readers first, in llama.cpp's form, and made for this base.

llama.cpp ends the process that gives it a file it does not like, so what can be
said before is said here, with the reason.
"""

import hashlib
from pathlib import Path

import msgspec

from modelyard.domain.facts import ModelFacts
from modelyard.engines.llamacpp import peft
from modelyard.formats import ArtifactInvalidError, gguf
from modelyard.formats.cursor import opened

Shapes = dict[str, tuple[int, ...]]
_A, _B = ".lora_a", ".lora_b"
_FOLDER = "adapters"


class Base(msgspec.Struct, frozen=True):
    """What adapters are measured against."""

    facts: ModelFacts
    shapes: Shapes


class Adapter(msgspec.Struct, frozen=True):
    """An adapter that llama.cpp may load: ``file`` is a GGUF file; ``source`` is where it came from."""

    name: str
    source: Path
    file: Path


class AdapterMissingError(Exception):
    """Nothing is where an adapter should be."""


def read_base(model: Path) -> Base:
    """Return what adapters must fit. Blocks.

    Raises:
        ArtifactInvalidError: it is no GGUF file, or a broken one.
        OSError: it cannot be read.
    """
    with opened(model, "GGUF file") as cursor:
        return Base(*gguf.read_shapes(cursor))


def admit(name: str, source: Path, base: Base, *, work_dir: Path, rank_max: int) -> Adapter:
    """Return the adapter at ``source`` (a PEFT folder or a GGUF file), converted where it must be. Blocks.

    Raises:
        AdapterMissingError: there is nothing.
        ArtifactInvalidError: it is no adapter, a broken one, or one for another base.
        OSError: it cannot be read, or not written to ``work_dir``.
    """
    if not source.exists():
        raise AdapterMissingError(f"There is no adapter at '{source}'.")
    file = source
    is_converted = source.is_dir()
    if is_converted:
        folder = work_dir / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        file = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.gguf"
        peft.convert(source, file, base.facts)
    try:
        with opened(file, "GGUF file") as cursor:
            facts, shapes = gguf.read_shapes(cursor)
        _check_fits(facts, shapes, base, rank_max)
    except ArtifactInvalidError:
        if is_converted:
            file.unlink()
        raise
    return Adapter(name, source, file)


def _check_fits(facts: ModelFacts, shapes: Shapes, base: Base, rank_max: int) -> None:
    if not facts.is_adapter:
        raise ArtifactInvalidError("The file is a whole model and no adapter. Deploy it as an endpoint of its own.")
    if facts.architecture != base.facts.architecture:
        raise ArtifactInvalidError(
            f"The adapter is for the architecture '{facts.architecture}'; its base is '{base.facts.architecture}'."
        )
    if facts.adapter_rank > rank_max:
        raise ArtifactInvalidError(
            f"The adapter has the rank {facts.adapter_rank}; this replica takes at most {rank_max}. "
            "Raise the option 'max_adapter_rank'."
        )
    for name, dims in shapes.items():
        if not name.endswith((_A, _B)):
            raise ArtifactInvalidError(f"The adapter has the tensor '{name}', which is no part of a LoRA pair.")
        target, side = name[: -len(_A)], name[-len(_A) :]
        if side == _A:
            _check_pair(target, dims, shapes.get(target + _B), base.shapes.get(target))
        elif target + _A not in shapes:
            raise ArtifactInvalidError(f"The adapter has '{name}' without '{target}{_A}'.")


def _check_pair(target: str, a: tuple[int, ...], b: tuple[int, ...] | None, weights: tuple[int, ...] | None) -> None:
    if weights is None:
        raise ArtifactInvalidError(f"The adapter changes '{target}', which its base does not have.")
    if b is None:
        raise ArtifactInvalidError(f"The adapter has '{target}{_A}' without '{target}{_B}'.")
    if min(len(a), len(b), len(weights)) < 2:
        raise ArtifactInvalidError(f"The adapter changes '{target}', which is no matrix.")
    if target.startswith("token_embd."):
        # Rows are looked up there, not multiplied: llama.cpp wants both halves the other way round.
        fits = weights[:2] == (b[1], a[1]) and a[0] == b[0]
    else:
        fits = weights[:2] == (a[0], b[1]) and a[1] == b[0]
    if not fits:
        raise ArtifactInvalidError(
            f"The adapter has for '{target}' the shapes {a} and {b}; its base has {weights}: it is for another base."
        )
