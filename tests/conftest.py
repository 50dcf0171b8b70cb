"""Fixtures of the suites that run against real processes."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.yard import Yard

# A shell that runs the suite in the background makes it ignore SIGINT, and every process it starts inherits that; a
# signal with a handler, though, is at its default in what is started. Tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


# No example has a deadline: a fifth of a second passes between two lines where all cores are busy.
settings.register_profile(
    "modelyard", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("modelyard")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file on one worker: they share a running platform, which is dear to start."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(scope="module")
def yard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Return a running platform, one a test file; the file's ``SETTINGS`` (if any) are its configuration."""
    folder: Path = tmp_path_factory.mktemp("yard")
    with Yard(folder, getattr(request.module, "SETTINGS", {})) as running:
        yield running
