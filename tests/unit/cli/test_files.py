"""What is sent is a file with a size: a pipe is refused before it is waited for, and before anything is asked."""

import os
from pathlib import Path
from typing import Any

import pytest

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.files import send_file

NOBODY: Any = None
"""A platform that is never asked."""


def test_a_pipe_is_refused_and_not_sent_as_an_empty_file(tmp_path: Path) -> None:
    pipe = tmp_path / "requests.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(Failure, match="is no regular file, so its size is not known") as refused:
        send_file(NOBODY, pipe)
    assert refused.value.exit_code is Exit.USAGE


@pytest.mark.parametrize(("name", "why"), [("", "Is a directory"), ("none", "No such file or directory")])
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(Failure, match=why) as refused:
        send_file(NOBODY, tmp_path / name)
    assert refused.value.exit_code is Exit.NOT_FOUND
