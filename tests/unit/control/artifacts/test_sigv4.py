"""Signatures are those of AWS's own examples (S3 reference, "Authenticating Requests"; the Signature V4 test suite)."""

from datetime import UTC, datetime

from modelyard.control.artifacts.sources.sigv4 import Keys, canonical_query, signed

KEYS = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
SUITE = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
HOST = "https://examplebucket.s3.amazonaws.com"
AT_S = datetime(2013, 5, 24, tzinfo=UTC).timestamp()
SUITE_AT_S = datetime(2015, 8, 30, 12, 36, tzinfo=UTC).timestamp()


def signature(url: str, headers: dict[str, str]) -> str:
    return signed(KEYS, url, headers, region="us-east-1", at_s=AT_S)["authorization"].rpartition("=")[2]


def suite(path: str) -> str:
    url = f"https://example.amazonaws.com{path}"
    added = signed(SUITE, url, {}, region="us-east-1", at_s=SUITE_AT_S, service="service")
    return added["authorization"].rpartition("=")[2]


def test_get_of_a_range() -> None:
    expected = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    assert signature(f"{HOST}/test.txt", {"Range": "bytes=0-9"}) == expected


def test_get_of_a_subresource() -> None:
    assert signature(f"{HOST}/?lifecycle", {}) == "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"


def test_list_of_objects() -> None:
    expected = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    assert signature(f"{HOST}/?max-keys=2&prefix=J", {}) == expected


def test_the_suites_plainest_get() -> None:
    assert suite("/") == "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"


def test_the_suites_queries_out_of_order() -> None:
    expected = "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"
    assert suite("/?Param2=value2&Param1=value1") == expected


def test_the_suites_unreserved_characters_and_utf8() -> None:
    unreserved = "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert suite(f"/{unreserved}") == "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"
    assert suite("/%E1%88%B4") == "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"


def test_query_is_quoted_once_and_sorted() -> None:
    assert canonical_query("prefix=a%2Fb%20c&list-type=2") == "list-type=2&prefix=a%2Fb%20c"


def test_session_token_is_signed_and_nothing_shows_a_secret() -> None:
    keys = Keys("A", "the-secret", "the-token")
    added = signed(keys, f"{HOST}/x", {}, region="eu-west-1", at_s=AT_S)
    assert added["x-amz-security-token"] == "the-token"
    assert "x-amz-security-token" in added["authorization"]
    assert "the-secret" not in repr(keys) + str(added)
