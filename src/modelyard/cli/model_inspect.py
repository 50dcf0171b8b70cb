"""``modelyard models inspect``: what is in a model, by the header of its file or as the registry has it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import PAGE, Platform, close_names, connectable, segment
from modelyard.cli.output import Item, clean, moment, show_json, show_pairs, show_table

if TYPE_CHECKING:
    from modelyard.domain.facts import ModelFacts

_GIB = 1024**3
_FILES = (".gguf", ".safetensors", ".onnx")


@click.command(
    "inspect",
    epilog="\b\nExample:\n  modelyard models inspect ./model.gguf\n  modelyard models inspect demo --json",
    short_help="Show what is in a model: its shape and the memory it takes.",
)
@click.argument("reference", metavar="PATH|NAME|VERSION-ID")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@connectable
def command(reference: str, *, find: Callable[[], Platform], is_json: bool) -> None:
    """Show what is in a model: its shape, and the memory of its weights and of each token.

    A file or a folder of this machine is read here, without a platform; its content is looked at, not its name.
    Of a NAME the newest version in the registry is shown.
    """
    path = Path(reference).expanduser()
    if path.exists():
        item = _read(path)
    elif reference.startswith((".", "/", "~")) or reference.endswith(_FILES):
        raise Failure(f"There is no file '{reference}'.", Exit.NOT_FOUND)
    else:
        item = _registered(find(), reference)
    from msgspec import convert

    from modelyard.domain.facts import ModelFacts

    facts = convert(item["facts"], ModelFacts)
    if is_json:
        per_token = facts.kv_bytes_per_token
        show_json(item | {"kv_tokens_per_gib": _GIB // per_token if per_token else None})
        return
    show_pairs(_version_pairs(item) | _shape_pairs(facts) | _memory_pairs(facts))
    if files := item.get("files"):
        print()
        show_table(
            ["FILE", "SIZE", "DIGEST"], [(one["path"], _size(one["size_bytes"]), one["digest"]) for one in files]
        )
    ends = [("input", one) for one in facts.inputs] + [("output", one) for one in facts.outputs]
    if ends:
        print()
        rows = [(end, one.name, one.datatype, _shape(one.shape)) for end, one in ends]
        show_table(["TENSOR", "NAME", "TYPE", "SHAPE"], rows)
    if facts.chat_template:
        print(f"\nChat template\n{clean(facts.chat_template)}")


def _read(path: Path) -> Item:
    """Return what is in a file or a folder of this machine."""
    from msgspec import to_builtins

    from modelyard.formats import ArtifactInvalidError
    from modelyard.formats.folder import facts_of

    try:
        files = files_in(path) if path.is_dir() else {path.name: path}
        facts = facts_of(files)
        size = sum(file.stat().st_size for file in files.values())
    except ArtifactInvalidError as error:
        raise Failure(f"{path}: {error.code}: {error}") from error
    except OSError as error:
        raise Failure(f"Cannot read {error.filename or path}: {error.strerror}.") from error
    return {"path": str(path), "artifact_size": size, "facts": to_builtins(facts)}


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files below ``folder`` by their paths inside of it; hidden folders hold no model's."""
    import os

    from modelyard.formats.folder import FILES_MAX

    found: dict[str, Path] = {}
    inside = folder.resolve()
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(root, name)
            path = file.relative_to(folder).as_posix()
            if not file.resolve(strict=True).is_relative_to(inside):
                raise Failure(f"{folder}: {path} is a link that leads out of the folder; put the file itself there.")
            found[path] = file
        if len(found) > FILES_MAX:
            break
    return found


def _registered(platform: Platform, reference: str) -> Item:
    try:
        version: Item = platform.get("/v1/registry/models/" + "/".join(map(segment, reference.split("/"))))
    except Refused as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        names = {version["name"] for version in platform.all("/v1/registry/models", limit=PAGE)}
        raise error.with_hint(close_names(reference, sorted(names))) from error
    return version


def _version_pairs(item: Item) -> dict[str, object]:
    if "id" not in item:
        return {"Path": item["path"], "Size": _size(item["artifact_size"])}
    return {
        "Model": f"{item['name']} {item['version']}",
        "ID": item["id"],
        "Engine": item["framework"],
        "Status": item["status"],
        "Artifact": item["artifact_path"],
        "Digest": item["artifact_digest"],
        "Size": _size(item["artifact_size"]),
        "Base": item["base_id"],
        "After": item["parent_id"],
        "Created": moment(item["created_at"]),
        "Memory of a replica": _size(item["memory_required"]),
    }


def _shape_pairs(facts: "ModelFacts") -> dict[str, object]:
    heads = f"{facts.heads}, {facts.kv_heads} of them of keys and values" if facts.heads else ""
    adapter = (
        f"LoRA of rank {facts.adapter_rank or 'unknown'}, for {facts.adapter_base or 'a base that it does not name'}"
    )
    return {
        "Format": facts.format,
        "Architecture": facts.architecture,
        "Name": facts.name,
        "Licence": facts.licence,
        "Adapter": adapter if facts.is_adapter else "",
        "Parameters": _count(facts.parameters),
        "Quantisation": facts.quantisation,
        "Layers": _number(facts.layers),
        "Heads": heads,
        "Head size": _number(facts.head_size),
        "Embedding": _number(facts.embedding_size),
        "Vocabulary": _number(facts.vocabulary),
        "Context": f"{facts.context_length:,} tokens" if facts.context_length else "",
        "Tokenizer": facts.tokenizer,
    }


def _memory_pairs(facts: "ModelFacts") -> dict[str, object]:
    from modelyard.domain.attention import kv_bytes

    pairs: dict[str, object] = {"Weights": _size(facts.weights_bytes)}
    if per_token := facts.kv_bytes_per_token:
        pairs["KV cache"] = f"{_size(per_token)} a token at 16 bits; {_GIB // per_token:,} tokens in 1 GiB"
    if facts.sliding_window:
        window = _size(facts.kv_window_bytes_per_token)
        pairs["Sliding window"] = f"{facts.sliding_window:,} tokens, for {window} of a token's cache"
    if facts.state_bytes:
        pairs["State"] = f"{_size(facts.state_bytes)} a sequence, at most"
    if per_token and facts.context_length:
        pairs["Whole context"] = f"{_size(kv_bytes(facts, facts.context_length))} of cache"
    return pairs


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join('any' if size < 0 else str(size) for size in shape)}]"


def _number(number: int) -> str:
    return f"{number:,}" if number else ""


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit} ({number:,})"
    return _number(number)


def _size(number: int) -> str:
    """Return bytes in the unit that a person would take."""
    for unit, size in (("TiB", 1024**4), ("GiB", _GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} bytes" if number else ""
