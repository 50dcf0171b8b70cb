"""This machine as a node: its CPU within its control group, and GPUs through the real bindings of NVML."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelyard.domain.nodes import Accelerator
from modelyard.fleet.accelerators import Memory, cuda_environment, kind_of, look

GIB = 1024**3
SOURCE = Path(__file__).parents[2] / "support" / "fake_nvml.c"
LOOK = """
import json, sys, msgspec
from pathlib import Path
from modelyard.fleet.accelerators import look
found = look(reserve_bytes=0, root=Path(sys.argv[1]))
used = {str(index): size for index, size in found.used_bytes.items()}
print(json.dumps([msgspec.to_builtins(found.accelerators), used, found.reason]))
"""


def machine(root: Path, *, cgroup: str = "", has_nvidia: bool = False, **files: str) -> Path:
    """Write the parts of /proc and /sys that are read; names of ``files`` have ``__`` for ``/``."""
    texts = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   12582912 kB\n"}
    texts["proc/self/cgroup"] = cgroup
    texts |= {name.replace("__", "/"): text for name, text in files.items()}
    if has_nvidia:
        texts["dev/nvidiactl"] = ""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_limit_the_memory_is_the_machines(tmp_path: Path) -> None:
    memory = Memory(machine(tmp_path))
    assert (memory.limit_bytes(), memory.used_bytes()) == (16 * GIB, 4 * GIB)


def test_the_least_limit_of_a_control_group_and_its_parents_holds(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/pod/app\n")
    for folder, text in {"pod/app": "max\n", "pod": f"{6 * GIB}\n", "": f"{9 * GIB}\n"}.items():
        file = root / "sys/fs/cgroup" / folder / "memory.max"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert Memory(root).limit_bytes() == 6 * GIB


def test_in_a_container_the_limit_is_at_the_root_of_what_is_mounted(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/../../kubepods/pod1\n", **{"sys__fs__cgroup__memory.max": f"{2 * GIB}\n"})
    assert Memory(root).limit_bytes() == 2 * GIB


def test_version_1_of_control_groups_has_another_file_and_another_unlimited(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"
    file = "sys__fs__cgroup__memory__x__memory.limit_in_bytes"
    assert Memory(machine(tmp_path / "a", cgroup=lines, **{file: f"{3 * GIB}\n"})).limit_bytes() == 3 * GIB
    unlimited = {file: "9223372036854771712\n"}
    assert Memory(machine(tmp_path / "b", cgroup=lines, **unlimited)).limit_bytes() == 16 * GIB


def test_the_cpu_is_an_accelerator_with_what_the_reserve_leaves(tmp_path: Path) -> None:
    found = look(reserve_bytes=GIB, root=machine(tmp_path))
    assert found.accelerators[0] == Accelerator(0, "cpu", 15 * GIB)
    assert look(reserve_bytes=99 * GIB, root=tmp_path).accelerators[0].memory_bytes == 0


def test_this_very_machine_has_a_cpu() -> None:
    found = look(reserve_bytes=0)
    assert found.accelerators[0].kind == "cpu"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found.accelerators[0].memory_bytes <= total


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Graphics Device", "graphicsdevice"),
    ],
)
def test_the_kind_comes_from_the_drivers_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_an_engine_sees_its_own_gpus_by_their_place_on_the_bus_and_one_on_the_cpu_sees_none() -> None:
    assert cuda_environment((3, 4)) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert cuda_environment((0,))["CUDA_VISIBLE_DEVICES"] == ""


# --- through the real bindings ---------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True, timeout=60)
    return folder


def looked(root: Path, library: Path | None, **environment: str) -> tuple[list[Accelerator], dict[str, int], str]:
    """Look at a machine in a process of its own: the bindings keep the library that they loaded."""
    paths = {"LD_LIBRARY_PATH": str(library)} if library else {}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, root],
        env={**os.environ, **paths, **environment},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    accelerators, used, reason = json.loads(done.stdout)
    return [Accelerator(**one) for one in accelerators], used, reason


def test_gpus_are_found_with_memory_and_the_islands_of_their_nvlink(tmp_path: Path, library: Path) -> None:
    rows = [f"NVIDIA H100 80GB HBM3,81559,{500 + number},{number // 2},0" for number in range(4)]
    found, used, reason = looked(machine(tmp_path), library, FAKE_GPUS=";".join(rows))
    assert reason == ""
    assert [(one.index, one.kind, one.memory_bytes >> 20, one.island) for one in found[1:]] == [
        (1, "h100", 81559, 0),
        (2, "h100", 81559, 0),
        (3, "h100", 81559, 1),
        (4, "h100", 81559, 1),
    ]
    assert [used[str(index)] >> 20 for index in range(1, 5)] == [500, 501, 502, 503]


def test_gpus_without_nvlink_are_one_island(tmp_path: Path, library: Path) -> None:
    found, _, _ = looked(machine(tmp_path), library, FAKE_GPUS="NVIDIA L4,23034,1,-1,-1;NVIDIA L4,23034,1,-1,-1")
    assert [(one.kind, one.island) for one in found[1:]] == [("l4", 0), ("l4", 0)]


def test_a_gpu_that_is_divided_by_mig_is_left_out_with_a_reason_and_the_others_keep_their_numbers(
    tmp_path: Path, library: Path
) -> None:
    rows = "NVIDIA A100-SXM4-80GB,81920,1,-1,1;NVIDIA A100-SXM4-80GB,81920,1,-1,0"
    found, _, reason = looked(machine(tmp_path), library, FAKE_GPUS=rows)
    assert [one.index for one in found] == [0, 2]
    assert reason == "GPU 0 is divided by MIG, whose parts are not used"


def test_a_driver_that_does_not_start_leaves_the_cpu_and_a_reason_where_there_are_devices(
    tmp_path: Path, library: Path
) -> None:
    found, _, reason = looked(machine(tmp_path, has_nvidia=True), library, FAKE_INIT="9")
    assert [one.kind for one in found] == ["cpu"]
    assert reason == "its NVIDIA GPUs cannot be seen: Driver Not Loaded"


def test_without_a_driver_and_devices_there_is_nothing_to_say(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has NVIDIA GPUs")
    found, _, reason = looked(machine(tmp_path), None)
    assert ([one.kind for one in found], reason) == (["cpu"], "")
