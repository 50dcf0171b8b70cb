"""The guard: a process of ours before an engine that cannot guard itself.

Some engines know no secret (``trtllm-serve``, Triton), some take it only where
every user of the machine can read it (SGLang's ``--api-key``), and all of them
serve far more paths than callers may reach: load weights from a URL, read
files, stop. The guard listens where the replica is expected, lets through what
its plan names and nothing else, and owns the engine: it writes the engine's
configuration files, chooses its ports on the loopback interface, starts it as
a child, passes SIGTERM on, and ends the way the engine ended.

    python -m modelyard.engines.guard PLAN -- the engine's own words

What the plan has in ``@name@`` is filled in by the guard when it starts, in the
engine's words, its environment and its files: a port by its name, and ``@key@``,
a secret between guard and engine for engines that can be given one unseen.
What remains open: an engine without any secret answers users of the same
machine on its own loopback port (docs/how-to/other-engines.md).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelyard.engines import EngineCommand, LaunchSpec

KEY = "key"
"""What ``@key@`` stands for."""
HTTP = "http"
"""The port that a route leads to unless it says otherwise."""


class Route(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What callers may ask: this method of this path, as it is written in the request."""

    method: str
    path: str
    engine_path: str = ""
    """Where the engine has it; "": at the same path."""
    port: str = HTTP
    is_open: bool = False
    """Answered without the secret: readiness only."""
    guest_field: str = ""
    """Field of the body with the name of a guest: one that the engine lists already is answered with 200."""
    caller_fault: str = ""
    """How the body of a 500 begins that is the caller's fault: it becomes a 400, which speaks against no replica."""
    dropped: tuple[str, ...] = ()
    """Fields that the engine refuses on this path."""


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that the guard does; it stands on the command line, so no secret is in it."""

    host: str
    port: int
    folder: str
    """Where the engine runs, and finds ``files`` and ``links``; the guard makes it."""
    routes: tuple[Route, ...]
    ports: tuple[str, ...] = (HTTP,)
    """Names of the ports that the engine listens on."""
    files: dict[str, str] = {}
    """Texts by name, readable by this user only."""
    links: dict[str, str] = {}
    """Names in ``folder`` by which the engine finds what is elsewhere, like ``acme/model``."""
    has_key: bool = False
    """The engine is given ``@key@`` and wants it as its bearer."""
    model: str = ""
    adapter_field: str = ""
    """Where the engine wants the name of an adapter when ``model`` of a request is not ``model`` above; "": nowhere."""


def folder_of(spec: LaunchSpec) -> Path:
    """Return the folder for an engine behind a guard: within the replica's own, in which the fleet has files."""
    return spec.work_dir / "engine"


def guarded(spec: LaunchSpec, plan: Plan, words: Sequence[str], env: dict[str, str]) -> EngineCommand:
    """Return the command that runs an engine's ``words`` behind a guard; pure."""
    assert not any("@key@" in word for word in words), "arguments are visible to every user of the machine"
    assert spec.secret not in repr((plan, words)), "arguments are visible to every user of the machine"
    argv = [sys.executable, "-P", "-m", __name__, msgspec.json.encode(plan).decode(), "--", *words]
    return EngineCommand(argv=tuple(argv), env={**env, "ENGINE_SECRET": spec.secret, "PYTHONUNBUFFERED": "1"})


def openai_routes(engine_routes: frozenset[str], *, ready: str, load: str) -> tuple[Route, ...]:
    """Return what callers and controller ask of an engine that speaks OpenAI's HTTP."""
    return (
        Route("GET", ready, is_open=True),
        Route("GET", load),
        Route("GET", "/v1/models"),
        *(Route("POST", path) for path in sorted(engine_routes)),
    )
