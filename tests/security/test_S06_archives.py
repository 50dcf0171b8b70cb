"""S6, S7: what is an archive, a pickle or a program is no artifact, whatever it is called and wherever it is from."""

import io
import pickle
import tarfile
import zipfile
from collections.abc import Iterator

import pytest
from tests.support.hub import put_model, put_package, wheel_of
from tests.support.origin import Origin, origin
from tests.support.refusals import post
from tests.support.waiting import eventually
from tests.support.yard import Yard


def zip_of(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, content)
    return made.getvalue()


def tar_of(mode: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]
        for name, kind in (("../evil", tarfile.REGTYPE), ("link", tarfile.SYMTYPE), ("dev", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc" if kind == tarfile.SYMTYPE else ""
            archive.addfile(member)
    return made.getvalue()


FOREIGN = {
    "zip": zip_of("../../evil", b"x"),
    "tar": tar_of("w"),
    "tar.gz": tar_of("w:gz"),
    "tar.xz": tar_of("w:xz"),
    "pickle-4": pickle.dumps({"a": [1]}, 4),
    "pickle-2": pickle.dumps({"a": [1]}, 2),
    "pickle-0": b"cos\nsystem\n(S'touch /tmp/evil'\ntR.",
    "pickle-0-dict": pickle.dumps({"a": [1]}, 0),
    "program": b"\x7fELF" + bytes(100),
    "script": b"#!/bin/sh\ntouch /tmp/evil\n",
    "page": b"<!DOCTYPE html><html>",
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}


@pytest.fixture(scope="module")
def web() -> Iterator[Origin]:
    with origin() as running:
        yield running


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, web: Origin) -> Iterator[Yard]:
    settings = {
        "fetch.private_networks": "127.0.0.1/32",
        "fetch.hf_endpoint": web.url,
        "fetch.pypi_index": f"{web.url}/simple",
    }
    with Yard(tmp_path_factory.mktemp("yard"), settings) as running:
        yield running


def stored(yard: Yard) -> list[str]:
    return [path.name for path in (yard.data / "artifacts" / "sha256").glob("*")]


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("scheme", ["https", "hf", "file"])
def test_what_is_no_model_is_refused_at_once(yard: Yard, web: Origin, scheme: str, kind: str) -> None:
    if scheme == "https":
        web.put("/model.safetensors", FOREIGN[kind])
        artifact = f"{web.url}/model.safetensors"
    elif scheme == "hf":
        put_model(web, "org/model", {"model.safetensors": FOREIGN[kind], "config.json": b"{}"})
        artifact = "hf://org/model"
    else:
        (yard.folder / "model.safetensors").write_bytes(FOREIGN[kind])
        artifact = str(yard.folder / "model.safetensors")
    order = {"model_name": "m", "framework": "llamacpp", "model_artifact": artifact}
    answer = post(yard, "/v1/models/deploy", order)
    assert answer.status == 400, bytes(answer.body)
    assert answer.json()["error"]["param"] == "model_artifact"
    assert stored(yard) == []


@pytest.mark.parametrize("kind", ["zip", "pickle-4", "script"])
def test_what_a_wheel_hides_is_refused_at_the_fetch(yard: Yard, web: Origin, kind: str) -> None:
    name = f"evil-{kind}"
    wheel = wheel_of({"../../../evil.gguf": FOREIGN[kind], "evil/__init__.py": b"raise SystemExit"})
    put_package(web, name, {f"{name.replace('-', '_')}-1.0-py3-none-any.whl": wheel})
    order = {"model_name": name, "framework": "llamacpp", "model_artifact": f"pypi:{name}"}
    assert post(yard, "/v1/models/deploy", order).status == 202

    def failure() -> str:
        return str(yard.get(f"/v1/endpoints/{name}")["failure"] or "")

    assert "the member is" in eventually(failure, 30, "it failed")
    assert stored(yard) == []
    assert not list(yard.data.rglob("evil*")), "nothing was unpacked"
    assert yard.engines(name) == []
