"""The metrics of gateways, and every name of those and of the controller's (``control_metrics.py``) in one place.

Counting must cost nothing on the hot path, so numbers are plain integers in
dicts and ``prometheus_client`` only renders them when somebody asks.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

NAMES = {
    "modelyard_requests": "Inference requests that ended, by route, model and HTTP status.",
    "modelyard_refused": "Requests refused before dispatch, by error code.",
    "modelyard_tokens": "Tokens metered, by model and kind (prompt, cached, completion).",
    "modelyard_retries": "Requests sent to another replica, by model.",
    "modelyard_shadowed": "Copies of requests sent to a shadow release, by model, version and whether it answered.",
    "modelyard_release_requests": "Attempts on replicas that ended, by model and version; from 0 after a quiet while.",
    "modelyard_release_errors": "Attempts on replicas that failed, not by the caller's fault, by model and version.",
    "modelyard_release_busy_seconds": "Seconds that requests spent on replicas, by model and version.",
    "modelyard_ignored_fields": "Unknown request fields that were dropped.",
    "modelyard_control_requests": "Requests forwarded to the controller.",
    "modelyard_in_flight": "Requests that have a replica or wait for one, by model.",
    "modelyard_queued": "Requests that wait for a replica, by model.",
    "modelyard_batch_lines": "Lines of batches that are on a replica, by model.",
    "modelyard_predicted_wait_seconds": "How long a request that came now would wait, by model.",
    "modelyard_remembered_requests": "Requests that 'modelyard why' can tell of, by kind (served, refused).",
    "modelyard_replicas": "Replicas that the gateway may use, by model.",
    "modelyard_connections": "Open client connections.",
    "modelyard_table_revision": "Revision of the routing table in use.",
    "modelyard_table_age_seconds": "Seconds since the controller was last heard; large: serving from the last table.",
    "modelyard_journal_writable": "1 while usage can be recorded; at 0 new requests are refused.",
    "modelyard_refused_fingerprints": "Requests that are refused for having taken engines down.",
    "modelyard_overload_level": "What is shed: 0 nothing, 1 batch, 2 all but priority, 3 all inference.",
    "modelyard_loop_lag_seconds": "How late the gateway's last sweep woke; above 0.1 it does not keep up.",
    "modelyard_first_token_seconds": "Time from arrival to the first token of a stream.",
    "modelyard_request_seconds": "Time from arrival to the end of an answer.",
    "modelyard_moves": "Replicas that moved to other accelerators, or were to, by outcome (moved, given_up).",
    "modelyard_webhook_deliveries": "Attempts to deliver webhooks, by outcome (delivered, retried, failed).",
    "modelyard_webhook_waiting": "Webhooks that are still to be delivered.",
    "modelyard_webhook_oldest_seconds": "Age of the oldest of them; a receiver that is down may hold it up for days.",
    "modelyard_sink_pending": "Events that a sink of usage (kafka, stripe) has not taken, by sink.",
    "modelyard_sink_waiting_bytes": "Bytes of journal that a sink of usage has not got, by sink.",
    "modelyard_sink_alarm": "1 while a sink of usage needs somebody; 'modelyard status' says why.",
}
"""Help text of every metric; counters get the suffix ``_total``, histograms their usual three."""

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)

Labels = tuple[str, ...]
Gauge = Callable[[], Iterable[tuple[Labels, float]]]


class Histogram:
    """Counts by bound, and a sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total += seconds


class ModelCounts:
    """What is counted of one model with every request: one look-up finds all of it."""

    __slots__ = ("cached", "completion", "ended", "prompt", "seconds")

    def __init__(self) -> None:
        self.prompt = 0
        self.cached = 0
        self.completion = 0
        self.ended: dict[tuple[str, int], int] = {}
        """Requests that ended, by route and HTTP status."""
        self.seconds = Histogram()


