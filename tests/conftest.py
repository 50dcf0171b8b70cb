"""Fixtures of the suites that run against real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.yard import Yard


@pytest.fixture(scope="module")
def yard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Return a running platform, one a test file; the file's ``SETTINGS`` (if any) are its configuration."""
    folder: Path = tmp_path_factory.mktemp("yard")
    with Yard(folder, getattr(request.module, "SETTINGS", {})) as running:
        yield running
