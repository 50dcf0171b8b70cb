"""What is looked at when somebody deploys: what is certainly wrong is a 400 at once, the rest is left to the fetch."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.hub import COMMIT, put_model, put_package, wheel_of
from tests.support.management import Management, management
from tests.support.origin import Origin, origin

from modelyard.config import Config, FetchConfig, S3Config
from modelyard.control.api import artifact_sources
from modelyard.domain.tenants import Identity

GGUF = b"GGUF" + bytes(20_000)


@pytest.fixture
def web() -> Iterator[Origin]:
    with origin() as running:
        running.put("/model.gguf", GGUF)
        yield running


@pytest.fixture
async def api(tmp_path: Path, web: Origin) -> AsyncIterator[Management]:
    keys = S3Config(endpoint=web.url, shared_prefixes=("models/public/",))
    fetch = FetchConfig(
        private_networks=("127.0.0.1/32",),
        artifact_bytes_max=1_000_000,
        hf_endpoint=web.url,
        pypi_index=f"{web.url}/simple",
        s3=keys,
    )
    async with management(tmp_path, Config(fetch=fetch)) as running:
        yield running


async def deploy(api: Management, who: Identity, artifact: str) -> str:
    """Return the URI that was stored, or the fault."""
    order = {"model_name": "m", "framework": "weighed", "model_artifact": artifact}
    answer = await api.call(who, "POST", "/v1/models/deploy", order)
    if answer.status_code != 202:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "model_artifact"
        return f"refused: {answer.json()['error']['message']}"
    (version,) = await api.context.store.versions()
    assert version.artifact.size_bytes > 0
    return version.artifact.uri


async def test_file_of_the_web_is_taken_with_its_size_and_little_of_it_read(
    api: Management, manager: Identity, web: Origin
) -> None:
    url = f"{web.url}/model.gguf"
    assert await deploy(api, manager, url) == url
    assert [seen.range for seen in web.seen] == ["bytes=0-4095"] * 2


async def test_hub_and_index_are_pinned(api: Management, manager: Identity, web: Origin) -> None:
    put_model(web, "org/name", {"q4.gguf": GGUF})
    assert await deploy(api, manager, "hf://org/name") == f"hf://org/name@{COMMIT}/q4.gguf"


async def test_package_is_pinned(api: Management, manager: Identity, web: Origin) -> None:
    put_package(web, "tiny", {"tiny-1.0-py3-none-any.whl": wheel_of({"m.gguf": GGUF})})
    assert await deploy(api, manager, "pypi:tiny") == "pypi:tiny==1.0"


async def test_objects_are_for_admins_and_shared_prefixes_for_all(
    api: Management, manager: Identity, web: Origin
) -> None:
    for key in ("public", "private"):
        web.put(f"/models/{key}/m.gguf", GGUF)
    assert "fetch.s3.shared_prefixes" in await deploy(api, manager, "s3://models/private/m.gguf")
    assert "must not hold" in await deploy(api, manager, "s3://models/public/../private/m.gguf")
    assert await deploy(api, manager, "s3://models/public/m.gguf") == "s3://models/public/m.gguf"


async def test_objects_of_the_platform_are_for_admins(api: Management, admin: Identity, web: Origin) -> None:
    web.put("/models/private/m.gguf", GGUF)
    assert await deploy(api, admin, "s3://models/private/m.gguf") == "s3://models/private/m.gguf"


@pytest.mark.parametrize(
    ("path", "how", "words"),
    [
        ("/none.gguf", None, "answers 404"),
        ("/denied.gguf", {"statuses": [403]}, "access is denied"),
        ("/large.gguf", {"told_size": 10_000_000}, "artifact_bytes_max"),
        ("/empty.gguf", {"content": b""}, "it is empty"),
        ("/pickle.gguf", {"content": b"\x80\x04\x95" + bytes(100)}, "a pickle"),
        ("/page.gguf", {"content": b"<!DOCTYPE html>"}, "a web page"),
        ("/away.gguf", {"redirect": "http://169.254.169.254/"}, "no public address"),
        ("/endless.gguf", {"has_ranges": False, "has_length": False}, "does not say how long"),
    ],
)
async def test_what_is_certainly_wrong_is_told_at_once(
    api: Management, manager: Identity, web: Origin, path: str, how: dict[str, object] | None, words: str
) -> None:
    if how is not None:
        served = web.put(path, GGUF)
        for name, value in how.items():
            setattr(served, name, value)
    assert words in await deploy(api, manager, f"{web.url}{path}")
    assert await api.context.store.versions() == []


async def test_silent_server_holds_nobody(
    api: Management, manager: Identity, web: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_sources, "LOOK_TIMEOUT_S", 0.3)
    web.put("/silent.gguf", GGUF, on_request=lambda seen: web.released.wait(20))
    async with asyncio.timeout(10):
        assert "did not answer within" in await deploy(api, manager, f"{web.url}/silent.gguf")


async def test_folder_for_an_engine_that_loads_a_file_is_told(api: Management, admin: Identity, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.gguf").write_bytes(GGUF)
    assert "loads one file; name the file" in await deploy(api, admin, str(model))
