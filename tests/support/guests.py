"""Tenants that put adapters of their own on a base that is shared, as their clients do it."""

import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.customers import Customer
from tests.support.uploading import announce, complete, digest_of, send
from tests.support.waiting import eventually

Fingerprint = dict[str, float]
"""Logprobs of the likeliest first words of an answer: what tells one adapter from another."""
TOP = 20
_PART = 16 * 1024 * 1024


class Tenant(Customer):
    """A tenant that uploads what it deploys."""

    def upload(self, source: Path) -> str:
        """Send an adapter, each file of its folder as one part, or the one file; return what ``deploy`` takes."""
        if source.is_file():
            return f"upload:{self._send(source)}"
        return self._folder(source)

    def _send(self, file: Path) -> str:
        content = file.read_bytes()
        begun = announce(self.yard, content, key=self.key, name=file.name, part_bytes=_PART)
        if begun["status"] == "open":
            assert send(self.yard, begun["id"], 1, content, key=self.key).status == 200
            eventually(partial(self._is_complete, str(begun["id"])), 30, "the upload is checked")
        return digest_of(content)

    def _folder(self, folder: Path) -> str:
        files = [{"path": file.name, "digest": self._send(file)} for file in sorted(folder.iterdir())]
        reply = self.call("POST", "/v1/uploads/folders", {"name": folder.name, "files": files})
        assert reply.status in (200, 201), reply.body
        return str(reply.json()["uri"])

    def _is_complete(self, upload_id: str) -> bool:
        reply = complete(self.yard, upload_id, key=self.key)
        assert reply.status in (200, 202), reply.body
        return bool(reply.json()["status"] == "complete")

    def place(self, name: str, artifact: str, base: str) -> None:
        """Deploy what was uploaded as an endpoint of its own name on a shared base."""
        order = {"model_name": name, "model_artifact": artifact, "base": base}
        reply = self.call("POST", "/v1/models/deploy", order)
        assert reply.status == 202, reply.body

    def seated(self) -> set[str]:
        """Return the names of its endpoints that sit on a replica."""
        return {one["name"] for one in self.call("GET", "/v1/endpoints").json()["data"] if one["current_replicas"]}

    def leave(self, *names: str) -> None:
        """Delete some of its endpoints; their adapters are unloaded a moment later."""
        for name in names:
            assert self.call("DELETE", f"/v1/endpoints/{name}").status == 202
        eventually(lambda: not self.seated() & set(names), 30, "they are gone")

    def usage(self) -> dict[str, dict[str, int]]:
        """Return what it is billed for, by model."""
        reply = self.call("GET", "/v1/usage?group_by=model")
        assert reply.status == 200, reply.body
        return {one["model"]: one for one in reply.json()["data"]}


def asks_for_fingerprint(model: str, text: str) -> dict[str, Any]:
    """Return the chat whose answer is one token, with those that stood beside it."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
    return body | {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}


def fingerprint_of(answer: dict[str, Any]) -> Fingerprint:
    """Return the logprobs of an answer's first token and of those beside it."""
    (first,) = answer["choices"][0]["logprobs"]["content"]
    return {one["token"]: float(one["logprob"]) for one in first["top_logprobs"]}


def distance(found: Fingerprint, expected: Fingerprint) -> float:
    """Return the mean difference of the logprobs that both have; without any they are as far apart as can be."""
    both = found.keys() & expected.keys()
    return statistics.fmean(abs(found[token] - expected[token]) for token in both) if both else math.inf
