"""The catalog: what is learnt of a model estimates prompts without ever blowing them up."""

from typing import Any

from modelyard.gateway.catalog import CHARS_PER_TOKEN, EndpointState


def state() -> EndpointState[Any]:
    unused: Any = None
    return EndpointState(unused, unused, last_request_s=0.0)


def test_long_prompts_teach_the_length_of_a_token() -> None:
    endpoint = state()
    for _ in range(200):
        endpoint.learn(text_length=3000, prompt_tokens=1000, seconds=1)
    assert endpoint.prompt_tokens(3000) in range(995, 1005)


def test_what_is_not_text_teaches_nothing_of_text() -> None:
    """A picture is many tokens to few characters; others must not pay for it."""
    endpoint = state()
    for _ in range(200):
        endpoint.learn(text_length=2, prompt_tokens=4000, seconds=1)
        endpoint.learn(text_length=300, prompt_tokens=4000, seconds=1)
    assert endpoint.prompt_tokens(4000) == 4000 / CHARS_PER_TOKEN


def test_short_prompts_teach_what_the_template_adds() -> None:
    endpoint = state()
    for _ in range(200):
        endpoint.learn(text_length=40, prompt_tokens=41, seconds=1)
    assert endpoint.prompt_tokens(40) in range(40, 42)
    assert endpoint.prompt_tokens(4000) in range(1030, 1032)
