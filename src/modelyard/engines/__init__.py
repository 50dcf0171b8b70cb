"""Engines: the programs that run models, one file an engine.

This is the contract. An engine knows how to start itself, when it is ready
and how to read its load; it never starts a process (the fleet does) and never
decides anything (policies do). ``tests/conformance/test_engines.py`` holds
every engine to it.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from modelyard.domain.facts import ModelFacts

Options = dict[str, str | int | float | bool]


class OptionsError(ValueError):
    """Options that an engine does not take. ``faults`` has what is wrong with each, by its name."""

    def __init__(self, engine: str, faults: Mapping[str, str]) -> None:
        self.faults = dict(faults)
        told = [f"Option '{name}' of engine '{engine}': {reason}" for name, reason in self.faults.items()]
        super().__init__(f"{'; '.join(told)}.")


class LaunchSpec(msgspec.Struct, frozen=True):
    """What a replica needs to start. ``model_name`` is what the engine must call itself in answers.

    ``artifact`` is None for an engine that needs none. The engine must listen
    on ``host:port`` only and refuse requests without ``Bearer <secret>``.
    """

    replica_id: str
    model_name: str
    artifact: Path | None
    host: str
    port: int
    secret: str
    slots: int
    context_length: int
    threads: int
    options: Options
    work_dir: Path
    """The replica's own folder; the engine may write there and nowhere else."""
    accelerators: tuple[int, ...] = ()
    """Those of its node that it was given, by index; empty: it was not placed. Its fleet lets it see no others."""
    accelerator_kind: str = "cpu"
    memory_bytes: int = 0
    """What it was given of each; 0: it was not placed."""
    kv_cache_bytes: int = 0
    """What ``Settings`` counted for the KV cache of the whole replica; 0 is unknown, or none."""


class EngineCommand(msgspec.Struct, frozen=True):
    """A process to start. ``env`` is added to a minimal environment that carries no platform secret."""

    argv: tuple[str, ...]
    env: dict[str, str]


class EngineCall(msgspec.Struct, frozen=True):
    """A request that control makes to a running replica, ``POST`` with its secret; 200 says that it is done.

    ``timeout_s``: longest that it may take.
    """

    path: str
    body: dict[str, Any] = {}
    timeout_s: float = 60.0


class GuestKind(StrEnum):
    """What an engine takes in while it runs, beside what it was started with."""

    NONE = "none"
    ADAPTER = "adapter"
    """LoRA adapters of its base."""
    MODEL = "model"
    """Whole models, small ones."""


class Guest(msgspec.Struct, frozen=True):
    """What a running replica is to take in.

    ``name`` is what callers of the engine give as ``model``. It stands for this content and no other for as long as
    the replica lives (``NAME@DIGEST``): engines keep prefixes by it (``reference/engines.md`` finding 3).
    """

    name: str
    artifact: Path
    options: Options = {}
    facts: ModelFacts = ModelFacts()


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's own view of its load; None is not reported, never 0. Totals count since the engine started."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    progress_total: float | None = None
    """Whatever grows with every step that it computes, a prompt's or an answer's: standing still while requests run, it
    hangs. None: nothing does before a request ends, as tokens that are counted only then."""
    prefix_queries_total: float | None = None
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits_total: float | None = None
    """Those of them that it had."""
    preemptions_total: float | None = None
    """Requests that lost their KV cache to others and were computed again."""
    draft_tokens_total: float | None = None
    """Tokens that speculative decoding proposed."""
    accepted_tokens_total: float | None = None
    """Those of them that the model agreed to."""
    iterations_total: float | None = None
    """Steps that it took, each for all requests that ran: what its speed is learned by (``policy/engine_model.py``)."""
    is_sleeping: bool | None = None
    """It has given its memory back until it is woken."""


class Settings(msgspec.Struct, frozen=True):
    """What an engine made of a version's options."""

    slots: int
    context_length: int
    memory_bytes: int
    """Estimated memory of one replica: weights, KV cache, overhead."""
    load_s: float
    """Estimated seconds from start to ready, before any was measured."""
    kv_tokens: int = 0
    """Tokens that fit the KV cache of one replica; 0 is unknown."""
    weights_bytes: int = 0
    """The part of ``memory_bytes`` that is there before the first request; 0 is unknown."""
    kv_bytes_per_token: int = 0
    """What a token takes of the KV cache at first, in this engine's precision; 0 is unknown, or nothing."""


