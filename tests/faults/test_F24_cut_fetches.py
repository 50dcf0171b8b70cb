"""F24: a fetch that is cut goes on where it was, is never visible before it is whole, and leaves nothing for good."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.origin import Origin, Seen, origin
from tests.support.smollm import real_model
from tests.support.waiting import eventually
from tests.support.yard import Yard

WITHIN_S = 60.0
PART = 4 * 1024 * 1024
SETTINGS = {
    "fetch.private_networks": "127.0.0.1/32",
    "fetch.part_bytes": PART,
    "fetch.parallel": 2,
    "control.artifact_ttl_s": 8,
}
PATH = "/smol.gguf"


@pytest.fixture
def web() -> Iterator[Origin]:
    with origin() as running:
        yield running


def order(name: str, web: Origin) -> dict[str, object]:
    options = {"slots": 1, "context_length": 256}
    artifact = f"{web.url}{PATH}"
    return {"model_name": name, "framework": "llamacpp", "model_artifact": artifact, "options": options}


def stored(yard: Yard, folder: str) -> list[Path]:
    return sorted((yard.data / "artifacts" / folder).glob("*"))


def ask(yard: Yard, name: str) -> int:
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return yard.call("POST", "/v1/chat/completions", body, within_s=WITHIN_S).status


def test_fetch_goes_on_after_the_controller_was_killed(yard: Yard, web: Origin) -> None:
    content = real_model().read_bytes()
    go_on, held = threading.Event(), threading.Event()

    def hold(seen: Seen) -> None:
        if len(web.seen) > 8 and not go_on.is_set():
            held.set()
            go_on.wait(WITHIN_S)

    web.put(PATH, content, on_request=hold)
    assert yard.call("POST", "/v1/models/deploy", order("smol", web)).status == 202
    assert held.wait(WITHIN_S)

    def noted() -> list[int]:
        (note,) = (file for file in stored(yard, "incoming") if file.suffix == ".json")
        parts: list[int] = json.loads(note.read_bytes())["parts"]
        assert len(parts) >= 3
        return parts

    parts = eventually(noted, WITHIN_S, "parts are noted")
    progress = yard.get("/v1/endpoints/smol")["progress"]
    assert progress["stage"] == "downloading"
    assert stored(yard, "sha256") == [], "not visible before it is whole"
    (controller,) = yard.plane_pids("control")
    yard.kill(controller)
    before = len(web.seen)
    go_on.set()
    eventually(lambda: ask(yard, "smol") == 200, WITHIN_S, "it serves")
    fetched_again = {f"bytes={number * PART}-{(number + 1) * PART - 1}" for number in parts}
    assert not fetched_again & {seen.range for seen in web.seen[before:]}, "what was here was fetched again"
    assert [file.stat().st_size for file in stored(yard, "sha256")] == [len(content)]
    assert stored(yard, "incoming") == []
    assert yard.call("DELETE", "/v1/endpoints/smol").status in (200, 202)


def test_two_deployments_of_one_artifact_fetch_it_once(yard: Yard, web: Origin) -> None:
    content = real_model().read_bytes()
    web.put(PATH, content, etag='"another"')
    for name in ("one", "two"):
        sleeping = {"hardware": {"min_replicas": 1, "max_replicas": 1}, **order(name, web)}
        assert yard.call("POST", "/v1/models/deploy", sleeping).status == 202

    def digests() -> set[str]:
        rows = yard.query("SELECT artifact_digest AS digest FROM model_registry WHERE name IN ('one', 'two')")
        found = {str(row["digest"]) for row in rows}
        assert len(rows) == 2
        assert "" not in found
        return found

    assert len(eventually(digests, WITHIN_S, "both have the artifact")) == 1
    assert web.sent_bytes(PATH) <= len(content) + 6 * 4096, "fetched once, after six looks at its beginning"
    assert len(stored(yard, "sha256")) == 1


def test_half_of_a_fetch_that_nobody_wants_any_more_goes(yard: Yard, web: Origin) -> None:
    draft = yard.data / "artifacts" / "incoming" / ("0" * 40)
    draft.write_bytes(b"half of something")
    draft.with_name(f"{draft.name}.json").write_text("{}")
    eventually(lambda: not draft.exists() and not stored(yard, "incoming"), WITHIN_S, "the leftovers are gone")
    assert len(stored(yard, "sha256")) == 1, "what a version names stays"
