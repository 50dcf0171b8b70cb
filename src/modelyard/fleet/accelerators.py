"""The accelerators of this machine: its CPU with the memory that may be used, and NVIDIA GPUs through NVML.

A CPU counts as one accelerator, with the memory of its control group or of
the machine, whichever is less, minus a reserve for the platform itself. GPUs
need the package ``nvidia-ml-py`` (the extra ``nvidia``) and a driver; without
them there are none, and a reason says so where it looks as if there were.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from modelyard.domain.nodes import Accelerator

CPU = "cpu"
CPU_INDEX = 0
GPU_INDEX_FIRST = 1
"""GPUs are numbered behind the CPU: NVML's number 0 is accelerator 1."""

_KIND = re.compile(r"[a-z]{1,2}\d+[a-z]{0,2}")
_UNLIMITED = 1 << 60
"""Version 1 of control groups says "no limit" with a number that no machine has."""


class Found(msgspec.Struct, frozen=True):
    """What a look at this machine found; ``reason`` is why there may be more than it could see."""

    accelerators: tuple[Accelerator, ...]
    used_bytes: dict[int, int] = {}
    reason: str = ""


def look(*, reserve_bytes: int, root: Path = Path("/"), nvml: Any = None) -> Found:
    """Look at this machine. Blocks; ``root`` and ``nvml`` are for tests."""
    memory = Memory(root)
    usable = max(0, memory.limit_bytes() - reserve_bytes)
    cpu = Accelerator(CPU_INDEX, CPU, usable)
    used = {CPU_INDEX: memory.used_bytes()}
    nvml = nvml if nvml is not None else _nvml()
    has_devices = (root / "dev/nvidiactl").exists()
    if nvml is None:
        missing = "it has NVIDIA GPUs, which need: pip install 'modelyard[nvidia]'" if has_devices else ""
        return Found((cpu,), used, missing)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Found((cpu,), used, f"its NVIDIA GPUs cannot be seen: {error}" if has_devices else "")
    try:
        gpus, gpus_used, reason = _gpus(nvml)
    except nvml.NVMLError as error:
        return Found((cpu,), used, f"its NVIDIA GPUs cannot be read: {error}")
    finally:
        nvml.nvmlShutdown()
    return Found((cpu, *gpus), used | gpus_used, reason)


def cuda_environment(accelerators: tuple[int, ...]) -> dict[str, str]:
    """Return what makes a CUDA program of this machine see ``accelerators`` and no others.

    One that runs on the CPU sees none: it would take memory of the first GPU just by starting.
    """
    numbers = [index - GPU_INDEX_FIRST for index in accelerators if index >= GPU_INDEX_FIRST]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in numbers)}


def kind_of(name: str) -> str:
    """Return the kind of a GPU from the name its driver gives: ``NVIDIA H100 80GB HBM3`` is ``h100``."""
    words = [
        word for word in re.split(r"[\s_-]+", name.lower()) if word not in {"nvidia", "tesla", "geforce", "quadro"}
    ]
    for word in words:
        if _KIND.fullmatch(word):
            return word
    return "".join(words[:2]) or "gpu"


class Memory:
    """The memory of this machine, as its kernel tells."""

    __slots__ = ("_root",)

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def limit_bytes(self) -> int:
        """Return the most that this process and its children may use."""
        return min([self._meminfo("MemTotal"), *self._limits()])

    def used_bytes(self) -> int:
        """Return what is in use on the machine and could not be had back from caches."""
        return max(0, self._meminfo("MemTotal") - self._meminfo("MemAvailable"))

    def _meminfo(self, field: str) -> int:
        try:
            text = (self._root / "proc/meminfo").read_text("ascii")
        except OSError:
            return _UNLIMITED
        match = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
        return int(match[1]) * 1024 if match else _UNLIMITED

    def _limits(self) -> Iterator[int]:
        """Yield the limit of each control group that this process is in, its parents' too."""
        groups = self._root / "sys/fs/cgroup"
        for base, file, path in self._groups():
            folder = groups / base / path.lstrip("/")
            for parent in (folder, *folder.parents):
                if not parent.is_relative_to(groups):
                    break
                try:
                    text = (parent / file).read_text("ascii").strip()
                except OSError:  # in a container the path is that of the host, and only the mount's root is there
                    continue
                if text.isdigit() and 0 < int(text) < _UNLIMITED:
                    yield int(text)

    def _groups(self) -> Iterator[tuple[str, str, str]]:
        """Yield folder, file of the limit, and path of the control groups that may limit memory."""
        try:
            lines = (self._root / "proc/self/cgroup").read_text("utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                yield "", "memory.max", path
            elif "memory" in controllers.split(","):
                yield "memory", "memory.limit_in_bytes", path


def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _gpus(nvml: Any) -> tuple[list[Accelerator], dict[int, int], str]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    islands = _islands(nvml, handles)
    found: list[Accelerator] = []
    used: dict[int, int] = {}
    divided = []
    for number, handle in enumerate(handles):
        if _is_divided(nvml, handle):
            divided.append(str(number))
            continue
        index = GPU_INDEX_FIRST + number
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = nvml.nvmlDeviceGetName(handle)
        kind = kind_of(name if isinstance(name, str) else name.decode())
        found.append(Accelerator(index, kind, memory.total, islands[number]))
        used[index] = memory.used
    reason = f"GPU {', '.join(divided)} is divided by MIG, whose parts are not used" if divided else ""
    return found, used, reason


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # a GPU that knows no MIG
        return False


def _islands(nvml: Any, handles: list[Any]) -> list[int]:
    """Number the groups of GPUs that reach each other over NVLink; without NVLink, each is one of its own.

    A machine whose GPUs have no NVLink at all is one island: none of them is nearer than another.
    """
    island = list(range(len(handles)))
    for one in range(len(handles)):
        for other in range(one):
            if _is_linked(nvml, handles[one], handles[other]) and island[one] != island[other]:
                kept, gone = sorted((island[one], island[other]))
                island = [kept if number == gone else number for number in island]
    if len(set(island)) == len(handles):
        return [0] * len(handles)
    numbers = {name: number for number, name in enumerate(sorted(set(island)))}
    return [numbers[name] for name in island]


def _is_linked(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)
