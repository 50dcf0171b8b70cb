"""The page at ``/metrics``: what the platform reads of the load, and what an operator wants to know of batches."""

from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

RUNNING = "modelyard_onnx_requests_running"
WAITING = "modelyard_onnx_requests_waiting"
PROMPT_TOKENS = "modelyard_onnx_prompt_tokens_total"

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PAGE_BYTES = 4096


class Metrics:
    """Counts of one process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.running = Gauge(RUNNING, "Requests of which something is or was computed.", registry=registry)
        self.waiting = Gauge(WAITING, "Requests of which nothing was computed yet.", registry=registry)
        self.tokens = Counter(
            "modelyard_onnx_prompt_tokens", "Tokens read, padding left out.", ["model"], registry=registry
        )
        self.requests = Counter(
            "modelyard_onnx_requests", "Requests that ended, by what became of them.", ["model", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.items = Counter(
            "modelyard_onnx_items", "Texts, pictures and sets of tensors computed.", ["model"], registry=registry
        )
        self.batch_size = Histogram(
            "modelyard_onnx_batch_size", "Items of a batch.", ["model"], buckets=_BATCHES, registry=registry
        )
        self.batch_s = Histogram(
            "modelyard_onnx_batch_seconds", "Time that a batch was computed.", ["model"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.queue_s = Histogram(
            "modelyard_onnx_queue_seconds", "Time that items waited for their batch.", ["model"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.memory = Gauge(
            "modelyard_onnx_model_memory_bytes", "Memory that loading a model took.", ["model"], registry=registry
        )
        self.loads = Counter("modelyard_onnx_loads", "Models loaded.", ["outcome"], registry=registry)
        self.evictions = Counter("modelyard_onnx_evictions", "Guests that made room.", registry=registry)
        resident = Gauge("modelyard_onnx_resident_bytes", "Memory of the process.", registry=registry)
        resident.set_function(resident_bytes)

    def show(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Show requests as these count them."""
        self.running.set_function(running)
        self.waiting.set_function(waiting)

    def forget(self, model: str) -> None:
        """Show a model's memory no more; its counts stay, as counters must."""
        self.memory.remove(model)

    def page(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)


def resident_bytes() -> int:
    """Return the memory that this process has in RAM."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
