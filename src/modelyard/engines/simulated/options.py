"""What can be set for a simulated engine: the deploy options, and the flags of its process."""

from typing import Annotated

import msgspec

from modelyard.engines.simulated.tokens import blocks_for

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]


class SimulatedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One flag each: ``itl_ms`` is ``--itl-ms``."""

    slots: Count = 8
    """Requests in the batch at once; more wait in the engine's own queue."""
    context_length: Count = 4096
    """Most tokens of prompt and answer together."""
    load_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """Time between the start of the process and ready; until then all answers are 503."""
    ttft_ms: Milliseconds = 10.0
    """Time from a slot to the first token, beside the prompt's own time."""
    itl_ms: Milliseconds = 2.0
    """Time between two tokens of a request that is alone in the batch."""
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Speed of reading the part of a prompt that is not cached; 0: no time."""
    batch_slowdown: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    """Added share of ``itl_ms`` for each other request in the batch."""
    kv_blocks: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)] = 0
    """KV blocks of 16 tokens; when they run out, the newest request is preempted. 0: enough for all slots at full
    context."""
    queued_max: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Requests in the engine, running and waiting, above which it answers 503 as vLLM does; 0: no limit."""
    embedding_dimensions: Annotated[int, msgspec.Meta(ge=1, le=8192)] = 64
    """Length of embedding vectors."""
    memory_gib: Annotated[float, msgspec.Meta(ge=0, le=100_000)] = 0.0
    """Memory that a replica is said to take on its accelerators; 0: what its process takes. It is not really taken."""
    fail_load: bool = False
    """Exit with code 1 after ``load_s`` instead of getting ready."""
    ignore_sigterm: bool = False
    """Go on after SIGTERM, as an engine that hangs does."""
    byte_tokens: bool = False
    """Each byte of a character outside ASCII is a token of its own."""
    max_adapters: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    """Adapters that it holds at once beside its own model."""
    hidden_size: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Width of its layers: an adapter of another width is refused, as one for another base; 0: any width fits."""
    adapter_load_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """Time that loading one takes."""
    fail_adapters: str = ""
    """Adapters whose name holds this text are refused; "": none."""
    sleep: bool = False
    """It can be told to sleep and to wake, as vLLM with its option of the same name."""
    sleep_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """Time that falling asleep takes, once nothing runs."""
    wake_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """Time that waking takes."""
    fail_wake: bool = False
    """Refuse to wake after ``wake_s``."""
    journal: str = ""
    """File of the token journal, absolute; "": ``tokens.jsonl`` in the replica's folder."""

    @property
    def blocks(self) -> int:
        """KV blocks of the process."""
        return self.kv_blocks or self.slots * blocks_for(self.context_length)
