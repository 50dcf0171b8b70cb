"""What the simulated model says: a request becomes a plan of tokens, before any time passes."""

from typing import NamedTuple

import msgspec

from modelyard.engines.simulated.faults import Faults
from modelyard.engines.simulated.requests import ChatRequest, CompletionRequest, Generate, Refused
from modelyard.engines.simulated.shapes import shape_of
from modelyard.engines.simulated.tokens import repeat_to, split

_EMPTY_ECHO = "ok"


class Token(NamedTuple):
    """One generated token. ``call`` is the tool call that it belongs to, or -1 for text; ``name`` opens that call."""

    data: bytes
    call: int = -1
    name: str = ""


class Choice(NamedTuple):
    """One answer: its tokens and how it ends. ``lead`` is text before the first token (``echo`` of completions)."""

    tokens: list[Token]
    finish: str
    lead: str = ""


def chat_choices(request: ChatRequest, text: str, faults: Faults, *, room: int, by_byte: bool) -> list[Choice]:
    """Return a chat's choices; ``text`` is the last message without directives, ``room`` the context left."""
    tools = request.wanted_tools(text)
    if request.tool_choice not in (None, "none", "auto") and not tools:
        raise Refused(400, "tool_choice names a tool that is not in tools")
    if tools:
        choice = _tool_choice(request, text, room)
    else:
        answer = _formatted(request, text)
        choice = _text_choice(request, answer, faults, room=room, by_byte=by_byte, given=request.given())
    return [choice] * (request.n or 1)


def completion_choices(
    request: CompletionRequest, prompts: list[str], faults: Faults, *, room: int, by_byte: bool
) -> list[Choice]:
    """Return the choices of a completion request: ``n`` for each prompt, in order."""
    found: list[Choice] = []
    for prompt in prompts:
        choice = _text_choice(request, prompt, faults, room=room, by_byte=by_byte)
        found += [choice._replace(lead=prompt if request.echo else "")] * (request.n or 1)
    return found


def _formatted(request: ChatRequest, text: str) -> str:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return text
    if wanted.type == "json_object":
        return msgspec.json.encode({"echo": text}).decode()
    schema = (wanted.json_schema or {}).get("schema", {})
    return msgspec.json.encode(shape_of(schema, text=text)).decode()


def _text_choice(request: Generate, text: str, faults: Faults, *, room: int, by_byte: bool, given: str = "") -> Choice:
    """Return the echo of ``text``, or what is left of it behind the ``given`` beginning."""
    pieces = split(text or _EMPTY_ECHO, by_byte=by_byte)
    before = _beginning(pieces, given.encode("utf-8", "replace"))
    begun = _whole_tokens(pieces, len(before))
    most = begun + _limit(request, room)
    wanted = faults.tokens or max(len(pieces), begun + (request.min_tokens or 0))
    if request.ignore_eos and not faults.tokens:
        wanted = most + 1
    if wanted > len(pieces):
        pieces = repeat_to(pieces, min(wanted, most))
    elif faults.tokens:
        pieces = pieces[:wanted]
    pieces, is_stopped = _until_stop(pieces, request.stops())
    is_cut = len(pieces) > most or (len(pieces) == most and wanted > most and not is_stopped)
    left = _behind(pieces[:most], before)
    return Choice([Token(piece) for piece in left], "length" if is_cut else "stop")


def _beginning(pieces: list[bytes], given: bytes) -> bytes:
    """Return ``given`` if the echo (repeated as often as it takes) begins with it, else nothing."""
    longest = repeat_to(pieces, len(given) + len(pieces))
    return given if b"".join(longest).startswith(given) else b""


def _whole_tokens(pieces: list[bytes], length: int) -> int:
    """Return how many tokens of the repeated echo lie within its first ``length`` bytes."""
    count = 0
    for piece in repeat_to(pieces, length + len(pieces)):
        length -= len(piece)
        if length < 0:
            break
        count += 1
    return count


def _behind(pieces: list[bytes], given: bytes) -> list[bytes]:
    """Return the tokens without the ``given`` bytes that they begin with."""
    left: list[bytes] = []
    position = 0
    for piece in pieces:
        if position + len(piece) > len(given):
            left.append(piece[max(0, len(given) - position) :])
        elif position >= len(given):
            # A token of a stop string, which carries no text.
            left.append(piece)
        position += len(piece)
    return left


def _until_stop(pieces: list[bytes], stops: list[str]) -> tuple[list[bytes], bool]:
    """Return the tokens up to the first stop string; those that spell it are generated, but carry no text."""
    whole = b"".join(pieces)
    found = [(whole.find(stop.encode()), len(stop.encode())) for stop in stops]
    found = [(start, length) for start, length in found if start >= 0]
    if not found:
        return pieces, False
    start, length = min(found)
    kept: list[bytes] = []
    position = 0
    for piece in pieces:
        if position >= start + length:
            break
        kept.append(piece[: max(0, start - position)])
        position += len(piece)
    return kept, True


def _tool_choice(request: ChatRequest, text: str, room: int) -> Choice:
    tokens: list[Token] = []
    for number, tool in enumerate(request.wanted_tools(text)):
        arguments = msgspec.json.encode(shape_of(tool.function.parameters or {"type": "object"}, text=text)).decode()
        tokens.append(Token(b"", number, tool.function.name))
        tokens += [Token(piece, number) for piece in split(arguments)]
    limit = _limit(request, room)
    return Choice(tokens[:limit], "length" if len(tokens) > limit else "tool_calls")


def _limit(request: Generate, room: int) -> int:
    asked = request.length_max()
    return room if asked is None else min(room, asked)
