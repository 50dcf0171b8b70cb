"""What an engine of the simulator is like, and the requests on it; ``engine.py`` is the engine."""

from collections.abc import Callable, Hashable, Sequence
from math import inf

import msgspec

from modelyard.policy.breaker import Failure
from modelyard.policy.engine_model import Speed
from modelyard.sim.kv_cache import Key

BLOCK_TOKENS = 16
"""Tokens in a block of the KV cache, as vLLM has it."""
NEVER = -1


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is like; defaults are vLLM's.

    ``kv_blocks`` are of 16 tokens. ``hash_tokens``: what a hash of a request's ``blocks`` stands for, a multiple of 16;
    0: prefixes are not cached. ``ahead``: iterations that are put together before the one that runs has ended (vLLM's
    asynchronous scheduling: 1), for which a newcomer has to wait in addition. ``by_band``: urgent requests come in
    first, and give up last.
    """

    speed: Speed
    max_num_seqs: int = 256
    chunk_tokens: int = 2048
    kv_blocks: int = 8192
    hash_tokens: int = BLOCK_TOKENS
    ahead: int = 1
    by_band: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit the KV cache."""
        return self.kv_blocks * BLOCK_TOKENS


class Aside:
    """What an engine is asked that answers no client: a probe, or a shadow copy.

    ``ended`` is called once, with how it failed, None: it did not.
    """

    __slots__ = ("ended",)

    def __init__(self, ended: Callable[[Failure | None], None]) -> None:
        self.ended = ended


class Task:
    """A request on an engine and what became of it; seconds of the world, infinite until it happens.

    What begins with an underscore is the engine's own.
    """

    __slots__ = (
        "_base", "_blocks", "_computed", "_finish", "_from", "_left", "_shared", "_target",
        "band", "blocks", "cached_tokens", "come_s", "done_s", "first_s", "generated_before", "number",
        "output_tokens", "preemptions", "prompt_tokens", "replica_id", "what",
    )  # fmt: skip

    def __init__(
        self,
        what: Hashable,
        *,
        number: int,
        prompt_tokens: int,
        output_tokens: int,
        blocks: Sequence[int] = (),
        band: int = 0,
        replica_id: str = "",
    ) -> None:
        assert prompt_tokens > 0, "a prompt has a token at least"
        self.what = what
        """Whatever the caller knows it by."""
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.output_tokens = max(1, output_tokens)
        self.blocks = blocks
        self.band = band
        self.replica_id = replica_id
        self.come_s = self.first_s = self.done_s = inf
        self.cached_tokens = 0
        """Tokens of its prompt that need not be read, when it first came in."""
        self.preemptions = 0
        self.generated_before = 0
        """Tokens that it had when it was last let in."""
        self._target = prompt_tokens
        """Tokens to be computed before the next one can be generated."""
        self._computed = 0
        self._shared = 0
        """Parts of its prompt that others may hold, too."""
        self._blocks = 0
        """Blocks of its own, while its prompt is read."""
        self._base = 0
        """Its tokens, less the engine's steps."""
        self._finish = NEVER
        """The engine's step that generates its last token."""
        self._from = 0
        self._left: tuple[int, Key] | None = None
        """Where its blocks were left when it gave them up: behind how many shared parts, under which key."""

    def __repr__(self) -> str:
        return f"<Task {self.number}: {self.prompt_tokens} + {self.output_tokens} tokens>"


class Totals(msgspec.Struct, frozen=True):
    """What an engine has done by now, in sums over its iterations; the one that runs counts in part."""

    iterations: float = 0.0
    batch: float = 0.0
    prefill_tokens: float = 0.0
    kv_tokens: float = 0.0
    generated: float = 0.0

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """What the numbers of a speed are multiplied by."""
        return self.iterations, self.batch, self.prefill_tokens, self.kv_tokens
