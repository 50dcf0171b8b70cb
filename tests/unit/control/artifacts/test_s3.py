"""What a strange object store answers, and what a strange key asks for; a real one is in tests/conformance."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.artifacts import HERE, accept, ignore, open_store
from tests.support.origin import Origin, origin

from modelyard.config import FetchConfig, S3Config
from modelyard.control.artifacts import ArtifactError, ArtifactStore
from modelyard.control.artifacts.sources.s3 import bucket_and_key, is_shared
from modelyard.domain.catalog import Artifact

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@pytest.fixture
def objects() -> Iterator[Origin]:
    with origin() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path, objects: Origin) -> ArtifactStore:
    keys = S3Config(endpoint=f"{objects.url}/", access_key="id", secret_key="the-secret", session_token="the-token")
    return open_store(tmp_path, FetchConfig(private_networks=HERE, s3=keys))


def entries(*keys: str) -> str:
    return "".join(f"<Contents><Key>{key}</Key><Size>3</Size><ETag>&quot;e&quot;</ETag></Contents>" for key in keys)


async def got(store: ArtifactStore, uri: str) -> Artifact:
    return await store.fetch(Artifact(uri), accept, ignore)


async def test_list_goes_on_page_by_page(store: ArtifactStore, objects: Origin) -> None:
    first = f"<L {NAMESPACE}>{entries('m/a.safetensors')}<NextContinuationToken>a+/=b</NextContinuationToken></L>"
    objects.put("/bucket?list-type=2&prefix=m%2F", first.encode())
    second = f"<L {NAMESPACE}>{entries('m/config.json', 'm/evil.py', 'm/../x.json', 'elsewhere/c.json')}</L>"
    objects.put("/bucket?continuation-token=a%2B%2F%3Db&list-type=2&prefix=m%2F", second.encode())
    for key in ("a.safetensors", "config.json"):
        objects.put(f"/bucket/m/{key}", key[:3].encode(), etag='"e"')
    artifact = await got(store, "s3://bucket/m/")
    assert [file.path for file in artifact.files] == ["a.safetensors", "config.json"]
    assert all("x-amz-security-token" in seen.headers for seen in objects.seen)


@pytest.mark.parametrize(
    "page",
    [
        b"not xml",
        b"<a>",
        b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>',
        b'<?xml version="1.0"?><!DOCTYPE lolz SYSTEM "file:///etc/passwd"><x/>',
        b"<ListBucketResult/>",
    ],
)
async def test_nonsense_is_an_error(store: ArtifactStore, objects: Origin, page: bytes) -> None:
    objects.put("/bucket", page)
    with pytest.raises(ArtifactError):
        await got(store, "s3://bucket/model/")


async def test_redirect_is_not_followed_with_a_signature(store: ArtifactStore, objects: Origin) -> None:
    objects.put("/bucket/key.gguf", b"", redirect=f"{objects.url}/elsewhere")
    with pytest.raises(ArtifactError, match="answers 302"):
        await got(store, "s3://bucket/key.gguf")
    assert [seen.path for seen in objects.seen] == ["/bucket/key.gguf"]
    (seen,) = objects.seen
    assert "Credential=id/" in seen.headers["authorization"]
    assert "the-secret" not in str(seen.headers)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3://b/key",
        "s3://Bucket/key",
        "s3://../key",
        "s3://bucket/a/../b",
        "s3://bucket/./b",
        "s3://bucket//b",
        "s3://bucket/a\nb",
        "s3://user:pw@host/key",
        f"s3://bucket/{'a' * 1025}",
    ],
)
def test_what_names_no_object_is_refused(uri: str) -> None:
    with pytest.raises(ArtifactError):
        bucket_and_key(uri)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://models/public/a.gguf", True),
        ("s3://models/public/llama/", True),
        ("s3://open/a.gguf", True),
        ("s3://models/publicity/a.gguf", False),
        ("s3://models/private/a.gguf", False),
        ("s3://models-2/public/a.gguf", False),
    ],
)
def test_shared_prefix_ends_at_a_slash(uri: str, *, expected: bool) -> None:
    assert is_shared(uri, ("models/public", "s3://open/")) is expected


def test_secrets_are_in_no_representation() -> None:
    config = FetchConfig(hf_token="hub-secret", s3=S3Config(access_key="id", secret_key="the-secret"))
    assert "secret" not in repr(config)
