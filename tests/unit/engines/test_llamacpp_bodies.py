"""What llama.cpp is asked in place of what a caller asked, and the page that several processes give together."""

import json
from typing import Any

import pytest

from modelyard.engines.llamacpp import LlamaCppEngine, bodies
from modelyard.engines.llamacpp.page import added, counters, joined
from modelyard.engines.llamacpp.slots import Grant


def rewritten(asked: dict[str, Any], grant: Grant, *, adapter: int | None, has_adapters: bool = True) -> dict[str, Any]:
    body = bodies.read_body(json.dumps(asked).encode())
    found: dict[str, Any] = json.loads(bodies.written(body, grant, adapter=adapter, has_adapters=has_adapters))
    return found


def test_an_adapter_runs_alone_on_its_slot() -> None:
    asked = {"model": "a@1", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    found = rewritten(asked, Grant(2, may_read=True), adapter=3)
    assert found == {**asked, "id_slot": 2, "lora": [{"id": 3, "scale": 1.0}]}


def test_the_base_says_that_it_wants_none_where_there_are_adapters() -> None:
    """With an empty list llama.cpp would not even look what its slot was computed with."""
    assert rewritten({}, Grant(0, may_read=True), adapter=None) == {"id_slot": 0, "lora": [{"id": 0, "scale": 0.0}]}
    assert rewritten({}, Grant(0, may_read=True), adapter=None, has_adapters=False) == {"id_slot": 0}


def test_who_may_not_read_a_cache_is_told_so_and_a_caller_may_forbid_itself() -> None:
    asked = {"cache_prompt": True}
    assert rewritten(asked, Grant(0, may_read=False), adapter=0)["cache_prompt"] is False
    asked = {"cache_prompt": False}
    assert rewritten(asked, Grant(0, may_read=True), adapter=0)["cache_prompt"] is False


def test_a_caller_cannot_choose_slot_or_adapters_itself() -> None:
    asked = {"id_slot": 7, "lora": [{"id": 1, "scale": 1}], "slot_id": 1, "n_cmpl": 4}
    found = rewritten(asked, Grant(1, may_read=True), adapter=0)
    assert found == {"id_slot": 1, "lora": [{"id": 0, "scale": 1.0}]}


@pytest.mark.parametrize(
    ("raw", "param"),
    [(b"[]", ""), (b"{", ""), (b"", ""), (b'{"n":2}', "n"), (b'{"n":"2"}', "n"), (b"[" * 100_000, "")],
)
def test_a_body_that_cannot_be_passed_on_is_refused(raw: bytes, param: str) -> None:
    with pytest.raises(bodies.BodyError) as refused:
        bodies.read_body(raw)
    assert refused.value.param == param


def test_the_model_says_who_owns_the_slot() -> None:
    for raw, owner in ((b'{"model":"a@1"}', "a@1"), (b'{"model":"acme/tiny"}', ""), (b"{}", ""), (b'{"n":1}', "")):
        assert bodies.owner_of(bodies.model_of(bodies.read_body(raw)), "acme/tiny") == owner
    with pytest.raises(bodies.BodyError):
        bodies.model_of(bodies.read_body(b'{"model":["a"]}'))


def page(*, predicted: int, running: int, deferred: int = 0, longest: int = 5) -> str:
    return (
        "# TYPE llamacpp:tokens_predicted_total counter\n"
        f"llamacpp:tokens_predicted_total {predicted}\n"
        "# TYPE llamacpp:n_tokens_max counter\n"
        f"llamacpp:n_tokens_max {longest}\n"
        f"llamacpp:requests_processing {running}\nllamacpp:requests_deferred {deferred}\n"
    )


def test_counters_go_on_when_a_process_is_replaced_and_requests_add_up() -> None:
    ended = added(counters(page(predicted=100, running=0)), counters(page(predicted=10, running=0)))
    old, new = page(predicted=7, running=2, longest=9), page(predicted=1, running=1, deferred=1, longest=3)
    whole = joined([old, new], ended, waiting=4, more={"modelyard:adapters": 2})
    load = LlamaCppEngine().read_load(whole)
    assert (load.running, load.waiting, load.generation_tokens_total) == (3, 5, 118)
    assert "llamacpp:n_tokens_max 3\n" in whole, "a maximum is not added"
    assert "# TYPE modelyard:adapters gauge\nmodelyard:adapters 2\n" in whole


def test_a_page_without_processes_says_nothing_of_requests() -> None:
    load = LlamaCppEngine().read_load(joined([], {}, waiting=0, more={}))
    assert (load.running, load.waiting, load.generation_tokens_total) == (None, None, None)
