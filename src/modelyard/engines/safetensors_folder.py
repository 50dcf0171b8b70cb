"""Looking at a model in Hugging Face's form before an engine loads it: safetensors beside ``config.json``, no code.

The same check for every engine that loads such folders; all of it is by
content, with our own bounded readers.
"""

from pathlib import Path

from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import FILES_MAX, facts_of, kind_of_file

_CONFIGS = ("config.json", "adapter_config.json")


def check_safetensors_folder(place: Path, *, engine: str, takes_adapters: bool = False) -> None:
    """Accept a folder of safetensors with its configuration.

    Raises:
        ArtifactInvalidError: it is something else, incomplete, or could run code.
    """
    if not place.is_dir():
        raise ArtifactInvalidError(
            f"The artifact is one file ({kind_of_file(place)}). The engine '{engine}' loads a folder of Hugging "
            "Face's form: safetensors beside config.json and the tokenizer. Name the folder, or hf://OWNER/NAME."
        )
    files = files_of(place)
    wanted = _CONFIGS if takes_adapters else _CONFIGS[:1]
    if not any(name in files for name in wanted):
        raise ArtifactInvalidError(
            f"The artifact lacks {' or '.join(wanted)}. The engine '{engine}' reads its shape there."
        )
    facts = facts_of(files)
    if facts.format != "safetensors":
        raise ArtifactInvalidError(
            f"The artifact's weights are {facts.format}. The engine '{engine}' loads safetensors."
        )
    if facts.is_adapter and not takes_adapters:
        raise ArtifactInvalidError(
            f"The artifact is a LoRA adapter. The engine '{engine}' takes none beside its model."
        )


def files_of(place: Path) -> dict[str, Path]:
    """Return the files below ``place`` by their paths in it.

    Raises:
        ArtifactInvalidError: they are too many.
    """
    found: dict[str, Path] = {}
    for file in place.rglob("*"):
        if file.is_dir():
            continue
        found[file.relative_to(place).as_posix()] = file
        if len(found) > FILES_MAX:
            raise ArtifactInvalidError(f"The artifact has more than {FILES_MAX:,} files.")
    return found
