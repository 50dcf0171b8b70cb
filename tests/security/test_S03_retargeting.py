"""S3: request fields that would re-target or re-configure an engine, and what becomes of other unknown fields."""

from typing import Any

import pytest
from tests.support.refusals import assert_refused, post
from tests.support.yard import Yard

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "sim", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "sim", "prompt": "hi", "max_tokens": 4},
    "/v1/embeddings": {"model": "sim", "input": "hi"},
    "/v1/rerank": {"model": "sim", "query": "hi", "documents": ["a"]},
    "/v1/score": {"model": "sim", "text_1": "hi", "text_2": "a"},
    "/v1/classify": {"model": "sim", "input": "hi"},
    "/v1/moderations": {"model": "sim", "input": "hi"},
    "/v1/audio/speech": {"model": "sim", "input": "hi", "voice": "v"},
    "/v1/images/generations": {"model": "sim", "prompt": "hi"},
    "/v2/models/sim/infer": {"inputs": [{"name": "x", "shape": [1], "datatype": "BOOL", "data": [True]}]},
}
RETARGETING: dict[str, Any] = {
    "api_base": "http://127.0.0.1:1/v1",
    "base_url": "http://127.0.0.1:1/v1",
    "api_key": "sk-x",
    "user_config": {"model_list": []},
    "chat_template": "{{ 1 }}",
    "chat_template_kwargs": {"chat_template": "{{ 1 }}"},
    "kv_transfer_params": {"tp_size": 100000},
    "mm_processor_kwargs": {"max_pixels": 10**9},
    "lora_request": {"lora_path": "/etc"},
    "prompt_embeds": "gASVAAAA",
    "cache_salt": "someone-else",
    "priority": -1,
    "request_id": "req_forged",
    "bootstrap_host": "127.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "guided_decoding_backend": "outlines",
    "guided_regex": "(?<=x)*",
    "guided_json": {},
    "prompt_logprobs": -1,
    "structured_outputs": {},
    "extra_body": {},
    "extra_headers": {},
    "session_params": {},
    "vllm_xargs": {},
    "data_parallel_rank": 0,
}
EXTRAS: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 1,
    "ignore_eos": False,
    "repetition_penalty": 1.1,
}


def seen_by_engine(yard: Yard, request_id: str | None) -> set[str]:
    """Return the names of the body fields that the engine got."""
    (record,) = yard.events_of(request_id, "begin")
    return set(record["body_keys"])


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize("field", RETARGETING)
def test_a_field_that_steers_the_engine_is_400_and_named(ask: Any, path: str, field: str) -> None:
    assert_refused(ask(path, {**BASES[path], field: RETARGETING[field]}), param=field)


@pytest.mark.parametrize("field", RETARGETING)
@pytest.mark.parametrize("value", [None, "", [], {}, 0], ids=repr)
def test_it_is_refused_whatever_its_value(ask: Any, field: str, value: Any) -> None:
    path = "/v1/chat/completions"
    assert_refused(ask(path, {**BASES[path], field: value}), param=field)


def test_it_is_refused_beside_other_unknown_fields(ask: Any) -> None:
    body = {**BASES["/v1/completions"], "harmless": 1, "api_base": "http://127.0.0.1:1", "another": {}}
    assert_refused(ask("/v1/completions", body), param="api_base")


@pytest.mark.parametrize("path", BASES)
def test_other_unknown_fields_are_dropped_and_named(yard: Yard, model: str, path: str) -> None:
    body = {**BASES[path], "favourite_colour": "blue", "verbose": True}
    answer = post(yard, path, body)
    assert answer.status == 200, bytes(answer.body)
    ignored = {name.strip() for name in (answer.header("x-modelyard-ignored") or "").split(",")}
    assert ignored == {"favourite_colour", "verbose"}
    assert not seen_by_engine(yard, answer.header("x-request-id")) & {"favourite_colour", "verbose"}


def test_a_strange_field_name_cannot_break_the_header(yard: Yard, model: str) -> None:
    body = {**BASES["/v1/completions"], "a\r\nset-cookie: x=y\r\n\r\n": 1, "ünïcode": 2, "x" * 30_000: 3, "\0": 4}
    answer = post(yard, "/v1/completions", body)
    assert answer.status in (200, 400), bytes(answer.body)
    assert answer.header("set-cookie") is None
    assert sum(len(name) + len(value) for name, value in answer.headers) < 16_000


def test_many_unknown_fields_give_no_endless_header(yard: Yard, model: str) -> None:
    body = {**BASES["/v1/completions"], **{f"field_{n}": n for n in range(5000)}}
    answer = post(yard, "/v1/completions", body)
    assert answer.status in (200, 400), bytes(answer.body)
    assert sum(len(name) + len(value) for name, value in answer.headers) < 16_000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_allowed_sampling_extras_reach_the_engine(yard: Yard, model: str, path: str) -> None:
    answer = post(yard, path, {**BASES[path], **EXTRAS})
    assert answer.status == 200, bytes(answer.body)
    assert answer.header("x-modelyard-ignored") is None
    assert seen_by_engine(yard, answer.header("x-request-id")) >= set(EXTRAS)


def test_what_is_for_the_platform_stays_there(yard: Yard, model: str) -> None:
    platform = {"user": "someone", "metadata": {"order": "17"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    answer = post(yard, "/v1/chat/completions", {**BASES["/v1/chat/completions"], **platform, "store": False})
    assert answer.status == 200, bytes(answer.body)
    assert not seen_by_engine(yard, answer.header("x-request-id")) & {*platform, "store"}


def test_null_is_the_same_as_absent(yard: Yard, model: str) -> None:
    names = (
        "temperature",
        "top_p",
        "n",
        "max_tokens",
        "stop",
        "seed",
        "stream",
        "tools",
        "response_format",
        "metadata",
    )
    answer = post(yard, "/v1/chat/completions", {**BASES["/v1/chat/completions"], **dict.fromkeys(names)})
    assert answer.status == 200, bytes(answer.body)
