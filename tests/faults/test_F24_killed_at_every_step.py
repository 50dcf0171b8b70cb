"""F24: whatever a fetch is killed at, nothing half is visible, and the next one ends with the very same artifact."""

import random
import signal
from pathlib import Path

import pytest
from tests.support.artifacts import accept, digest_of, files_in, ignore, open_store
from tests.support.killing import DONE, killed_at

from modelyard.config import FetchConfig
from modelyard.domain.catalog import Artifact

PART = 16_384
CONTENT = b"GGUF" + random.Random(3).randbytes(3 * PART)
STEPS_MAX = 80


def source_of(tmp_path: Path, kind: str) -> str:
    if kind == "file":
        (tmp_path / "model.gguf").write_bytes(CONTENT)
        return str(tmp_path / "model.gguf")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "model.safetensors").write_bytes(CONTENT)
    (tmp_path / "model" / "sub" / "config.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.mark.parametrize("kind", ["file", "folder"])
async def test_fetch_that_is_killed_at_its_nth_step_is_ended_by_the_next(tmp_path: Path, kind: str) -> None:
    uri = source_of(tmp_path, kind)
    config = FetchConfig(part_bytes=PART)
    expected = await open_store(tmp_path / "good", config).fetch(Artifact(uri), accept, ignore)
    for step in range(1, STEPS_MAX):
        root = tmp_path / f"store-{step}"
        code = killed_at(root, uri, part_bytes=PART, kill_at=step)
        for file in files_in(root, "sha256"):
            assert digest_of(file.read_bytes()) == f"sha256:{file.name}", f"step {step} shows half a file"
        for tree in (root / "trees").glob("*"):
            assert len(files_in(tree)) == len(expected.files), f"step {step} shows half a folder"
        store = open_store(root, config)
        assert await store.fetch(Artifact(uri), accept, ignore) == expected
        assert store.path(expected) is not None
        left = files_in(root, "incoming")
        assert left == [], f"step {step} left {left}"
        if code == DONE:
            assert step > 8, "every step was tried"
            return
        assert code == -signal.SIGKILL
    raise AssertionError(f"there are more than {STEPS_MAX} steps")
