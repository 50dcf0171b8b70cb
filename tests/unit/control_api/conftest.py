"""The API of each test, and who asks it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.management import Management, management

from modelyard.domain.tenants import PLATFORM, Identity, Scope


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Management]:
    async with management(tmp_path) as running:
        yield running


@pytest.fixture
async def admin(api: Management) -> Identity:
    return (await api.key(PLATFORM, Scope.ADMIN))[0]


@pytest.fixture
async def manager(api: Management) -> Identity:
    """Someone who manages the tenant acme."""
    return (await api.key(await api.tenant("acme"), Scope.MANAGE))[0]