class Engine(Protocol):
    """How to drive one kind of engine."""

    name: str
    """The ``framework`` of a deploy request."""
    routes: frozenset[str]
    """API paths it serves, like ``/v1/chat/completions``."""
    request_extras: frozenset[str]
    """Request fields beyond OpenAI's that it understands, ``cache_salt`` (set by the gateway) among them, and ``n``
    when it can give, and count, several choices in one request. What it can do beyond fields stands here too:
    ``continue_final_message`` (set by the gateway, with ``add_generation_prompt`` false) or ``assistant_prefill`` (a
    trailing assistant message is continued as it is) when it can go on in the middle of an answer, and
    ``functions.custom``, ``best_of`` … for fields of OpenAI's that few honour."""
    needs_artifact: bool
    computes_on_gpus: bool
    """Where GPUs of the fleet can hold a model, a deployment that names no hardware gets some of them; else the CPU."""
    is_remote: bool
    """Its model runs elsewhere, with a key and at a cost of the operator's: only a key with the scope ``admin`` may
    deploy it, and its replica is a small process on a CPU whatever its endpoint runs on."""
    guests: GuestKind
    """What a replica takes in while it runs."""
    guests_option: str
    """The option that says how many; "" where there is none."""
    ready_path: str
    """GET answers 200 when the model is loaded."""
    load_path: str
    """GET answers a metrics page for ``read_load``."""

    def missing(self) -> str:
        """Return why this engine cannot run here and the fix, or "" when it can."""
        ...

    def check_artifact(self, file: Path) -> None:
        """Look at the content (never the extension).

        Raises:
            ValueError: the file is not what this engine loads, or could harm it; the text is shown to the caller.
        """
        ...

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check ``options`` and say what a replica will need: computed from ``facts``, estimated without.

        Empty facts, of an artifact whose header was not read yet, are as none.

        Raises:
            ValueError: an unknown option or a bad value, or one that the model cannot do; the text is shown to the
                caller. An ``OptionsError`` names each.
        """
        ...

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the process to start; pure."""
        ...

    def read_load(self, page: str) -> EngineLoad:
        """Parse the page at ``load_path``; pure."""
        ...

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return the API paths that a version with ``options`` serves: a subset of ``routes``."""
        ...

    def routes_of(self, options: Options, facts: ModelFacts) -> frozenset[str]:
        """Return those of ``routes_for`` that a model of these facts can answer; empty facts rule nothing out."""
        ...

    def extras_of(self, facts: ModelFacts) -> frozenset[str]:
        """Return ``request_extras``, and ``tools.required`` when it makes such a model call the tool that it must."""
        ...

    def sleeps_after_s(self, options: Options) -> float:
        """Return the seconds without a request after which a replica gives its memory back by itself, and wakes at
        the next one; 0 for one that never does."""
        ...

    def guests_max(self, options: Options) -> int:
        """Return how many guests a replica with ``options`` holds at once; 0: none."""
        ...

    def load_guest(self, guest: Guest) -> EngineCall:
        """Return the call that makes a replica take ``guest`` in; asking again for one that is there is no error."""
        ...

    def unload_guest(self, name: str) -> EngineCall:
        """Return the call that makes a replica forget a guest; what it computes for it is finished first."""
        ...

    def read_guests(self, models: str) -> frozenset[str]:
        """Return the names of the guests on a page of ``GET /v1/models``; pure."""
        ...

    def sleep(self, options: Options) -> EngineCall | None:
        """Return the call that makes a replica give its memory back; None where only ``sleeps_after_s`` does, or
        nothing."""
        ...

    def wake(self, options: Options) -> EngineCall | None:
        """Return the call that undoes ``sleep``."""
        ...


Engines = Mapping[str, Engine]
"""All engines by name, as ``compose`` gives them to the controller."""
