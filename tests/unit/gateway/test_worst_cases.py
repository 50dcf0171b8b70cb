"""The worst case that a quota takes is never below what the ledger has in the end."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.gateway.test_exchange import Bench, whole

from modelyard.domain.routing_table import Spent, Tidings
from modelyard.domain.tenants import Limits
from modelyard.domain.usage import Price
from modelyard.gateway.worst_case import PICTURE_TOKENS_MAX

PRICE = Price(input=1_000_000, cached_input=1_000_000, output=10_000_000)
"""A nano-unit a token of the prompt, and ten one that is generated."""
CONTEXT = 100


class Yard(Bench):
    """A bench whose key has a quota, and whose model a short context."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        table = self.gateway.catalog.table
        assert table is not None
        (key,) = table.keys
        key = msgspec.structs.replace(key, limits=Limits(nanousd_per_month=10**6))
        endpoint = msgspec.structs.replace(self.endpoint.route, context_length=CONTEXT, price=PRICE)
        new = msgspec.structs.replace(table, revision=2, keys=(key,), endpoints=(endpoint,))
        self.gateway.catalog.take(new, now_s=self.clock.monotonic_s())
        self.gateway.catalog.accounts.attach(self.journal)
        self.clock.start_s = 1_795_953_600.0
        spent = Spent(key.id, "2026-11-29", "2026-11", 0, 0, 0, 0, "gateway-0")
        position = self.journal.position
        assert position is not None
        tidings = Tidings(spent=(spent,), delivered={self.journal.source: position})
        self.gateway.catalog.accounts.hear(tidings, now_unix_s=self.clock.unix_s())

    @property
    def used(self) -> int:
        (key,) = self.gateway.catalog.table.keys  # type: ignore[union-attr]
        state = self.gateway.catalog.accounts.by_id(key.id)
        assert state is not None
        return state.quotas[0].used[3]


@pytest.mark.parametrize("asked", [{}, {"max_tokens": 4096}])
def test_an_answer_that_fills_the_context_is_within_its_reservation(tmp_path: Path, asked: dict[str, Any]) -> None:
    yard = Yard(tmp_path)
    # Earlier prompts had a long template; so this one is taken for longer than it is.
    yard.endpoint.template_tokens = 60.0
    client, wire = yard.client()
    yard.ask(client, **asked)
    reserved = yard.used
    ((engine, _),) = yard.pool.opened
    usage = {"prompt_tokens": 4, "completion_tokens": CONTEXT - 4, "total_tokens": CONTEXT}
    engine.data_received(whole(json.dumps({"choices": [{"message": {"content": "a"}}], "usage": usage}).encode()))
    assert b"200 OK" in wire.sent
    assert yard.used == 4 + (CONTEXT - 4) * 10
    assert reserved >= yard.used
    yard.journal.close()


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_a_picture_is_more_tokens_than_bytes_and_no_more_than_the_context_holds(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    yard.endpoint.route = msgspec.structs.replace(yard.endpoint.route, context_length=4000)
    client, _ = yard.client()
    asked = {"messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "what is it?"}]}]}
    yard.ask(client, max_tokens=5, **asked)
    reserved = yard.used
    ((engine, _),) = yard.pool.opened
    usage = {"prompt_tokens": 3990, "completion_tokens": 5, "total_tokens": 3995}
    engine.data_received(whole(json.dumps({"choices": [{"message": {"content": "a"}}], "usage": usage}).encode()))
    assert yard.used == 3990 + 5 * 10
    assert yard.used <= reserved <= 4000 + 5 * 10
    yard.endpoint.route = msgspec.structs.replace(yard.endpoint.route, context_length=0)
    client, _ = yard.client()
    yard.ask(client, max_tokens=5, **asked)
    assert yard.used - 4040 >= PICTURE_TOKENS_MAX
    client.connection_lost(None)
    yard.journal.close()
