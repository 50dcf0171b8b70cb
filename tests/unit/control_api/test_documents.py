"""/openapi.json and /docs."""

import re
from typing import Any

from tests.support.management import Management

from modelyard.control.api import declared_routes
from modelyard.control.api.deploy_spec import RESERVED_TAILS, name_faults
from modelyard.web.routes import Empty

METHODS = {"get", "post", "patch", "delete", "put"}


async def document(api: Management) -> dict[str, Any]:
    answer = await api.call(None, "GET", "/openapi.json")
    assert answer.status_code == 200, "public"
    found: dict[str, Any] = answer.json()
    return found


def references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for inner in value.values() for found in references(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in references(inner)]
    return []


async def test_every_route_is_documented(api: Management) -> None:
    paths = (await document(api))["paths"]
    for route in declared_routes(api.context):
        path = route.path.replace(":path}", "}")
        operation = paths[path][route.method.lower()]
        assert operation["summary"]
        assert str(route.status) in operation["responses"]
        assert route.scope in operation["description"]
        if route.method in ("POST", "PATCH") and route.body is not Empty:
            assert "example" in operation["requestBody"]["content"]["application/json"]
    assert {"/v1/chat/completions", "/v1/models", "/healthz"} <= set(paths)


async def test_document_is_structurally_valid(api: Management) -> None:
    found = await document(api)
    assert found["openapi"] == "3.1.0"
    assert {"title", "version"} <= set(found["info"])
    operation_ids: list[str] = []
    for path, methods in found["paths"].items():
        assert path.startswith("/")
        assert set(methods) <= METHODS
        for operation in methods.values():
            operation_ids.append(operation["operationId"])
            assert operation["responses"]
            names = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
            assert names == set(re.findall(r"{(\w+)}", path))
            for parameter in operation["parameters"]:
                assert parameter["in"] in ("path", "query")
                assert isinstance(parameter["required"], bool)
                assert "schema" in parameter
    assert len(operation_ids) == len(set(operation_ids))
    for name in found["components"]["schemas"]:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
    for reference in references(found):
        node: Any = found
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


async def test_examples_are_taken_by_their_own_schema(api: Management) -> None:
    import msgspec

    for route in declared_routes(api.context):
        if route.example is not None:
            msgspec.convert(route.example, route.body)


async def test_docs_page_needs_nothing_from_elsewhere(api: Management) -> None:
    answer = await api.call(None, "GET", "/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "/v1/models/deploy" in answer.text
    assert "<script" not in answer.text
    assert not re.search(r"(src|href)=\"(https?:)?//", answer.text)
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


async def test_no_endpoint_can_be_named_like_a_route_of_another(api: Management) -> None:
    endpoint = "/v1/endpoints/{endpoint:path}/"
    paths = [route.path for route in declared_routes(api.context)]
    verbs = {path.removeprefix(endpoint).split("/")[0] for path in paths if path.startswith(endpoint)}
    assert verbs == {tail.removeprefix("/") for tail in RESERVED_TAILS}
    assert {"why", "canary", "releases"} <= verbs
    for verb in verbs:
        (fault,) = name_faults(f"a/{verb.upper()}")
        assert f"'/{verb}'" in fault.reason
    assert not [*name_faults("a/b")]
