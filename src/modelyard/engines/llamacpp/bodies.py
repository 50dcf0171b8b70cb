"""What the front changes in a request before llama.cpp sees it: which adapter, which slot, and whether it may read."""

from typing import Any

import msgspec

from modelyard.engines.llamacpp.slots import BASE, Grant

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_read_any = msgspec.json.decode
_OURS = ("lora", "id_slot", "slot_id", "n_cmpl")
"""Fields that say what the front says; a caller's own would leave the slot that it was given."""
_PROMPT_FIELDS = ("messages", "prompt")

Body = dict[str, msgspec.Raw]


class BodyError(ValueError):
    """A request that cannot be passed on; ``param`` is the field to blame."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def read_body(raw: bytes) -> Body:
    """Return the fields of a request.

    Raises:
        BodyError: it is no JSON object, or asks for several answers at once, which would leave their slot.
    """
    try:
        body = _decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise BodyError("The body is no JSON object.", "") from None
    if "n" in body and _value(body, "n") not in (None, 1):
        raise BodyError("'n' must be 1: a request beside adapters has one slot, and so one answer.", "n")
    for name in _OURS:
        body.pop(name, None)
    return body


def model_of(body: Body) -> str | None:
    """Return the model that a request names, None when it names none.

    Raises:
        BodyError: it is no text.
    """
    value = _value(body, "model")
    if value is not None and not isinstance(value, str):
        raise BodyError("'model' must be a text.", "model")
    return value


def prompt_of(body: Body) -> bytes:
    """Return what begins alike where prompts do."""
    return next((bytes(body[name]) for name in _PROMPT_FIELDS if name in body), b"")


def written(body: Body, grant: Grant, *, adapter: int | None, has_adapters: bool) -> bytes:
    """Return the request for llama.cpp, on the slot of ``grant`` with ``adapter`` (None: the base).

    The base says scale 0 in words where there are adapters: with an empty list llama.cpp does not compare at all.
    """
    more: dict[str, Any] = {"id_slot": grant.slot}
    if has_adapters:
        more["lora"] = [{"id": 0, "scale": 0.0}] if adapter is None else [{"id": adapter, "scale": 1.0}]
    if not grant.may_read:
        more["cache_prompt"] = False
    return _encode({**body, **more})


def owner_of(model: str | None, base: str) -> str:
    """Return who owns the slot of a request for ``model``."""
    return BASE if model in (None, base) else str(model)


def _value(body: Body, name: str) -> object:
    raw = body.get(name)
    return None if raw is None else _read_any(raw)
