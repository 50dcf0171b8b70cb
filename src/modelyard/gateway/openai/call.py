"""A decoded inference request, and how unknown fields are treated.

Fields that would re-target or re-configure an engine are refused by name;
OpenAI's fields that few engines honour are ``needs`` of the request, since
dropping them silently would change the answer; anything else unknown is dropped
and named in the header ``x-modelyard-ignored``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from modelyard import errors
from modelyard.domain import usage
from modelyard.web.decoding import decode

if TYPE_CHECKING:
    from modelyard.gateway.dialects import Translation

MODEL_LENGTH_MAX = 256

ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=MODEL_LENGTH_MAX)]
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenLimit = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Stop = StopText | Annotated[list[StopText], msgspec.Meta(max_length=4)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=8)]
"""OpenAI allows 128; each choice is another answer to hold a replica for."""
Bias = Annotated[dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]], msgspec.Meta(max_length=300)]
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(min_length=1)]

REFUSED = frozenset(
    {
        "add_generation_prompt", "api_base", "api_key", "base_url", "bootstrap_host", "bootstrap_port",
        "bootstrap_room", "cache_salt", "chat_template", "chat_template_kwargs", "continue_final_message",
        "custom_llm_provider", "data_parallel_rank", "documents", "extra_args", "extra_body", "extra_headers",
        "grammar", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
        "id_slot", "json_schema", "kv_transfer_params", "lora", "lora_path", "lora_request", "media_io_kwargs",
        "mm_processor_kwargs", "n_predict", "priority", "prompt_embeds", "prompt_logprobs", "request_id",
        "return_token_ids", "rid", "session_params", "structured_outputs", "user_config", "vllm_xargs",
    }
)  # fmt: skip
"""Fields that steer an engine or the platform instead of the answer."""

EXTRAS = ("top_k", "min_p", "min_tokens", "ignore_eos", "repetition_penalty")
"""Sampling fields beyond OpenAI's that are forwarded where the engine knows them."""


class StreamOptions(msgspec.Struct, omit_defaults=True):
    """``include_obfuscation`` is accepted and has no effect: streams are not padded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


INCLUDE_USAGE = StreamOptions(include_usage=True)
"""What every engine is asked on every stream, whatever the client asked for."""


class Sampling(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields that chat and text completions share. None is absent."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    n: Choices | None = None
    stop: Stop | None = None
    seed: Int64 | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    user: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Unit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None


class Meter(NamedTuple):
    """What an answer is billed beside tokens: ``count_of`` its body of ``unit``, at the ``most`` so much."""

    unit: usage.Unit
    most: float
    count_of: Callable[[bytes], float]


class LinkTarget(Protocol):
    """Where in a request a URL stands."""

    url: str


class Link(NamedTuple):
    """A URL in a request that the gateway fetches; what it finds takes its place. ``param`` is what to blame."""

    param: str
    target: LinkTarget


class Call(msgspec.Struct):
    """What the gateway needs to know of a request; ``request`` is encoded for the engine.

    ``text_length`` is the characters of the prompt; ``output_tokens`` the asked limit for all choices together, None
    when the request names none; ``choices`` how many answers (or inputs of an embedding) there will be.

    ``engine_route`` is the path at the engine where it is not the caller's; ``translation`` turns the answer into what
    the caller's API promises. ``tier`` is the service tier asked for, ``user`` what groups requests of one user.
    ``can_resume``: the answer may be continued on another replica from its text alone. ``needs`` are names the engine
    must have among its extras, with the parameter to blame. ``payload`` (with its ``content_type``) is sent in place of
    the encoded ``request``; where the model's name stands in it, ``payload_for`` makes it instead, for the name that
    the engine has. ``is_passthrough``: the answer is no JSON, and goes out as it came, under the
    ``answer_type`` of what the engine said. ``meter`` counts what is not counted in tokens; with one, an answer without
    usage has used no tokens. ``links`` are fetched before the request goes on.

    A ``Struct`` because one is made for every request, and a dataclass of so many fields costs 0.7 µs more to make.
    """

    model: str
    request: msgspec.Struct
    text_length: int
    choices: int = 1
    output_tokens: int | None = None
    is_stream: bool = False
    wants_usage: bool = False
    ignored: tuple[str, ...] = ()
    engine_route: str = ""
    translation: "Translation | None" = None
    tier: str = ""
    user: str = ""
    can_resume: bool = False
    needs: tuple[tuple[str, str], ...] = ()
    is_passthrough: bool = False
    payload: bytes | None = None
    content_type: bytes = b"application/json"
    payload_for: Callable[[str], bytes] | None = None
    meter: Meter | None = None
    links: tuple[Link, ...] = ()

    @property
    def units_max(self) -> float:
        """Return the most units that the answer can be billed."""
        return self.meter.most if self.meter is not None else 0.0

    def units_of(self, answer: bytes) -> tuple[float, usage.Unit]:
        """Return the units of a good answer; failed requests have none."""
        meter = self.meter
        return (0.0, usage.Unit.NONE) if meter is None else (min(meter.count_of(answer), meter.most), meter.unit)

    @property
    def is_chat(self) -> bool:
        """Say whether the engine gets a chat, whatever the caller asked."""
        return hasattr(self.request, "messages")

    def lacking(self, extras: frozenset[str]) -> str | None:
        """Return the parameter that an engine with ``extras`` cannot honour, None when it can do all."""
        return next((param for name, param in self.needs if name not in extras), None)

    def prompt_bytes(self) -> bytes:
        """Return the prompt as bytes that begin alike where prompts do, for the prefix index."""
        request = self.request
        for name in ("messages", "prompt", "input"):
            if (value := getattr(request, name, None)) is not None:
                return _encode(value)
        return self.payload or b""


def not_counted() -> Meter:
    """Return the meter of routes that are billed nothing but the tokens that their engine tells."""
    return Meter(usage.Unit.NONE, 0.0, lambda _answer: 0.0)


class Incoming(Protocol):
    """What a decoder may look at of a request (``gateway/server.py`` has the whole)."""

    path: str
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of this lower-case name."""
        ...


