"""The simulated engine: a real process with true token timing and faults on demand.

It serves tests, drills and ``modelyard up --simulate``: everything around an
engine (process, port, sockets, secret, load time, queue, KV blocks, batching)
is real, only the tokens are an echo. It writes down every token it emits, so
that a ledger can be checked against it (``journal.py`` has the records).

Answers
    Chat and completions echo the last user message (the prompt), token by token. A token is a word piece of at most 8
    ASCII letters with the blank before it, or one other character (``tokens.py``); with ``byte_tokens`` each byte of a
    character outside ASCII is a token, and its text is held back until it is complete. ``response_format`` gives JSON
    in the shape of the schema; ``tool_choice`` ``required`` or a name gives a tool call, ``auto`` does when the last
    user message names the tool. ``ignore_eos`` and ``min_tokens`` repeat the echo. ``continue_final_message``
    goes on with the echo of the last user message behind the text of the last, assistant's, message. Embeddings are
    unit vectors from a hash, and so are ``logprobs``. Rerank, score, classify, moderations: ``pooling.py``; speech,
    transcripts, pictures and tensors: ``media.py``. ``/tokenize`` counts as vLLM's does.

KV cache
    ``kv_blocks`` blocks of 16 tokens; each request holds those of its prompt and of what it has generated, and the one
    that came last is preempted when they run out (``batching.py``). Whole blocks of prompts are cached by
    ``cache_salt``; ``usage.prompt_tokens_details.cached_tokens`` is what was found.

Adapters
    Up to ``max_adapters`` beside its model, with vLLM's calls (``adapters.py``); each takes ``adapter_load_s``. Files
    that are no whole LoRA adapter, or not of the width ``hidden_size``, are refused; logprobs tell who answered.

Sleep
    With the option ``sleep``, by vLLM's calls (``nap.py``): ``sleep_s`` to fall asleep, ``wake_s`` to wake. While it
    sleeps it answers health and metrics, and refuses work (500). ``fail_wake``: it never wakes.

Faults
    In the last user message (prompt, or embeddings input), any number of ``[[sim: key=value key …]]``; they are cut out
    of the echo. Or for later requests with ``POST /sim/faults`` (needs the secret) and a JSON list of
    ``{"directive": "crash_after=5", "times": 1, "contains": ""}`` (``times`` 0: for good; ``contains``: only prompts
    with that text); it replaces the list, and may carry ``{"health_status": 503}`` or ``{"health_ms": 5000}`` for
    ``/health``, or ``{"stalled": true}``: nobody gets a token while ``/health`` and ``/metrics`` answer (the next list
    ends that).
    ``k`` counts tokens over all choices; a fault ``after=k`` comes when k tokens are out. On answers that are not
    streamed it comes while they are generated. An answer that is continued suffers none of those that end an attempt
    (crash, hang, stall, cut, error, garbage): what ended the first attempt does not end the second.

    ===================== ==========================================================================================
    ``tokens=N``          the answer has exactly N tokens (the echo repeated), unless ``max_tokens`` is less
    ``slow=MS``           pause between tokens; ``ttft=MS`` the time to the first
    ``crash_before_first``  ``kill -9`` of itself; also ``crash_after=k``; with ``crash_code=C`` it exits with C instead
    ``crash_always``      before the first token, or with ``crash_after=k`` then; also when the answer is continued
    ``hang_before_first``   silence, socket open; also ``hang_after=k``; ``stall_after=k`` silence for all requests
    ``cut_after=k``       the socket closes in the middle of the next event (or of the JSON body)
    ``clean_end_after=k`` the chunked body ends well, without finish chunk and ``[DONE]``
    ``error_after=k``     error in the stream, in the form ``error_form=wrapped`` (``data: {"error":…}``), ``event``
                          (``event: error``) or ``flat`` (``{"object":"error",…}``); not streamed: status 500
    ``http_error=S``      status S (like 400, 429, 500, 503) instead of an answer
    ``garbage=invalid_json``  broken JSON; ``garbage=error_200`` status 200 with an error body; ``garbage=content_type``
                          an HTML page with status 200
    ``no_usage``          no usage at all; ``null_usage`` usage is null
    ``reasoning=N``       the usage says that N of the tokens were thought; ``sound=N`` that N of the prompt's and N of
                          the answer's are sound
    ``huge_line=N``       N bytes without a line end
    ``missing_role``      no role chunk; ``no_finish`` no finish chunk; ``no_done`` no ``[DONE]``
    ``usage_every_chunk`` running usage in each chunk; ``ping`` a comment before each token
    ``early_headers``     status and headers at once, as vLLM does; else with the first token, as llama.cpp does
    ``split_bytes``       each byte in its own write; ``crlf`` line ends CR LF; ``byte_tokens`` see above
    ===================== ==========================================================================================
"""

import sys
from pathlib import Path

from modelyard.domain.facts import ModelFacts
from modelyard.engines import (
    EngineCall,
    EngineCommand,
    EngineLoad,
    Guest,
    GuestKind,
    LaunchSpec,
    Options,
    OptionsError,
    Settings,
)
from modelyard.engines.defaults import EngineDefaults
from modelyard.engines.options import read_options
from modelyard.engines.pages import adapters_on, count_of, read_samples, sleeping_on, total_of
from modelyard.engines.simulated.options import SimulatedOptions
from modelyard.engines.simulated.tokens import BLOCK_TOKENS

