"""The process of a llama.cpp replica, or of a front's child: flags become ``xllamacpp`` parameters, then its own HTTP
server runs.

It listens on the given address only, answers nothing but ``/health`` without
the secret, and has no web page and no cross-origin access. SIGTERM ends it at
once (Python's default action): the platform drains before it asks.
"""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

_METADATA_BYTES = 4 * 1024 * 1024
_BATCH_TOKENS = 2048
_PING_S = 15
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the server; return the exit code."""
    arguments = read_arguments(sys.argv[1:])
    if arguments.parent:
        _die_with(arguments.parent)
    # Out of the environment at once, so that nothing that this process starts inherits it.
    secret = os.environ.pop("ENGINE_SECRET", "")
    if not secret:
        return _refuse("set ENGINE_SECRET: what callers must send as 'Authorization: Bearer'", 2)
    try:
        import xllamacpp
    except ImportError as error:
        return _refuse(f"xllamacpp cannot be imported ({error}); run: pip install 'modelyard[llamacpp]'", 2)
    try:
        server = xllamacpp.Server(_parameters(xllamacpp, arguments, secret))
    except (RuntimeError, ValueError) as error:
        return _refuse(f"the model cannot be loaded or the address not be used: {error}", 1)
    print(f"ready on {server.listening_address}", flush=True)  # noqa: T201 - the log
    if arguments.ready_fd:
        with os.fdopen(arguments.ready_fd, "w") as pipe:
            pipe.write(f"{server.listening_address}\n")
    while True:
        signal.pause()


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Return the flags of a process."""
    parser = argparse.ArgumentParser(prog="python -m modelyard.engines.llamacpp.server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-type", choices=("f16", "q8_0", "q4_0"), default="f16")
    parser.add_argument("--cache-ram-mib", type=int, default=0)
    parser.add_argument("--sleep-idle-s", type=int, default=0)
    parser.add_argument("--embedding", action="store_true")
    parser.add_argument("--pooling", choices=("", "mean", "cls", "last"), default="")
    parser.add_argument("--speculative", choices=("", "ngram"), default="")
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--lora", type=Path, action="append", default=[], help="a GGUF adapter, off until asked for")
    parser.add_argument("--ready-fd", type=int, default=0, help="descriptor to write the address to")
    parser.add_argument("--parent", type=int, default=0, help="pid of the process to end with")
    return parser.parse_args(argv)


def _parameters(xllamacpp: Any, arguments: argparse.Namespace, secret: str) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(arguments.model)
    parameters.model_alias = {arguments.model_name}
    parameters.hostnames = [arguments.host]
    parameters.port = arguments.port
    parameters.api_keys = [secret]
    parameters.n_parallel = arguments.slots
    # Divided evenly among the slots, so that each can always use all of its context.
    parameters.n_ctx = arguments.slots * arguments.context_length
    parameters.kv_unified = False
    parameters.n_gpu_layers = 0
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = arguments.threads
    kv_type = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{arguments.kv_type.upper()}")
    parameters.cache_type_k = parameters.cache_type_v = kv_type
    parameters.cache_ram_mib = arguments.cache_ram_mib
    parameters.cache_idle_slots = arguments.cache_ram_mib > 0
    if arguments.sleep_idle_s:
        parameters.sleep_idle_seconds = arguments.sleep_idle_s
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = False
    parameters.endpoint_props = False
    parameters.ui = False
    parameters.cors_origins = ""
    parameters.cors_credentials = False
    parameters.offline = True
    parameters.use_jinja = True
    parameters.warmup = True
    parameters.sse_ping_interval = _PING_S
    if arguments.parent:
        # Weights that are packed anew for the CPU would be in memory twice while a front replaces one child by another.
        parameters.no_extra_bufts = True
    if arguments.lora:
        parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(file), 0.0) for file in arguments.lora]
        # A scale of 0 for who does not ask.
        parameters.lora_init_without_apply = True
    if arguments.speculative:
        _speculate(xllamacpp, parameters, arguments)
    if arguments.embedding:
        _embed(xllamacpp, parameters, arguments)
    return parameters


def _speculate(xllamacpp: Any, parameters: Any, arguments: argparse.Namespace) -> None:
    kinds = xllamacpp.common_speculative_type
    parameters.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_CACHE]
    parameters.speculative.draft.n_max = arguments.draft_tokens


def _embed(xllamacpp: Any, parameters: Any, arguments: argparse.Namespace) -> None:
    parameters.embedding = True
    # An encoder reads a whole text in one batch, so both batch sizes bound the text.
    parameters.n_batch = parameters.n_ubatch = min(_BATCH_TOKENS, arguments.context_length)
    pooling = arguments.pooling
    if not pooling and not _says_pooling(arguments.model):
        pooling = "mean"
    if pooling:
        kinds = xllamacpp.llama_pooling_type
        parameters.pooling_type = getattr(kinds, f"LLAMA_POOLING_TYPE_{pooling.upper()}")


def _says_pooling(model: Path) -> bool:
    """Say whether the model file names its pooling (a GGUF key like ``bert.pooling_type``, near the file's start)."""
    with model.open("rb") as file:
        return b".pooling_type" in file.read(_METADATA_BYTES)


def _die_with(parent: int) -> None:
    """Make the kernel end this process when the front dies; it may have died before this call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _refuse(why: str, code: int) -> int:
    print(f"llama.cpp engine: {why}", file=sys.stderr)  # noqa: T201 - the log
    return code


if __name__ == "__main__":
    sys.exit(main())
