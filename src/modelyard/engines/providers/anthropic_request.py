"""From a chat of OpenAI's to a message request of Anthropic's.

Instructions move to ``system``, answers of tools into the user's next turn,
and turns of one side become one, as that API wants it. What it has no word for
and what only steers sampling (``seed``, penalties, ``logit_bias``,
``reasoning_effort``; ``temperature`` and ``top_p`` unless the model takes them)
is left out; what would be missed (``logprobs``, several
choices, sound) is refused.
"""

from typing import Any

import msgspec

from modelyard.engines.providers.dialect import Json, Refused, decode_any

MAX_TOKENS_DEFAULT = 4096
"""The API wants a limit; the gateway always gives one, so this is for others."""
_JSON_ONLY = "Answer with one JSON object and nothing else."
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def messages_body(body: Json, model: str, *, has_sampling: bool = False) -> Json:
    """Return the request for a chat; ``has_sampling``: the model takes a temperature.

    Raises:
        Refused: it asks for what the API cannot do.
    """
    if body.get("logprobs"):
        raise Refused(400, "Anthropic's API gives no logprobs; leave 'logprobs' out.", param="logprobs")
    if (body.get("n") or 1) != 1:
        raise Refused(400, "Anthropic's API gives one choice a request; leave 'n' out.", param="n")
    system, messages = _turns(_list_of(body, "messages"))
    sent: Json = {
        "model": model,
        "max_tokens": body.get("max_tokens") or MAX_TOKENS_DEFAULT,
        "messages": messages,
    }
    _add_format(sent, system, body.get("response_format"))
    if system:
        sent["system"] = "\n\n".join(system)
    if body.get("stream"):
        sent["stream"] = True
    stop = body.get("stop")
    if stop:
        sent["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if has_sampling:
        _add_sampling(sent, body)
    _add_tools(sent, body)
    return sent


def _add_sampling(sent: Json, body: Json) -> None:
    if body.get("temperature") is not None:
        sent["temperature"] = min(1.0, body["temperature"])  # OpenAI's goes to 2
    elif body.get("top_p") is not None:
        sent["top_p"] = body["top_p"]  # newer models take one of the two


def _add_format(sent: Json, system: list[str], wanted: Json | None) -> None:
    kind = (wanted or {}).get("type", "text")
    if kind == "json_schema" and wanted is not None:
        schema = wanted.get("json_schema", {}).get("schema")
        if not isinstance(schema, dict):
            raise Refused(400, "The response format has no schema.", param="response_format.json_schema.schema")
        sent["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    elif kind == "json_object":
        system.append(_JSON_ONLY)  # the API has no mode for JSON without a schema


def _add_tools(sent: Json, body: Json) -> None:
    tools = body.get("tools")
    if not tools:
        return
    sent["tools"] = [_tool(one.get("function") or {}) for one in tools]
    choice = body.get("tool_choice")
    wanted: Json | None = None
    match choice:
        case "none" | "auto":
            wanted = {"type": choice}
        case "required":
            wanted = {"type": "any"}
        case {"function": {"name": str(name)}}:
            wanted = {"type": "tool", "name": name}
        case _:
            pass
    if body.get("parallel_tool_calls") is False and choice != "none":
        wanted = {**(wanted or {"type": "auto"}), "disable_parallel_tool_use": True}
    if wanted is not None:
        sent["tool_choice"] = wanted


def _tool(function: Json) -> Json:
    tool: Json = {
        "name": function.get("name", ""),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    if function.get("description"):
        tool["description"] = function["description"]
    if function.get("strict"):
        tool["strict"] = True
    return tool


def _turns(messages: list[Json]) -> tuple[list[str], list[Json]]:
    """Return the instructions, and the turns of user and assistant by turns."""
    system: list[str] = []
    turns: list[Json] = []
    for at, message in enumerate(messages):
        match message.get("role"):
            case "system" | "developer":
                if text := _text_of(message.get("content")):
                    system.append(text)
                continue
            case "assistant":
                role, blocks = "assistant", _assistant(message)
            case "tool":
                role, blocks = "user", [_tool_result(message)]
            case "user":
                role, blocks = "user", _blocks(message.get("content"), at)
            case role:
                raise Refused(400, f"Anthropic's API has no role '{role}'.", param=f"messages.{at}.role")
        if not blocks:
            continue  # empty text is refused there
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    if not turns:
        raise Refused(400, "Anthropic's API wants a message besides instructions.", param="messages")
    _strip_end(turns[-1])
    return system, turns


def _strip_end(last: Json) -> None:
    """Take blanks off the end of an answer that is to be continued: that API refuses them."""
    if last["role"] == "assistant" and last["content"][-1]["type"] == "text":
        last["content"][-1]["text"] = last["content"][-1]["text"].rstrip()


def _assistant(message: Json) -> list[Json]:
    text = _text_of(message.get("content")) or message.get("refusal") or ""
    blocks: list[Json] = [{"type": "text", "text": text}] if text.strip() else []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        blocks.append(
            {
                "type": "tool_use",
                "id": call.get("id", ""),
                "name": function.get("name", ""),
                "input": _arguments(function.get("arguments")),
            }
        )
    return blocks


def _arguments(text: object) -> Json:
    try:
        found = decode_any(text) if isinstance(text, str) and text.strip() else {}
    except (msgspec.MsgspecError, RecursionError):
        found = {}
    # What a model wrote in an earlier turn need not be JSON; the API takes objects only.
    return found if isinstance(found, dict) else {"value": found}


def _tool_result(message: Json) -> Json:
    return {
        "type": "tool_result",
        "tool_use_id": message.get("tool_call_id", ""),
        "content": _text_of(message.get("content")),
    }


def _blocks(content: object, at: int) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content.strip() else []
    blocks: list[Json] = []
    for place, part in enumerate(content if isinstance(content, list) else []):
        match part:
            case {"type": "text", "text": str(text)}:
                if text.strip():
                    blocks.append({"type": "text", "text": text})
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                blocks.append(_image(url, f"messages.{at}.content.{place}.image_url.url"))
            case _:
                kind = part.get("type") if isinstance(part, dict) else None
                where = f"messages.{at}.content.{place}"
                raise Refused(400, f"Anthropic's API takes text and pictures, no '{kind}'.", param=where)
    return blocks


def _image(url: str, where: str) -> Json:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    head, _, data = url.removeprefix("data:").partition(",")
    media_type, *rest = head.split(";")
    if media_type not in _IMAGE_TYPES or "base64" not in rest:
        raise Refused(400, f"Give the picture as base64 of {', '.join(_IMAGE_TYPES)}.", param=where)
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else []
    return "".join(str(one.get("text") or one.get("refusal") or "") for one in parts if isinstance(one, dict))


def _list_of(body: Json, name: str) -> list[Json]:
    found = body.get(name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Refused(400, f"'{name}' must be a list of objects.", param=name)
    return found