_ANSWER_TYPES = (b"audio/", b"text/plain", b"text/vtt", b"application/x-subrip", b"application/octet-stream")
_BYTES = b"application/octet-stream"


def answer_type(given: bytes) -> bytes:
    """Return the type under which an answer that is no JSON goes out: a page of an engine must not be shown as ours."""
    kind = given.partition(b";")[0].strip().lower()
    if not kind.startswith(_ANSWER_TYPES):
        return _BYTES
    return kind + b"; charset=utf-8" if kind.startswith(b"text/") else kind


R = TypeVar("R", bound=msgspec.Struct)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


def decode_strict(decoder: msgspec.json.Decoder[R], body: bytes) -> tuple[R, tuple[str, ...]]:
    """Decode ``body``; return the request and the names of unknown fields that were dropped.

    Raises:
        ApiError: 400 naming the field that is wrong, missing, refused or unsupported.
    """
    try:
        return decoder.decode(body), ()
    except msgspec.ValidationError as error:
        # Only a body with an unknown field pays for a second look.
        if not str(error).startswith("Object contains unknown field"):
            return decode(decoder, body), ()
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return decode(decoder, body), ()
    fields = decode(_fields, body)
    kind: type[R] = decoder.type  # type: ignore[assignment]  # typed as a TypeForm; it is the struct given to us
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    ignored = []
    for name in list(fields):
        if name in known:
            continue
        if name in REFUSED:
            raise errors.unsupported_parameter(name, "it would reconfigure the engine and is not accepted")
        if bytes(fields[name]) == b"null":
            # As good as absent, like null for every optional field.
            del fields[name]
            continue
        del fields[name]
        ignored.append(name)
    return decode(decoder, _encode(fields)), tuple(ignored)


def drop_extras(request: Any, known_to_engine: frozenset[str]) -> list[str]:
    """Unset sampling extras that the engine does not know; return their names."""
    dropped: list[str] = []
    if isinstance(request, Sampling) and (
        request.top_k is request.min_p is request.min_tokens is request.ignore_eos is request.repetition_penalty is None
    ):
        # Nearly all; an attribute with its name written out is found five times as fast as below.
        return dropped
    for name in EXTRAS:
        if getattr(request, name, None) is not None and name not in known_to_engine:
            setattr(request, name, None)
            dropped.append(name)
    return dropped


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
