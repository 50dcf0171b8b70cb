"""A readable page of the OpenAPI document: plain HTML, no script, nothing from elsewhere."""

import base64
import hashlib
from typing import Any

import msgspec
from starlette.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d8dbe2, #3a3f4b); --soft: light-dark(#f4f5f8, #1d2027); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1.5rem; }
code, pre { font: .875rem/1.5 ui-monospace, monospace; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; overflow-x: auto; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .5rem .75rem; }
summary { cursor: pointer; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


def docs_page(document: dict[str, Any]) -> HTMLResponse:
    """Return the page for ``document``."""
    import jinja2

    pages = jinja2.Environment(autoescape=True, loader=jinja2.PackageLoader("modelyard.web"))
    text = pages.get_template("docs.html").render(info=document["info"], groups=_groups(document), style=_STYLE)
    return HTMLResponse(text, headers=_HEADERS)


def _groups(document: dict[str, Any]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            example = content.get("example")
            shown = msgspec.json.format(msgspec.json.encode(example), indent=2).decode() if example else ""
            body = _fields(document, content.get("schema", {}))
            groups.setdefault(operation["tags"][0], []).append((method.upper(), path, operation, body, shown))
    return sorted(groups.items())


def _fields(document: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, str, bool]]:
    name = schema.get("$ref", "").rpartition("/")[2]
    struct = document["components"]["schemas"].get(name, {})
    required = struct.get("required", [])
    return [
        (field, shape.get("description", ""), field in required)
        for field, shape in struct.get("properties", {}).items()
    ]
