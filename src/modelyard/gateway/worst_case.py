"""The most that a request can use, for quotas, which must never be exceeded; and what it asks for."""

from modelyard.gateway.openai import Call
from modelyard.gateway.openai.chat_request import ImagePart

PICTURE_TOKENS_MAX = 16_384
"""No model that sees makes more of one picture (Qwen's of 12.8 million pixels); a picture of one colour has so many
pixels in a few hundred bytes."""


def output_tokens(call: Call, prompt: int, context_length: int, default: int) -> tuple[int, int]:
    """Return what the request may generate, and the most it can; a chat that names no limit gets the default.

    They differ where the context alone is the limit: how much of it the prompt takes is an estimate.
    """
    of_context = max(1, context_length - prompt) * call.choices, context_length * call.choices
    if call.output_tokens is not None:
        if not context_length or call.output_tokens < context_length * call.choices or not call.is_chat:
            return call.output_tokens, call.output_tokens
        # More than the context holds in all: engines would refuse what only means "as much as there is room for".
        call.request.max_tokens = None  # type: ignore[attr-defined]  # chats have it
        return of_context
    # A token is hardly ever shorter than a character, so this cap is sure to fit; where it might not, the
    # context itself is the cap, and naming a larger one would make some engines refuse the request.
    if not context_length or call.text_length + default <= context_length:
        call.request.max_tokens = default  # type: ignore[attr-defined]  # only chats leave it open
        return default * call.choices, default * call.choices
    return of_context


def prompt_tokens(call: Call, body_bytes: int, context_length: int) -> int:
    """Return the most tokens that the prompt can have.

    A token is at least a byte, and what a chat template adds is less than what JSON does. Pictures are the exception:
    they are counted by their pixels. With them, the prompt has still to fit the context.
    """
    pictures = _pictures(call)
    if not pictures:
        return body_bytes
    most = body_bytes + pictures * PICTURE_TOKENS_MAX
    return max(body_bytes, min(most, context_length)) if context_length else most


def _pictures(call: Call) -> int:
    found = 0
    for message in getattr(call.request, "messages", ()):
        content = getattr(message, "content", None)
        if isinstance(content, list):
            found += sum(isinstance(part, ImagePart) for part in content)
    return found
