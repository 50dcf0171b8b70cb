"""Whatever a web server does, an artifact is the bytes of one content, or an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.artifacts import HERE, accept, digest_of, files_in, gguf_only, ignore, open_store
from tests.support.certificates import make_certificate
from tests.support.origin import Origin, Seen, origin

from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactError, ArtifactStore, Sources
from modelyard.control.artifacts import transfer as transfers
from modelyard.domain.catalog import Artifact
from modelyard.domain.endpoints import Stage
from modelyard.policy.addresses import networks
from modelyard.web import downloads
from modelyard.web.fetcher import DownloadBounds, Fetcher, FetchError, trust

PART = 64 * 1024
CONTENT = b"GGUF" + bytes(range(251)) * 4000
DIGEST = digest_of(CONTENT)
PATH = "/model.gguf"


@pytest.fixture
def store(root: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    monkeypatch.setattr(transfers, "PAUSE_S", 0.001)
    return open_store(root)


@pytest.fixture
def web() -> Iterator[Origin]:
    with origin() as running:
        yield running


async def got(store: ArtifactStore, web: Origin, path: str = PATH, **known: object) -> Artifact:
    return await store.fetch(Artifact(web.url + path, **known), gguf_only, ignore)  # type: ignore[arg-type]


async def test_file_comes_in_parts_each_asked_for_once(store: ArtifactStore, web: Origin, root: Path) -> None:
    web.put(PATH, CONTENT)
    assert (await got(store, web)).digest == DIGEST
    parts = web.seen[1:]
    assert len({seen.range for seen in parts}) == len(parts) == -(-len(CONTENT) // PART)
    assert {seen.headers["if-range"] for seen in parts} == {'"one"'}
    assert len(files_in(root)) == 1


async def test_https_with_an_authority_of_the_operators_own(tmp_path: Path, root: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with origin((certificate, key)) as web:
        web.put(PATH, CONTENT)
        trusting = open_store(root, FetchConfig(private_networks=HERE, ca_file=str(certificate)))
        assert (await got(trusting, web)).digest == DIGEST
        with pytest.raises(ArtifactError, match="certificate is not trusted"):
            await got(open_store(tmp_path / "other"), web)


async def test_server_without_ranges_is_read_in_one_stream(store: ArtifactStore, web: Origin) -> None:
    web.put(PATH, CONTENT, has_ranges=False)
    assert (await got(store, web)).digest == DIGEST
    assert [seen.range for seen in web.seen[1:]] == [""]


async def test_server_without_etag_is_read_in_one_stream(store: ArtifactStore, web: Origin) -> None:
    web.put(PATH, CONTENT, etag="")
    assert (await got(store, web)).digest == DIGEST
    assert len(web.seen) == 2


async def test_weak_etag_vouches_for_nothing(store: ArtifactStore, web: Origin) -> None:
    web.put(PATH, CONTENT, etag='W/"one"')
    assert (await got(store, web)).digest == DIGEST
    assert len(web.seen) == 2


async def test_cut_parts_go_on_where_they_were_cut(store: ArtifactStore, web: Origin) -> None:
    web.put(PATH, CONTENT, cuts=[10_000, 20_000, 5_000, 0])
    assert (await got(store, web)).digest == DIGEST
    assert web.sent_bytes(PATH) < len(CONTENT) + 4096 + 4 * PART


async def test_cut_stream_begins_anew(store: ArtifactStore, web: Origin) -> None:
    web.put(PATH, CONTENT, has_ranges=False, cuts=[len(CONTENT), 50_000])
    assert (await got(store, web)).digest == DIGEST
    assert len(web.seen) == 3


async def test_server_that_always_cuts_is_left(store: ArtifactStore, web: Origin, root: Path) -> None:
    web.put(PATH, CONTENT, cuts=[0] * 100)
    with pytest.raises(ArtifactError, match="cut off"):
        await got(store, web)
    assert files_in(root, "sha256") == []
    web.put(PATH, CONTENT, has_ranges=False, cuts=[9] * 100)
    with pytest.raises(ArtifactError, match="cut off"):
        await got(store, web)


async def test_failed_fetch_goes_on_with_what_it_has(store: ArtifactStore, web: Origin, root: Path) -> None:
    served = web.put(PATH, CONTENT)
    served.on_request = lambda seen: served.cuts.extend([0] if len(web.seen) > 8 else [])
    with pytest.raises(ArtifactError):
        await got(store, web)
    before = len(web.seen)
    served.on_request, served.cuts = lambda seen: None, []
    seen: list[tuple[Stage, int]] = []
    again = await open_store(root).fetch(
        Artifact(web.url + PATH), accept, lambda stage, done, _: seen.append((stage, done))
    )
    assert again.digest == DIGEST
    assert seen[0][1] >= PART, "it began with what was here"
    assert len(web.seen) - before < -(-len(CONTENT) // PART)


async def test_content_that_changes_meanwhile_is_fetched_anew(store: ArtifactStore, web: Origin) -> None:
    other = b"GGUF" + bytes(len(CONTENT) - 4)

    def change(seen: Seen) -> None:
        if len(web.seen) == 4:
            served.content, served.etag = other, '"two"'

    served = web.put(PATH, CONTENT, on_request=change)
    assert (await got(store, web)).digest == digest_of(other), "no mix of both"


async def test_etag_counts_even_when_if_range_is_ignored(store: ArtifactStore, web: Origin) -> None:
    other = b"GGUF" + bytes(len(CONTENT) - 4)

    def change(seen: Seen) -> None:
        if len(web.seen) == 4:
            served.content, served.etag = other, '"two"'

    served = web.put(PATH, CONTENT, on_request=change, ignores_if_range=True)
    assert (await got(store, web)).digest == digest_of(other)


async def test_content_that_never_stays_is_left(store: ArtifactStore, web: Origin, root: Path) -> None:
    def change(seen: Seen) -> None:
        served.etag = f'"{len(web.seen)}"'

    served = web.put(PATH, CONTENT, on_request=change)
    with pytest.raises(ArtifactError, match="changed while it was fetched"):
        await got(store, web)
    assert files_in(root) == []


async def test_half_of_another_content_is_not_gone_on_with(store: ArtifactStore, web: Origin, root: Path) -> None:
    served = web.put(PATH, CONTENT)
    served.on_request = lambda seen: served.statuses.extend([403] if len(web.seen) > 8 else [])
    with pytest.raises(ArtifactError, match="403: access is denied"):
        await got(store, web)
    assert files_in(root, "incoming") != []
    other = b"GGUF" + bytes(len(CONTENT) - 4)
    web.put(PATH, other, etag='"two"')
    assert (await got(store, web)).digest == digest_of(other)


async def test_another_range_than_was_asked_for_is_refused(store: ArtifactStore, web: Origin, root: Path) -> None:
    def shift(seen: Seen) -> None:
        served.shifted = PART if len(web.seen) > 1 else 0

    served = web.put(PATH, CONTENT, on_request=shift)
    with pytest.raises(ArtifactError, match="another range"):
        await got(store, web)
    assert files_in(root, "sha256") == []


@pytest.mark.parametrize("has_ranges", [True, False])
async def test_length_that_is_a_lie_ends_in_an_error(
    store: ArtifactStore, web: Origin, root: Path, has_ranges: bool
) -> None:
    web.put(PATH, CONTENT, told_size=len(CONTENT) + 1000, has_ranges=has_ranges)
    with pytest.raises(ArtifactError):
        await got(store, web)
    assert files_in(root, "sha256") == []


async def test_answer_whose_end_cannot_be_told_is_refused(store: ArtifactStore, web: Origin) -> None:
    web.put(PATH, CONTENT, has_ranges=False, has_length=False)
    with pytest.raises(ArtifactError, match="does not say how long it is"):
        await got(store, web)


@pytest.mark.parametrize("status", [404, 410, 401, 403])
async def test_refusal_of_a_server_is_told_at_once(store: ArtifactStore, web: Origin, status: int) -> None:
    web.put(PATH, CONTENT, statuses=[status] * 9)
    with pytest.raises(ArtifactError, match=f"answers {status}"):
        await got(store, web)
    assert len(web.seen) == 1


async def test_busy_server_is_asked_again(store: ArtifactStore, web: Origin) -> None:
    def fail_twice(seen: Seen) -> None:
        if len(web.seen) in (2, 3):
            served.statuses.append(503)

    served = web.put(PATH, CONTENT, on_request=fail_twice)
    assert (await got(store, web)).digest == DIGEST


async def test_right_length_with_wrong_bytes_is_corrupt(store: ArtifactStore, web: Origin, root: Path) -> None:
    web.put(PATH, CONTENT[:-1] + b"!")
    with pytest.raises(ArtifactError, match="artifact_corrupt"):
        await got(store, web, digest=DIGEST, size_bytes=len(CONTENT))
    assert files_in(root, "sha256") == []


async def test_compressed_answer_is_refused(store: ArtifactStore, web: Origin) -> None:
    web.put(PATH, CONTENT, headers={"Content-Encoding": "gzip"})
    with pytest.raises(ArtifactError, match="compressed"):
        await got(store, web)


async def test_page_instead_of_a_model_is_refused(store: ArtifactStore, web: Origin, root: Path) -> None:
    web.put(PATH, b"<!DOCTYPE html><html>please log in</html>")
    with pytest.raises(ArtifactError, match="web page"):
        await store.fetch(Artifact(web.url + PATH), accept, ignore)
    assert files_in(root) == []


async def test_query_of_a_url_is_never_shown(store: ArtifactStore, web: Origin) -> None:
    with pytest.raises(ArtifactError) as failed:
        await got(store, web, f"{PATH}?signature=very-secret")
    assert "very-secret" not in str(failed.value)
    assert PATH in str(failed.value)


async def test_refused_host_is_named_only_when_the_caller_wrote_it(root: Path) -> None:
    config = FetchConfig(hf_endpoint="https://10.9.9.9")
    store = ArtifactStore(root, Sources(Fetcher(), config, now_s=lambda: 0.0))
    with pytest.raises(ArtifactError, match=r"'10\.8\.8\.8' has no public address; .*fetch\.private_networks"):
        await store.fetch(Artifact("https://10.8.8.8/m.gguf"), accept, ignore)
    with pytest.raises(ArtifactError, match="its host has no public address") as failed:
        await store.fetch(Artifact("hf://org/name"), accept, ignore)
    assert "10.9" not in str(failed.value)


async def test_name_that_leads_elsewhere_in_the_middle_of_a_fetch_is_not_followed(
    web: Origin, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) <= 4 else ["127.0.0.9"]

    web.put(PATH, CONTENT)
    config = FetchConfig(private_networks=HERE, part_bytes=PART, parallel=1)
    fetcher = Fetcher(networks(HERE), resolve=rebinding)
    store = ArtifactStore(root, Sources(fetcher, config, now_s=lambda: 0.0))
    with pytest.raises(ArtifactError, match="no public address"):
        await store.fetch(Artifact(f"http://models.example:{web.port}{PATH}"), accept, ignore)
    assert len(web.seen) == 4, "each connection goes to an address that was judged"
    assert files_in(root, "sha256") == []


# --- the fetcher ---------------------------------------------------------------------------------


async def test_silent_server_is_left_in_time(web: Origin) -> None:
    web.put(PATH, CONTENT, stalls=[100])
    bounds = DownloadBounds(bytes_max=10**9, idle_timeout_s=0.2)
    with pytest.raises(FetchError, match=r"nothing came for 0\.2 s"):
        async with Fetcher(networks(HERE)).open(web.url + PATH, bounds=bounds) as answer:
            async for _ in answer.chunks():
                pass


async def test_trickling_server_is_left(web: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    web.put(PATH, CONTENT)
    bounds = DownloadBounds(bytes_max=10**9, idle_timeout_s=-1.0, bytes_per_s_min=1e15)
    monkeypatch.setattr(downloads.asyncio, "timeout", lambda _: downloads.asyncio.Timeout(None))
    with pytest.raises(FetchError, match="less than"):
        async with Fetcher(networks(HERE)).open(web.url + PATH, bounds=bounds) as answer:
            async for _ in answer.chunks():
                pass


async def test_failure_of_the_reader_is_not_one_of_the_network(web: Origin) -> None:
    web.put(PATH, CONTENT)
    with pytest.raises(OSError, match="the disk is full"):
        async with Fetcher(networks(HERE)).open(web.url + PATH, bounds=DownloadBounds(10**9)):
            raise OSError("the disk is full")


def test_bad_authority_file_is_told(tmp_path: Path) -> None:
    assert trust("") is None
    (tmp_path / "x.pem").write_text("nothing")
    for file in ("x.pem", "missing.pem"):
        with pytest.raises(ValueError, match=file):
            trust(str(tmp_path / file))