class GatewayMetrics:
    """Counters of one gateway worker; gauges are read when rendered."""

    def __init__(self) -> None:
        self.models: dict[str, ModelCounts] = {}
        self.refused: dict[Labels, int] = {}
        self.retries: dict[Labels, int] = {}
        self.shadows: dict[Labels, int] = {}
        self.ignored_fields = 0
        self.control_requests = 0
        self.connections = 0
        self.first_token: dict[Labels, Histogram] = {}
        self.gauges: dict[str, tuple[Labels, Gauge]] = {}
        self.releases: Callable[[], Iterable[tuple[Labels, int, int, float]]] = tuple
        """Model and version of each release with its requests, failures and seconds on replicas."""

    def ended(self, route: str, model: str, status: int, seconds: float) -> None:
        """Count an inference request that ended."""
        counts = self.models.get(model) or self._new(model)
        ended, labels = counts.ended, (route, status)
        ended[labels] = ended.get(labels, 0) + 1
        counts.seconds.observe(seconds)

    def began(self, *, model: str, seconds: float) -> None:
        """Count a first token."""
        histogram = self.first_token.get((model,))
        if histogram is None:
            histogram = self.first_token[(model,)] = Histogram()
        histogram.observe(seconds)

    def used(self, model: str, prompt: int, cached: int, completion: int) -> None:
        """Count metered tokens."""
        counts = self.models.get(model) or self._new(model)
        counts.prompt += prompt
        counts.cached += cached
        counts.completion += completion

    def _new(self, model: str) -> ModelCounts:
        counts = self.models[model] = ModelCounts()
        return counts

    def refuse(self, code: str) -> None:
        """Count a refusal."""
        self.refused[(code,)] = self.refused.get((code,), 0) + 1

    def retried(self, model: str) -> None:
        """Count a retry."""
        self.retries[(model,)] = self.retries.get((model,), 0) + 1

    def shadowed(self, model: str, version: str, *, is_good: bool) -> None:
        """Count a shadow copy that ended."""
        labels = (model, version, "answered" if is_good else "failed")
        self.shadows[labels] = self.shadows.get(labels, 0) + 1

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator["Metric"]:
        """Yield every metric (the interface of a ``prometheus_client`` collector)."""
        from prometheus_client.core import GaugeMetricFamily

        ended: dict[Labels, int] = {}
        tokens: dict[Labels, int] = {}
        seconds: dict[Labels, Histogram] = {}
        for model, counts in self.models.items():
            ended |= {(route, model, str(status)): count for (route, status), count in counts.ended.items()}
            if counts.ended:
                seconds[(model,)] = counts.seconds
            kinds = (("prompt", counts.prompt), ("cached", counts.cached), ("completion", counts.completion))
            tokens |= {(model, kind): count for kind, count in kinds if count}
        yield counter("modelyard_requests", ("route", "model", "status"), ended)
        yield counter("modelyard_refused", ("code",), self.refused)
        yield counter("modelyard_tokens", ("model", "kind"), tokens)
        yield counter("modelyard_retries", ("model",), self.retries)
        yield counter("modelyard_shadowed", ("model", "version", "outcome"), self.shadows)
        yield from self._releases()
        yield counter("modelyard_ignored_fields", (), {(): self.ignored_fields})
        yield counter("modelyard_control_requests", (), {(): self.control_requests})
        for name, (labels, read) in self.gauges.items():
            family = GaugeMetricFamily(name, NAMES[name], labels=labels)
            for values, number in read():
                family.add_metric(values, number)
            yield family
        yield _histograms("modelyard_first_token_seconds", self.first_token)
        yield _histograms("modelyard_request_seconds", seconds)

    def _releases(self) -> Iterator["Metric"]:
        requests: dict[Labels, float] = {}
        errors: dict[Labels, float] = {}
        busy_s: dict[Labels, float] = {}
        for labels, ended, failed, service_s in self.releases():
            # Two tenants may have a model of the same name, and no series may stand on a page twice.
            requests[labels] = requests.get(labels, 0) + ended
            errors[labels] = errors.get(labels, 0) + failed
            busy_s[labels] = busy_s.get(labels, 0.0) + service_s
        names = ("model", "version")
        yield counter("modelyard_release_requests", names, requests)
        yield counter("modelyard_release_errors", names, errors)
        yield counter("modelyard_release_busy_seconds", names, busy_s)


def counter(name: str, labels: Labels, values: Mapping[Labels, float]) -> "Metric":
    """Return a counter with its values by label."""
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, NAMES[name], labels=labels)
    for key, number in list(values.items()):
        family.add_metric(key, number)
    return family


def _histograms(name: str, found: dict[Labels, Histogram]) -> "Metric":
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, NAMES[name], labels=("model",))
    for labels, histogram in list(found.items()):
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*BOUNDS_S, float("inf")), histogram.counts, strict=True):
            running += count
            buckets.append((str(bound) if bound != float("inf") else "+Inf", running))
        family.add_metric(labels, buckets, histogram.total)
    return family
