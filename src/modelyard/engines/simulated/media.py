"""Sound, pictures and tensors: small, but real files.

Speech is a WAV whose tone follows from the text, 10 ms a character, with the
text in its comment, so that a transcription of it is the text again. A picture
is a PNG of one colour. Tensors come back as they went in.
"""

import array
import base64
import hashlib
import math
import struct
import zlib
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec

from modelyard.engines.http import Connection, Request
from modelyard.engines.simulated.attempts import Attempts
from modelyard.engines.simulated.faults import cut_directives
from modelyard.engines.simulated.forms import read_form
from modelyard.engines.simulated.requests import Refused, decode
from modelyard.engines.simulated.stream import encode

RATE = 8000
_SAMPLES_PER_CHARACTER = RATE // 100
_SIDE_MAX = 2048
_SIDE = 64


class SpeechRequest(msgspec.Struct):
    """``POST /v1/audio/speech``."""

    input: str
    model: str | None = None
    response_format: str | None = None


class ImageRequest(msgspec.Struct):
    """``POST /v1/images/generations``, and the texts of an edit."""

    prompt: str
    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=10)] | None = None
    size: str | None = None


class Tensor(msgspec.Struct):
    """One tensor; ``data`` may be nested."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class Wanted(msgspec.Struct):
    """An output that is asked for."""

    name: str


class InferRequest(msgspec.Struct):
    """``POST /v2/models/{model}/infer``."""

    inputs: list[Tensor]
    id: str | None = None
    outputs: list[Wanted] | None = None


class Media:
    """The routes."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts

    async def speech(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/audio/speech`` with a WAV, or bare samples for ``pcm``."""
        wanted = decode(request.body, SpeechRequest)
        model = self._attempts.check_model(wanted.model)
        kind = wanted.response_format or "wav"
        if kind not in ("wav", "pcm"):
            raise Refused(400, f"response_format {kind} is not supported, use wav or pcm")
        generation = await self._attempts.compute(request, connection, [wanted.input], model)
        if generation is None:
            return
        text, _ = cut_directives(wanted.input)
        self._attempts.ended(generation, "stop")
        if kind == "pcm":
            connection.respond(200, samples_of(text), f"audio/pcm; rate={RATE}")
        else:
            connection.respond(200, wav_of(text), "audio/wav")

    async def transcribe(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/audio/transcriptions`` and ``/translations``."""
        form = read_form(request)
        model = self._attempts.check_model(form.texts.get("model"))
        if "file" not in form.files:
            raise Refused(400, "the form has no file")
        text, seconds = heard_in(form.files["file"])
        generation = await self._attempts.compute(request, connection, [text], model)
        if generation is None:
            return
        text, _ = cut_directives(text)
        self._attempts.ended(generation, "stop")
        kind = form.texts.get("response_format", "json")
        body, content_type = transcript(kind, text, seconds, language=form.texts.get("language", "english"))
        connection.respond(200, body, content_type)

    async def generate_images(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/images/generations``."""
        await self._draw(request, connection, decode(request.body, ImageRequest), b"")

    async def edit_images(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/images/edits``: the colour follows from the given picture too."""
        form = read_form(request)
        given = form.files.get("image") or form.files.get("image[]")
        if given is None:
            raise Refused(400, "the form has no image")
        try:
            wanted = msgspec.convert(form.texts, ImageRequest, strict=False)
        except msgspec.ValidationError as error:
            raise Refused(400, str(error)) from error
        await self._draw(request, connection, wanted, given)

    async def infer(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v2/models/{model}/infer``: each output is the input of its name."""
        model = self._attempts.check_model(unquote(request.path.removeprefix("/v2/models/").removesuffix("/infer")))
        wanted = decode(request.body, InferRequest)
        for tensor in wanted.inputs:
            if _elements(tensor.data) != math.prod(tensor.shape):
                raise Refused(400, f"input '{tensor.name}' does not have as many elements as its shape says")
        names = [output.name for output in wanted.outputs or []] or [tensor.name for tensor in wanted.inputs]
        known = {tensor.name: tensor for tensor in wanted.inputs}
        if missing := [name for name in names if name not in known]:
            raise Refused(400, f"there is no output '{missing[0]}'")
        texts = [str(item) for tensor in wanted.inputs if tensor.datatype == "BYTES" for item in tensor.data]
        generation = await self._attempts.compute(request, connection, texts, model)
        if generation is None:
            return
        self._attempts.ended(generation, "stop")
        body: dict[str, Any] = {"model_name": model, "model_version": "1"}
        if wanted.id is not None:
            body["id"] = wanted.id
        connection.respond(200, encode({**body, "outputs": [msgspec.to_builtins(known[name]) for name in names]}))

    async def _draw(self, request: Request, connection: Connection, wanted: ImageRequest, given: bytes) -> None:
        model = self._attempts.check_model(wanted.model)
        width, height = _size(wanted.size)
        generation = await self._attempts.compute(request, connection, [wanted.prompt], model)
        if generation is None:
            return
        self._attempts.ended(generation, "stop")
        pictures = [png_of(given + f"{i}{wanted.prompt}".encode(), width, height) for i in range(wanted.n or 1)]
        created = int(self._attempts.accelerator.clock.unix_s())
        data = [{"b64_json": base64.b64encode(picture).decode()} for picture in pictures]
        connection.respond(200, encode({"created": created, "data": data}))


def samples_of(text: str) -> bytes:
    """Return the tone of ``text``: 16 bit, mono, little-endian."""
    period = 20 + hashlib.sha256(text.encode("utf-8", "replace")).digest()[0] % 40
    wave = array.array("h", [round(8000 * math.sin(2 * math.pi * i / period)) for i in range(period)])
    needed = len(text) * _SAMPLES_PER_CHARACTER
    return (wave.tobytes() * (needed // period + 1))[: needed * 2]


def wav_of(text: str) -> bytes:
    """Return ``samples_of`` as a WAV file with the text as its comment."""
    comment = text.encode("utf-8", "replace") + b"\0"
    info = b"INFO" + _chunk(b"ICMT", comment)
    form = struct.pack("<HHIIHH", 1, 1, RATE, RATE * 2, 2, 16)
    body = b"WAVE" + _chunk(b"fmt ", form) + _chunk(b"LIST", info) + _chunk(b"data", samples_of(text))
    return b"RIFF" + struct.pack("<I", len(body)) + body


def heard_in(sound: bytes) -> tuple[str, float]:
    """Return the text in a WAV's comment (else a description) and its seconds.

    Raises:
        Refused: it is no WAV.
    """
    if sound[:4] != b"RIFF" or sound[8:12] != b"WAVE":
        raise Refused(400, "the file is no WAV, the only format that this engine reads")
    text, seconds, rate, at = "", 0.0, RATE * 2, 12
    while at + 8 <= len(sound):
        name, length = sound[at : at + 4], int.from_bytes(sound[at + 4 : at + 8], "little")
        content = sound[at + 8 : at + 8 + length]
        if name == b"fmt ":
            rate = int.from_bytes(content[8:12], "little") or rate
        elif name == b"LIST" and content[:8] == b"INFOICMT":
            text = content[12:].split(b"\0")[0].decode("utf-8", "replace")
        elif name == b"data":
            seconds = len(content) / rate
        at += 8 + length + length % 2
    return text or f"A recording of {seconds:.2f} seconds.", seconds


def transcript(kind: str, text: str, seconds: float, *, language: str) -> tuple[bytes, str]:
    """Return the body and its content type.

    Raises:
        Refused: an unknown kind.
    """
    end = f"{int(seconds // 3600):02}:{int(seconds // 60 % 60):02}:{int(seconds % 60):02}"
    part = f"{int(seconds % 1 * 1000):03}"
    usage = {"type": "duration", "seconds": math.ceil(seconds)}
    match kind:
        case "json":
            return encode({"text": text, "usage": usage}), "application/json"
        case "verbose_json":
            segment = {"id": 0, "seek": 0, "start": 0.0, "end": seconds, "text": text, "tokens": [], "temperature": 0.0}
            segment |= {"avg_logprob": 0.0, "compression_ratio": 1.0, "no_speech_prob": 0.0}
            head = {"task": "transcribe", "language": language, "duration": seconds, "text": text}
            return encode({**head, "segments": [segment], "usage": usage}), "application/json"
        case "text":
            return text.encode() + b"\n", "text/plain; charset=utf-8"
        case "srt":
            return f"1\n00:00:00,000 --> {end},{part}\n{text}\n".encode(), "text/plain; charset=utf-8"
        case "vtt":
            return f"WEBVTT\n\n00:00:00.000 --> {end}.{part}\n{text}\n".encode(), "text/vtt; charset=utf-8"
        case _:
            raise Refused(400, f"response_format {kind} is not supported")


def png_of(seed: bytes, width: int, height: int) -> bytes:
    """Return a PNG of one colour that follows from ``seed``."""
    colour = hashlib.sha256(seed).digest()[:3]
    rows = (b"\0" + colour * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def _size(size: str | None) -> tuple[int, int]:
    if size in (None, "auto"):
        return _SIDE, _SIDE
    width, _, height = str(size).partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) <= _SIDE_MAX and 0 < int(height) <= _SIDE_MAX):
        raise Refused(400, f"size must be like 256x256, and at most {_SIDE_MAX} on each side")
    return int(width), int(height)


def _elements(data: list[Any]) -> int:
    return sum(_elements(item) if isinstance(item, list) else 1 for item in data)
