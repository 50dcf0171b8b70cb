"""A console, and a visitor of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from tests.support.management import Management, management


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path) as running:
        yield running


@pytest.fixture
async def browser(api: Management) -> AsyncIterator[httpx2.AsyncClient]:
    """A visitor without an identity, as the gateway lets everyone through to the console."""
    async with api.client(None) as client:
        yield client
