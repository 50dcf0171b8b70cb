"""The smallest JSON value that a JSON Schema accepts, for ``response_format`` and tool arguments.

It covers what tool and answer schemas use (objects, arrays, enums, unions,
local references, bounds, formats); ``pattern`` is not followed.
"""

from collections.abc import Mapping
from typing import Any

_DEPTH_MAX = 24
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
}

Schema = Mapping[str, Any]


def shape_of(schema: Any, *, text: str, root: Schema | None = None, depth: int = 0) -> Any:
    """Return a value for ``schema``; free strings are ``text``."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return {} if depth <= _DEPTH_MAX else None
    root = schema if root is None else root
    if "$ref" in schema:
        return shape_of(_referred(root, str(schema["$ref"])), text=text, root=root, depth=depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return shape_of(schema[union][0], text=text, root=root, depth=depth + 1)
    if schema.get("allOf"):
        parts = [shape_of(part, text=text, root=root, depth=depth + 1) for part in schema["allOf"]]
        objects = [part for part in parts if isinstance(part, dict)]
        return {key: value for part in objects for key, value in part.items()} if objects else parts[0]
    return _typed(schema, text=text, root=root, depth=depth)


def _typed(schema: Schema, *, text: str, root: Schema, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0] if kind else "null"
    if kind == "object":
        properties = schema.get("properties", {})
        required = schema.get("required", list(properties))
        return {
            name: shape_of(properties.get(name, {"type": "string"}), text=text, root=root, depth=depth + 1)
            for name in required
        }
    if kind == "array":
        length = max(1, int(schema.get("minItems", 1)))
        item = shape_of(schema.get("items", {"type": "string"}), text=text, root=root, depth=depth + 1)
        return [item] * min(length, 1000)
    if kind == "string":
        return _string(schema, text)
    if kind in ("integer", "number"):
        return _number(schema, whole=kind == "integer")
    return True if kind == "boolean" else None


def _string(schema: Schema, text: str) -> str:
    value = _FORMATS.get(str(schema.get("format", "")), text)
    shortest = int(schema.get("minLength", 0))
    if len(value) < shortest:
        value = value + "x" * (min(shortest, 100_000) - len(value))
    longest = schema.get("maxLength")
    return value if longest is None else value[: int(longest)]


def _number(schema: Schema, *, whole: bool) -> int | float:
    value: float = schema.get("minimum", 0)
    if "exclusiveMinimum" in schema:
        value = schema["exclusiveMinimum"] + (1 if whole else 0.5)
    highest = schema.get("maximum")
    if highest is not None and value > highest:
        value = highest
    step = schema.get("multipleOf")
    if step:
        value = step * -(-value // step)
    return int(value) if whole else value


def _referred(root: Schema, reference: str) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        if not step:
            continue
        if not isinstance(found, Mapping):
            return {}
        found = found.get(step.replace("~1", "/").replace("~0", "~"), {})
    return found
