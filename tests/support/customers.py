"""Tenants of a yard: each with a key that may manage and call."""

import os
import subprocess
import sys
from typing import Any

from tests.support.waiting import eventually
from tests.support.yard import Reply, Yard


class Customer:
    """A tenant with a key that may manage and call."""

    def __init__(self, yard: Yard, name: str) -> None:
        """Make one."""
        self.yard = yard
        self.name = name
        reply = yard.call("POST", "/v1/tenants", {"name": name})
        assert reply.status == 201, reply.body
        self.id = str(reply.json()["id"])
        self.key = yard.new_key(name=name, tenant_id=self.id, scopes=["manage", "inference"])

    def call(self, method: str, path: str, body: object = None) -> Reply:
        """Make a call with its key."""
        return self.yard.call(method, path, body, key=self.key)

    def deploy(self, name: str, *, base: str = "base@v1", **more: object) -> Reply:
        """Deploy an adapter."""
        order = {"model_name": name, "framework": "simulated", "base": base, **more}
        return self.call("POST", "/v1/models/deploy", order)

    def modelyard(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Use the command line as it does."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MODELYARD")}
        environment |= {"MODELYARD_URL": self.yard.url, "MODELYARD_API_KEY": self.key}
        command = [sys.executable, "-m", "modelyard", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)

    def ask(self, model: str, text: str = "Hello there", **more: object) -> Reply:
        """Chat."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
        return self.yard.call("POST", "/v1/chat/completions", body, key=self.key, within_s=60.0)

    def endpoint(self, name: str) -> Any:
        """Return an endpoint."""
        reply = self.call("GET", f"/v1/endpoints/{name}")
        assert reply.status == 200, reply.body
        return reply.json()

    def drop(self, *names: str) -> None:
        """Delete endpoints, and wait until their seats are given up."""
        for name in names:
            assert self.call("DELETE", f"/v1/endpoints/{name}").status == 202
        eventually(lambda: not self.seats(), 30, "its seats are given up")

    def seats(self) -> list[Any]:
        """Return all its seats."""
        return [seat for one in self.call("GET", "/v1/endpoints").json()["data"] for seat in one["replicas"]]
