"""Prints time and memory of the header readers, on files that are made to take long and on real ones.

    python tools/reader_bounds.py [MODEL …]

Each file is read in a process of its own, so that its peak of memory is its own. What is bounded by construction is
tested in ``tests/security/test_S09_fuzz.py``; this says what the bounds come to.
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

_CHILD = "--one"


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == [_CHILD]:
        _read(Path(sys.argv[2]))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.security.test_S09_fuzz import SEEDS, hostile

    print(f"{'file':34}{'ms':>8}{'MiB':>8}  answer")
    with tempfile.TemporaryDirectory() as folder:
        for name, (content, _) in SEEDS.items():
            file = Path(folder) / "seed"
            file.write_bytes(content)
            _report(f"a small {name}", file)
        for name, file in hostile(Path(folder)):
            _report(name, file)
            file.unlink()
    for given in sys.argv[1:]:
        _report(Path(given).name[:32], Path(given))


def _report(name: str, file: Path) -> None:
    runs = [
        subprocess.run([sys.executable, __file__, _CHILD, str(file)], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    milliseconds, mebibytes, answer = min((run.split(" ", 2) for run in runs), key=lambda run: float(run[0]))
    print(f"{name:34}{float(milliseconds):8.1f}{float(mebibytes):8.1f}  {answer.strip()[:90]}")


def _read(file: Path) -> None:
    """Print CPU milliseconds, mebibytes above what the interpreter has anyway, and what came out."""
    from modelyard.formats import ArtifactInvalidError
    from modelyard.formats.folder import facts_of

    before_kib = _peak_kib()
    before_s = _cpu_s()
    try:
        facts = facts_of({"model": file})
        answer = f"{facts.format} {facts.architecture} {facts.parameters:,} parameters"
    except ArtifactInvalidError as error:
        answer = f"refused: {error}"
    spent_ms = (_cpu_s() - before_s) * 1000
    mebibytes = (_peak_kib() - before_kib) / 1024
    print(f"{spent_ms:.2f} {mebibytes:.2f} {answer}")


def _peak_kib() -> int:
    """Return the peak of memory since this program began; ``ru_maxrss`` would count its parent's too."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
