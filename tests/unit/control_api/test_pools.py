"""Warm pools over the management API: what is refused, and to whom."""

import pytest
from tests.support.management import Management

from modelyard.domain.tenants import Identity

ORDER = {"model_name": "base", "framework": "simulated"}


@pytest.mark.parametrize("body", [{"model": "base", "replicas": 1}, {"model": ""}, {"nonsense": 1}])
async def test_only_an_admin_gets_as_far_as_having_faults(
    api: Management, manager: Identity, body: dict[str, object]
) -> None:
    for method, path in (("PUT", "/v1/pools/fast"), ("DELETE", "/v1/pools/fast"), ("GET", "/v1/pools")):
        answer = await api.call(manager, method, path, body if method == "PUT" else None)
        assert answer.status_code == 403, answer.text
    assert await api.context.store.endpoints() == []


async def test_a_name_that_an_endpoint_has_is_taken(api: Management, admin: Identity) -> None:
    for name in ("base", "pool/fast"):
        assert (await api.call(admin, "POST", "/v1/models/deploy", ORDER | {"model_name": name})).status_code == 202
    answer = await api.call(admin, "PUT", "/v1/pools/fast", {"model": "base", "replicas": 1})
    assert answer.status_code == 409
    assert "choose another name" in answer.json()["error"]["message"]
    assert (await api.call(admin, "PUT", "/v1/pools/quick", {"model": "base", "replicas": 1})).status_code == 200