__all__ = ["SimulatedEngine", "SimulatedOptions"]

_PROCESS_BYTES = 40 * 1024 * 1024
_PROCESS_START_S = 0.3
LOAD_TIMEOUT_S = 120.0
"""Longest load of an adapter; option ``adapter_load_s`` may make it slow on purpose."""
SLEEP_TIMEOUT_S = 120.0
"""Longest that it may take to fall asleep, or to wake."""
NOTHING = Path()
"""The artifact of an adapter that has none: nothing is computed with it."""


class SimulatedEngine(EngineDefaults):
    """The ``Engine`` contract for ``python -m modelyard.engines.simulated``."""

    name = "simulated"
    routes = frozenset(
        {
            "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify",
            "/v1/moderations", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
            "/v1/images/generations", "/v1/images/edits", "/v2/models/{model}/infer",
        }
    )  # fmt: skip
    request_extras = frozenset(
        {
            "n", "cache_salt", "top_k", "min_p", "min_tokens", "ignore_eos", "repetition_penalty",
            "continue_final_message", "dimensions", "token_arrays", "echo", "max_tokens_per_doc",
        }
    )  # fmt: skip
    needs_artifact = False
    guests = GuestKind.ADAPTER
    guests_option = "max_adapters"

    def check_artifact(self, file: Path) -> None:
        """Accept anything: it loads nothing."""

    def settings(self, options: Options, *, artifact_bytes: int, facts: ModelFacts | None = None) -> Settings:
        """Check the options; it has what they say, whatever the model.

        Raises:
            ValueError: an unknown option or a bad value, naming it.
        """
        read = read_options(SimulatedOptions, options, engine=self.name)
        if read.journal and not Path(read.journal).is_absolute():
            raise OptionsError(self.name, {"journal": "give an absolute path"})
        return Settings(
            slots=read.slots,
            context_length=read.context_length,
            memory_bytes=int(read.memory_gib * 1024**3) or _PROCESS_BYTES + artifact_bytes,
            load_s=read.load_s + _PROCESS_START_S,
            kv_tokens=read.blocks * BLOCK_TOKENS,
        )

    def command(self, spec: LaunchSpec) -> EngineCommand:
        """Return the process to start; the secret travels in the environment, which other users cannot read."""
        argv = [sys.executable, "-P", "-m", __name__]
        argv += ["--host", spec.host, "--port", str(spec.port), "--model-name", spec.model_name]
        argv += ["--work-dir", str(spec.work_dir)]
        options = {**spec.options, "slots": spec.slots, "context_length": spec.context_length}
        for option, value in sorted(options.items()):
            argv += [f"--{option.replace('_', '-')}", _as_text(value)]
        return EngineCommand(argv=tuple(argv), env={"ENGINE_SECRET": spec.secret, "PYTHONUNBUFFERED": "1"})

    def read_load(self, page: str) -> EngineLoad:
        """Parse the metrics page, which has vLLM's names."""
        samples = read_samples(page)
        return EngineLoad(
            running=count_of(samples, "vllm:num_requests_running"),
            waiting=count_of(samples, "vllm:num_requests_waiting"),
            kv_usage=samples.get("vllm:kv_cache_usage_perc"),
            prompt_tokens_total=samples.get("vllm:prompt_tokens_total"),
            generation_tokens_total=samples.get("vllm:generation_tokens_total"),
            progress_total=total_of(samples, "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
            is_sleeping=sleeping_on(page),
        )

    def guests_max(self, options: Options) -> int:
        """Return ``max_adapters``."""
        return read_options(SimulatedOptions, options, engine=self.name).max_adapters

    def load_guest(self, guest: Guest) -> EngineCall:
        """Load as vLLM does."""
        path = "" if guest.artifact == NOTHING else str(guest.artifact)
        return EngineCall("/v1/load_lora_adapter", {"lora_name": guest.name, "lora_path": path}, LOAD_TIMEOUT_S)

    def unload_guest(self, name: str) -> EngineCall:
        """Unload as vLLM does."""
        return EngineCall("/v1/unload_lora_adapter", {"lora_name": name})

    def sleep(self, options: Options) -> EngineCall | None:
        """Return vLLM's call where the option ``sleep`` is on."""
        is_able = read_options(SimulatedOptions, options, engine=self.name).sleep
        return EngineCall("/sleep?level=1&mode=wait", timeout_s=SLEEP_TIMEOUT_S) if is_able else None

    def wake(self, options: Options) -> EngineCall | None:
        """Return vLLM's call where the option ``sleep`` is on."""
        is_able = read_options(SimulatedOptions, options, engine=self.name).sleep
        return EngineCall("/wake_up", timeout_s=SLEEP_TIMEOUT_S) if is_able else None

    def read_guests(self, models: str) -> frozenset[str]:
        """Return the models that have a parent."""
        return adapters_on(models)


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
