"""Looking at a LoRA adapter before vLLM does: whether it is whole, and made for the base that is running.

vLLM copies the numbers of an adapter into buffers of the base's sizes. One
with smaller matrices, made for another base, fits into a corner of them: it is
taken without a word, and answers nonsense (0.32). A broken file comes back as
500, after it was tried in every worker.

It imports nothing beyond the standard library: it runs under vLLM's Python.
"""

import json
import re
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEADER_MAX = 8 * 1024 * 1024
CONFIG_MAX = 1024 * 1024
RANK_MAX = 4096

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_PLAIN = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Types of numbers that stand one by one, so that a tensor's shape is its matrix's."""

Shapes = dict[str, tuple[int, ...]]


class AdapterError(Exception):
    """An adapter that must not be loaded; the text says why."""


def check_adapter(folder: Path, base: Shapes) -> None:
    """Look at the adapter in ``folder`` for a base of these shapes. Blocks.

    A module that the base does not have by this name is left to vLLM, which knows other names for some.

    Raises:
        AdapterError: it is no whole adapter, or one for another base.
        OSError: it cannot be read.
    """
    if not folder.is_dir():
        raise AdapterError("The adapter is no folder. Give a PEFT folder.")
    for part in (CONFIG, WEIGHTS):
        if not (folder / part).is_file():
            raise AdapterError(f"The folder of the adapter has no '{part}'. Give a PEFT folder.")
    rank_max = _rank_of(folder / CONFIG)
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (_, shape) in read_header(folder / WEIGHTS).items():
        found = _NAME.fullmatch(name)
        if found is not None and len(shape) == 2:
            halves.setdefault(found[1], {})[found[2]] = shape
    if not halves:
        raise AdapterError(f"The file '{WEIGHTS}' holds no LoRA pairs.")
    for module, both in halves.items():
        _check_pair(module, both, base.get(f"{module}.weight"), rank_max)


def read_base(folder: Path) -> Shapes:
    """Return the shapes of a base's matrices that are not packed. Blocks.

    Raises:
        AdapterError: its files are broken.
        OSError: they cannot be read.
    """
    return {
        name: shape
        for file in sorted(folder.glob("*.safetensors"))
        for name, (dtype, shape) in read_header(file).items()
        if dtype in _PLAIN and len(shape) == 2
    }


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor of a safetensors file that has all of its bytes.

    Raises:
        AdapterError: it is none, or a truncated one.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(HEADER_MAX, size - 8):
            raise AdapterError(f"The file '{file.name}' is no safetensors file, or a truncated one.")
        raw = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
        found = {
            name: (str(entry["dtype"]), tuple(int(number) for number in entry["shape"]))
            for name, entry in header.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise AdapterError(f"The file '{file.name}' has a bad header.") from error
    if max(ends, default=0) != size - 8 - length:
        raise AdapterError(f"The file '{file.name}' has not the bytes that its header says. Fetch it again.")
    return found


def _rank_of(file: Path) -> int:
    """Return the largest rank that a configuration speaks of."""
    if file.stat().st_size > CONFIG_MAX:
        raise AdapterError(f"The file '{CONFIG}' has more than {CONFIG_MAX:,} bytes, which is no configuration.")
    try:
        said = json.loads(file.read_bytes())
        if str(said.get("peft_type", "LORA")).upper() != "LORA":
            raise AdapterError(f"The adapter is of the kind '{str(said['peft_type'])[:32]}'; LoRA is taken.")
        rank = max([int(said["r"]), *(int(one) for one in (said.get("rank_pattern") or {}).values())])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AdapterError(f"The file '{CONFIG}' is no LoRA configuration.") from error
    if not 1 <= rank <= RANK_MAX:
        raise AdapterError(f"The file '{CONFIG}' has the rank {rank}; there must be 1 to {RANK_MAX}.")
    return rank


def _check_pair(module: str, both: dict[str, tuple[int, ...]], weights: tuple[int, ...] | None, rank_max: int) -> None:
    if both.keys() != {"A", "B"} or both["A"][0] != both["B"][1]:
        raise AdapterError(f"The adapter has no whole pair lora_A, lora_B for '{module[:200]}'.")
    if both["A"][0] > rank_max:
        raise AdapterError(
            f"The adapter has the rank {both['A'][0]} for '{module[:200]}'; '{CONFIG}' says {rank_max} at most."
        )
    made_for = (both["B"][0], both["A"][1])
    if weights is not None and made_for != weights:
        raise AdapterError(
            f"The adapter is for a '{module[:200]}' of {made_for}; its base has {weights}: it is for another base."
        )
