"""Which engine serves a model: named, or told by what is in it."""

import re
from pathlib import Path

import click

from modelyard.cli.exits import Exit, Failure

ENGINES = (
    "llamacpp", "onnx", "vllm", "sglang", "tensorrt_llm", "tgi", "triton", "openai", "anthropic", "simulated",
)  # fmt: skip
"""All that there are: ``compose`` knows them, but takes longer to import than a command to run."""
ELSEWHERE = re.compile(r"[a-z0-9]{2,16}://|pypi:|upload:|model:", re.IGNORECASE)
"""A model that is not a file of this machine."""
_OF_ENDINGS = {".gguf": "llamacpp", ".onnx": "onnx"}
_FILES_LOOKED_AT = 200
_OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


def one_of() -> str:
    """Return the engines as people list them."""
    return f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}"


def engine_of_content(place: Path) -> str:
    """Return the engine that serves what is in a file or folder, "" where that does not tell.

    Safetensors do not: several engines serve them.
    """
    from modelyard.formats.folder import kind_of_file
    from modelyard.formats.sniff import Kind

    engines = {Kind.GGUF: "llamacpp", Kind.ONNX: "onnx"}
    if place.is_file():
        return engines.get(kind_of_file(place), "") if place.stat().st_size else ""
    named = [one for one in sorted(place.glob("*"))[:_FILES_LOOKED_AT] if one.suffix in _OF_ENDINGS and one.is_file()]
    return next((engine for one in named if (engine := engines.get(kind_of_file(one), ""))), "")


def engine_for(uri: str, file: Path | None) -> str:
    """Return the engine for a file's content; what is elsewhere is judged by its name, and the platform looks at it.

    Raises:
        UsageError: that does not tell, or it is no model.
        Failure: it is no model, and what it is can be said; or it is an adapter, whose base has the say.
    """
    if file is not None:
        _refuse_adapter(file)
    if file is None and (engine := _OF_ENDINGS.get(Path(re.split(r"[?]", uri)[0]).suffix.lower())):
        return engine
    if file is not None and (engine := engine_of_content(file)):
        return engine
    if file is not None and file.suffix.lower() in (".toml", ".json"):
        raise click.UsageError(f"{file.name} is no model. If it describes an endpoint: modelyard deploy -f {file}")
    what = "without a file" if not uri else f"from {uri}" if file is None else f"from the content of {file.name}"
    if file is not None and file.is_file():
        from modelyard.formats.folder import kind_of_file
        from modelyard.formats.sniff import WEIGHTS, Kind

        kind = kind_of_file(file)
        if kind not in WEIGHTS and kind is not Kind.UNKNOWN:
            raise Failure(f"{file.name} is no model: it is {kind}. Give a GGUF, safetensors or ONNX file.", Exit.USAGE)
        what += f", which is {kind}"
    raise click.UsageError(f"The engine cannot be told {what}. Give --engine: {one_of()}.")


def _refuse_adapter(file: Path) -> None:
    """Refuse an adapter: it runs on the engine of its base, which was not named."""
    from modelyard.cli.model_inspect import files_in
    from modelyard.formats import ArtifactInvalidError
    from modelyard.formats.folder import facts_of

    if file.is_dir() and not any((file / name).is_file() for name in _OF_ADAPTERS):
        return  # a whole model's folder may have many large files
    try:
        facts = facts_of(files_in(file) if file.is_dir() else {file.name: file})
    except (ArtifactInvalidError, OSError):
        return  # what it is instead is told by who chooses its engine
    if facts.is_adapter:
        rank, base = facts.adapter_rank or "unknown", facts.adapter_base or "a base that it does not name"
        raise Failure(f"{file.name} is a LoRA adapter (rank {rank}, for {base}); give --base NAME@VERSION.", Exit.USAGE)
