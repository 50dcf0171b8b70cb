"""What a caller reads when an engine refuses."""

import pytest

from modelyard.gateway.engine_errors import translate
from modelyard.gateway.responses import ResponseHead


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "request (50 tokens) exceeds the available context size (20 tokens), try increasing it",
            "This does not fit the context of 'm': request (50 tokens) exceeds the available context size (20 tokens).",
        ),
        ("over the maximum context length.", "This does not fit the context of 'm': over the maximum context length."),
    ],
)
def test_a_prompt_over_the_context_names_the_model_and_not_what_only_an_operator_can_do(said: str, shown: str) -> None:
    head = ResponseHead()
    head.status = 400
    error = translate(head, b'{"error": {"message": "%s"}}' % said.encode(), "m")
    assert (error.status, error.code, error.message) == (400, "context_length_exceeded", shown)
