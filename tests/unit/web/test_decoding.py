"""Bodies and query strings become structs, or a 400 that names the parameter."""

import subprocess
import sys
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.errors import ApiError
from modelyard.web.decoding import decode, decode_query


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1)]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    options: dict[str, str | int | float | bool] = {}
    kind: Literal["a", "b"] = "a"


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    follow: bool = False
    name: str = ""
    ids: tuple[str, ...] = ()
    kinds: Annotated[tuple[str, ...], msgspec.Meta(description="Kinds.")] = ()


DECODER = msgspec.json.Decoder(Body)


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(DECODER, body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"{}", "name", "missing_required_parameter"),
        (b'{"name": 1}', "name", "invalid_type"),
        (b'{"name": null}', "name", "invalid_type"),
        (b'{"name": "x", "inner": {}}', "inner.count", "missing_required_parameter"),
        (b'{"name": "x", "inner": {"count": "1"}}', "inner.count", "invalid_type"),
        (b'{"name": "x", "inner": {"count": 0}}', "inner.count", "invalid_value"),
        (b'{"name": "x", "many": [{"count": 1}, {"count": 1.5}]}', "many[1].count", "invalid_type"),
        (b'{"name": "x", "many": [{"count": 1, "z": 2}]}', "many[0].z", "unsupported_parameter"),
        (b'{"name": "x", "nope": 1}', "nope", "unsupported_parameter"),
        (b'{"name": "x", "options": {"a": []}}', "options", "invalid_type"),
        (b'{"name": "x", "options": {"a": 1e999}}', "options", "invalid_value"),
        (b'{"name": "x", "kind": "c"}', "kind", "invalid_value"),
        (b"[]", None, "invalid_type"),
        (b"null", None, "invalid_type"),
        (b"", None, "invalid_json"),
        (b"{", None, "invalid_json"),
        (b'{"name": NaN}', None, "invalid_json"),
        (b'{"name": "\xff"}', None, "invalid_json"),
        (b'{"name": "\\ud800"}', None, "invalid_json"),
        (b"\xef\xbb\xbf{}", None, "invalid_json"),
        (b'{"name": "x"} trailing', None, "invalid_json"),
        (b'{"name":' + b"[" * 5000, "name", "invalid_type"),
        (b'{"nope":' + b"[" * 500_000 + b"]" * 500_000 + b"}", "nope", "unsupported_parameter"),
    ],
)
def test_refusal_names_the_parameter(body: bytes, param: str | None, code: str) -> None:
    error = refusal(body)
    assert (error.param, error.code) == (param, code)


def test_deep_nesting_is_refused_where_anything_may_nest() -> None:
    with pytest.raises(ApiError) as caught:
        decode(msgspec.json.Decoder(), b"[" * 5000 + b"]" * 5000)
    assert caught.value.code == "invalid_json"
    assert "deeply" in caught.value.message


def test_long_names_of_the_caller_are_not_echoed_whole() -> None:
    error = refusal(b'{"name": "x", "' + b"n" * 100_000 + b'": 1}')
    assert len(error.message) < 500
    assert len(error.param or "") <= 120


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_a_400(body: bytes) -> None:
    refused: ApiError | None = None
    try:
        decode(DECODER, body)
    except ApiError as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        assert msgspec.json.decode(refused.body())


def test_an_error_about_the_whole_body_names_no_parameter() -> None:
    assert refusal(b"[]").param is None


def test_query_is_read_from_text() -> None:
    assert decode_query(Query, b"limit=5&follow=true&name=a%20b%2Fc") == Query(5, True, "a b/c")
    assert decode_query(Query, b"") == Query()


@pytest.mark.parametrize(
    "query", [b"ids=a&ids=b", b"ids[]=a&ids[]=b", b"ids%5B%5D=a&ids=b", b"ids=a,b", b"ids=a,&ids[]=b"]
)
def test_a_list_is_given_many_times_or_with_commas(query: bytes) -> None:
    assert decode_query(Query, query) == Query(ids=("a", "b"))
    assert decode_query(Query, query.replace(b"ids", b"kinds") + b"&limit=3") == Query(3, kinds=("a", "b"))
    assert decode_query(Query, b"ids=") == Query()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (b"limit=0", "limit"),
        (b"limit=x", "limit"),
        (b"limit=", "limit"),
        (b"follow=maybe", "follow"),
        (b"nope=1", "nope"),
        (b"limit=1&limit=2", "limit"),
        (b"name[]=x", "name[]"),
        (b"name=%ff", "query"),
        (b"name=\xff", "query"),
        (b"&".join(b"a%d=1" % n for n in range(1000)), "query"),
    ],
)
def test_bad_query_names_the_parameter(query: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_query(Query, query)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_gateway_gets_decoding_without_starlette() -> None:
    program = "import sys, modelyard.web.decoding; sys.exit('starlette' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
