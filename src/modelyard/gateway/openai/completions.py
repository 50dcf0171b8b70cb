"""``POST /v1/completions``: the request."""

from typing import Annotated

import msgspec

from modelyard import errors
from modelyard.gateway.openai.call import Call, Sampling, TokenIds, decode_strict
from modelyard.gateway.openai.logprobs import LogprobsTranslation

PROMPTS_MAX = 128
MAX_TOKENS_DEFAULT = 16
"""OpenAI's default, also for an explicit null."""

Prompt = str | Annotated[list[str | int | TokenIds], msgspec.Meta(min_length=1)]


class CompletionRequest(Sampling, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The body. ``prompt`` is text, a list of texts, one list of token ids, or a list of those."""

    prompt: Prompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_decoder, body)
    if request.max_tokens is None:
        request.max_tokens = MAX_TOKENS_DEFAULT
    prompts, length = measure(request.prompt, "prompt", inputs_max=PROMPTS_MAX)
    tries = _tries(request)
    options = request.stream_options
    is_stream = bool(request.stream)
    wants_usage = bool(is_stream and options is not None and options.include_usage)
    needs = [(name, name) for name in ("best_of", "echo", "suffix") if getattr(request, name)]
    request.user = None
    return Call(
        model=request.model,
        request=request,
        text_length=length,
        choices=tries * prompts,
        output_tokens=request.max_tokens * tries * prompts,
        is_stream=is_stream,
        wants_usage=wants_usage,
        ignored=ignored,
        translation=None if request.logprobs is None else LogprobsTranslation(wants_usage=wants_usage),
        needs=tuple(needs),
        can_resume=isinstance(request.prompt, str) and tries == 1 and request.logprobs is None and not needs,
    )


def _tries(request: CompletionRequest) -> int:
    """Return how many answers to a prompt are generated; a ``best_of`` that asks for no more than ``n`` is dropped.

    Raises:
        ApiError: 400 for fewer than are to be returned, and for a choice among answers that are streamed.
    """
    choices, best_of = request.n or 1, request.best_of
    if not best_of or best_of == choices:
        request.best_of = None
        return choices
    if best_of < choices:
        raise errors.invalid_value("best_of", f"it is less than 'n', which is {choices}")
    if request.stream:
        raise errors.invalid_value("best_of", "the best answer is not known while all are streamed")
    return best_of


def measure(value: Prompt, param: str, *, inputs_max: int) -> tuple[int, int]:
    """Return how many inputs ``value`` holds and their length in characters (a token id counts as four).

    Raises:
        ApiError: 400 for a list that mixes kinds, is too long, or holds an empty text.
    """
    if isinstance(value, str):
        if not value:
            raise errors.invalid_value(param, "it is empty")
        return 1, len(value)
    if all(isinstance(item, int) for item in value):
        if any(isinstance(item, int) and not 0 <= item < 2**31 for item in value):
            raise errors.invalid_value(param, "a token id is out of range")
        return 1, 4 * len(value)
    if len(value) > inputs_max:
        raise errors.invalid_value(param, f"it has {len(value)} entries, the most is {inputs_max}")
    if not (all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value)):
        raise errors.invalid_value(param, "it mixes texts and token ids", code="invalid_type")
    length = 0
    for index, item in enumerate(value):
        if not item:
            raise errors.invalid_value(f"{param}[{index}]", "it is empty")
        length += len(item) if isinstance(item, str) else 4 * len(item)  # type: ignore[arg-type]  # no int left here
    return len(value), length
