"""``/v1/audio/speech``, ``/v1/audio/transcriptions`` and ``/v1/audio/translations``.

Sound passes through as it came. Speech is billed by the character, what listens
by the second: as the engine tells, else as the file's own header says, else by
its length at 256 kbit/s, which is more than most recordings have and so in the
customer's favour.
"""

from typing import Annotated, Literal

import msgspec

from modelyard.domain.usage import Unit
from modelyard.gateway.openai.call import Call, Incoming, Meter, ModelName, decode_strict
from modelyard.gateway.openai.forms import decode_form

CHARACTERS_MAX = 4096
_BYTES_PER_S = 32_000
_BYTES_PER_S_MIN = 1_000
"""Fewer make no speech that a model understands; the bound of what can be billed."""
_WAV_HEAD = 4096

_encode = msgspec.json.Encoder().encode


class Voice(msgspec.Struct):
    """A voice by its id."""

    id: str


class SpeechRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What to say, and how."""

    model: ModelName
    input: Annotated[str, msgspec.Meta(min_length=1, max_length=CHARACTERS_MAX)]
    voice: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | Voice
    instructions: Annotated[str, msgspec.Meta(max_length=CHARACTERS_MAX)] | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4)] | None = None
    stream_format: Literal["audio", "sse"] | None = None


class TranslationRequest(msgspec.Struct, kw_only=True):
    """The fields beside the file."""

    model: ModelName
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


class TranscriptionRequest(TranslationRequest, kw_only=True):
    """The fields beside the file."""

    language: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    stream: bool | None = None
    timestamp_granularities: Annotated[list[Literal["word", "segment"]], msgspec.Meta(max_length=2)] | None = None


class _HeardUsage(msgspec.Struct):
    seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


class _Heard(msgspec.Struct):
    usage: _HeardUsage | None = None
    duration: Annotated[float, msgspec.Meta(ge=0)] | None = None


_speech = msgspec.json.Decoder(SpeechRequest)
_heard = msgspec.json.Decoder(_Heard, strict=False)


def decode_speech(incoming: Incoming) -> Call:
    """Return the decoded request.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    request, ignored = decode_strict(_speech, incoming.body)
    characters = len(request.input)
    needs = (("audio.stream", "stream_format"),) if request.stream_format == "sse" else ()
    request.stream_format = None
    return Call(
        model=request.model,
        request=request,
        text_length=characters,
        output_tokens=0,
        ignored=ignored,
        needs=needs,
        is_passthrough=True,
        meter=Meter(Unit.CHARACTERS, characters, lambda _answer: characters),
    )


def decode_transcription(incoming: Incoming) -> Call:
    """Return the decoded form.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    return _listening(incoming, TranscriptionRequest)


def decode_translation(incoming: Incoming) -> Call:
    """Return the decoded form.

    Raises:
        ApiError: 400 naming what is wrong.
    """
    return _listening(incoming, TranslationRequest)


def _listening(incoming: Incoming, kind: type[TranslationRequest]) -> Call:
    request, given = decode_form(incoming, kind, {"file": True})
    is_stream = isinstance(request, TranscriptionRequest) and bool(request.stream)
    content = given.files["file"][0].content
    most = max(1.0, len(content) / _BYTES_PER_S_MIN)

    def seconds(answer: bytes) -> float:
        told = _told_s(answer)
        return told if told is not None else seconds_of(content)

    return Call(
        model=request.model,
        request=request,
        text_length=len(request.prompt or ""),
        output_tokens=0,
        ignored=given.ignored,
        needs=(("audio.stream", "stream"),) if is_stream else (),
        payload_for=given.payload_for(),
        content_type=given.form.content_type,
        is_passthrough=request.response_format in ("text", "srt", "vtt"),
        meter=Meter(Unit.SECONDS, most, seconds),
    )


def _told_s(answer: bytes) -> float | None:
    """Return the seconds that the engine heard, None when its answer does not tell."""
    try:
        heard = _heard.decode(answer)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return heard.usage.seconds if heard.usage is not None and heard.usage.seconds is not None else heard.duration


def seconds_of(sound: memoryview) -> float:
    """Return the length of a recording: as a WAV's header says, else estimated from its bytes."""
    head = bytes(sound[:_WAV_HEAD])
    estimate = len(sound) / _BYTES_PER_S
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        return estimate
    at, bytes_per_s = 12, 0
    while at + 8 <= len(head):
        length = int.from_bytes(head[at + 4 : at + 8], "little")
        if head[at : at + 4] == b"fmt ":
            bytes_per_s = int.from_bytes(head[at + 16 : at + 20], "little")
        elif head[at : at + 4] == b"data":
            # A header that promises more than there is (streamed files say 4 GiB) counts as what there is.
            return min(length, len(sound) - at - 8) / bytes_per_s if bytes_per_s >= _BYTES_PER_S_MIN else estimate
        at += 8 + length + length % 2
    return estimate
