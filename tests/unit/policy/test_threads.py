"""CPU threads of a replica: all cores on the CPU, a share of them beside a GPU, never none."""

import pytest

from modelyard.policy.threads import threads_for


@pytest.mark.parametrize(
    ("cores", "most", "kind", "count", "accelerators", "threads"),
    [
        (16, 0, "cpu", 1, 1, 16),
        (16, 4, "cpu", 1, 1, 4),
        (2, 4, "cpu", 1, 1, 2),
        (64, 0, "h100", 2, 8, 16),
        (4, 0, "h100", 1, 8, 1),
        (64, 8, "h100", 8, 8, 8),
        (8, 0, "h100", 1, 0, 8),
    ],
)
def test_threads(cores: int, most: int, kind: str, count: int, accelerators: int, threads: int) -> None:
    assert threads_for(cores=cores, most=most, kind=kind, count=count, accelerators=accelerators) == threads
