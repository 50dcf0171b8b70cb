"""S19: nobody learns from a cache what another tenant asked."""

from typing import Any

import pytest
from tests.support.yard import Yard

PROMPT = "a long instruction that many would send, word for word, and that an engine keeps in its cache " * 12


@pytest.fixture(scope="module")
def shared(yard: Yard) -> str:
    yard.deploy("shared", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1}, shared=True)
    return "shared"


def cached(yard: Yard, key: str, prompt: str, **fields: Any) -> int:
    body = {"model": "shared", "max_tokens": 1, "messages": [{"role": "user", "content": prompt}], **fields}
    answer = yard.call("POST", "/v1/chat/completions", body, key=key)
    assert answer.status == 200, answer.body
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_same_tenant_hits_its_own_cache_with_any_of_its_keys(yard: Yard, shared: str) -> None:
    one, other = yard.new_key(), yard.new_key()
    prompt = f"tenant's own {PROMPT}"
    assert cached(yard, one, prompt) == 0
    assert cached(yard, one, prompt) > 0
    assert cached(yard, other, prompt) > 0


def test_another_tenant_misses_and_cannot_name_the_salt(yard: Yard, shared: str) -> None:
    stranger = yard.call("POST", "/v1/tenants", {"name": "stranger"}).json()["id"]
    key = yard.new_key(tenant_id=stranger)
    prompt = f"whose is it {PROMPT}"
    assert cached(yard, yard.new_key(), prompt) == 0
    body = {"model": "shared", "messages": [{"role": "user", "content": prompt}], "cache_salt": "anything"}
    assert yard.call("POST", "/v1/chat/completions", body, key=key).status == 400
    if yard.call("GET", "/v1/models/shared", key=key).status == 200:
        assert cached(yard, key, prompt) == 0, "the other tenant's prompt was in the cache"
        assert cached(yard, key, prompt) > 0
    else:
        pytest.fail("the endpoint is not shared")
