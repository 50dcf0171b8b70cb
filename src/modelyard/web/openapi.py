"""OpenAPI 3.1 from declared routes.

The schemas come from the very structs that decode and encode, so the
document cannot say anything else than the server does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from modelyard.errors import ErrorBody
from modelyard.web.routes import JSON, AnyRoute, Empty

Json = dict[str, Any]

_PATH_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_FORM = "multipart/form-data"
_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A route that somebody else serves under the same address: listed, without its schemas."""

    method: str
    path: str
    summary: str
    description: str = ""
    is_public: bool = False


def document(routes: Sequence[AnyRoute], *, title: str, version: str, foreign: Iterable[Foreign] = ()) -> Json:
    """Return the OpenAPI document."""
    structs = _structs(routes)
    schemas, components = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
    schema_of = dict(zip(structs, schemas, strict=True))
    paths: dict[str, Json] = {}
    for other in foreign:
        paths.setdefault(_plain(other.path), {})[other.method.lower()] = _foreign(other)
    for route in routes:
        paths.setdefault(_plain(route.path), {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "security": [{"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer", "description": "An API key: my_…"},
            },
            "responses": {
                "Error": {
                    "description": "A refusal or failure.",
                    "content": {JSON: {"schema": schema_of[ErrorBody]}},
                }
            },
        },
    }


def _structs(routes: Sequence[AnyRoute]) -> list[Any]:
    found: dict[Any, None] = {ErrorBody: None}
    for route in routes:
        for struct in (route.body, route.answer, route.form):
            if struct not in (None, Empty, str):
                found[struct] = None
    return list(found)


def _operation(route: AnyRoute, schema_of: Mapping[Any, Json]) -> Json:
    operation = _described(route.method, route.path, route.summary)
    operation["description"] = f"Needs the scope `{route.scope}`."
    operation["parameters"] += _query_parameters(route.query)
    schema = {"type": "string"} if route.answer is str else schema_of[route.answer]
    operation["responses"] = {
        str(route.status): {"description": "Done.", "content": {route.media_type: {"schema": schema}}},
        "default": {"$ref": "#/components/responses/Error"},
    }
    if route.body is not Empty:
        content: Json = {"schema": schema_of[route.body]}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {_FORM: {"schema": schema_of[route.form]}}}
    return operation


def _foreign(other: Foreign) -> Json:
    operation = _described(other.method, other.path, other.summary)
    if other.description:
        operation["description"] = other.description
    operation["responses"] = {
        "200": {"description": "Done."},
        "default": {"$ref": "#/components/responses/Error"},
    }
    if other.is_public:
        operation["security"] = []
    if other.method == "POST":
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": {"type": "object"}}}}
    return operation


def _described(method: str, path: str, summary: str) -> Json:
    words = re.findall(r"[A-Za-z0-9]+", _plain(path))
    return {
        "operationId": "_".join([method.lower(), *words]),
        "summary": summary,
        "tags": [words[1] if words[0] == "v1" and len(words) > 1 else words[0]],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in _PATH_PARAMETER.findall(path)
        ],
    }


def _query_parameters(query: type) -> list[Json]:
    root = msgspec.json.schema(query)
    struct = root["$defs"][query.__name__]
    found = []
    for name, schema in struct["properties"].items():
        shape = dict(schema)
        text = shape.pop("description", "")
        parameter: Json = {"name": name, "in": "query", "required": name in struct["required"], "schema": shape}
        if text:
            parameter["description"] = text
        found.append(parameter)
    return found


def _plain(path: str) -> str:
    return _PATH_PARAMETER.sub(r"{\1}", path)
