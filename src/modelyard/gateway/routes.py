"""Every way to ask a model something, and in whose words it is asked and answered."""

from collections.abc import Callable
from typing import NamedTuple

from modelyard.errors import ApiError
from modelyard.gateway import openai
from modelyard.gateway.dialects.messages import counted_length, decode_count, decode_message
from modelyard.gateway.dialects.messages_replies import (
    PREFIX,
    VERSION_HEADER,
    count_body,
    error_body,
    speaks_messages,
)
from modelyard.gateway.dialects.responses import decode_input_tokens, decode_response, input_tokens_answer
from modelyard.gateway.openai import Decode, Incoming
from modelyard.gateway.openai.call import Call

DECODERS: dict[str, Decode] = {
    **openai.DECODERS,
    "/v1/responses": lambda request: decode_response(request.body),
    "/v1/messages": lambda request: decode_message(request.body),
}
"""How to decode a request, by its path."""


class Count(NamedTuple):
    """A route that tells how many tokens a prompt has: how to decode it, the text that counts, and the answer."""

    decode: Callable[[bytes], Call]
    length_of: Callable[[Call], int]
    answer: Callable[[int], bytes]


COUNTS = {
    "/v1/messages/count_tokens": Count(decode_count, counted_length, count_body),
    "/v1/responses/input_tokens": Count(decode_input_tokens, lambda call: call.text_length, input_tokens_answer),
}


def decoder_of(path: str) -> Decode | None:
    """Return how to decode a request to ``path``; None for what is no inference route."""
    return DECODERS.get(path) or openai.decoder_of(path)


def spoken_on(request: Incoming) -> str:
    """Return a path of the API that the caller speaks: some paths are of two."""
    if request.path.startswith("/v1/models") and request.header(VERSION_HEADER) is not None:
        return PREFIX
    return request.path


def body_of_error(path: str, error: ApiError, request_id: str) -> bytes:
    """Return the body of an error in the shape that the API of ``path`` has."""
    return error_body(error, request_id) if speaks_messages(path) else error.body()
