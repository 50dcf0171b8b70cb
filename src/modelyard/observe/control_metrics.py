"""The controller's metrics: what gateways cannot know. Names are in ``metrics.py``."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from modelyard.observe.metrics import NAMES, Labels, counter

if TYPE_CHECKING:
    from prometheus_client import Metric

Sinks = Callable[[], Iterable[tuple[str, int, int, bool]]]
"""Each sink of usage: its name, events and bytes that wait, whether it needs somebody."""


class ControlMetrics:
    """What the controller counts; gauges are read when rendered."""

    def __init__(self) -> None:
        self.webhook_deliveries: dict[Labels, int] = {}
        self.webhooks_waiting: Callable[[], tuple[int, float] | None] = lambda: None
        """How many there are, and the age of the oldest in seconds; None: not known yet."""
        self.sinks: Sinks = tuple
        self.moves: Callable[[], Mapping[Labels, int]] = dict
        """Moves that ended, by outcome; none where nothing may move."""

    def __repr__(self) -> str:
        return f"<ControlMetrics: {sum(self.webhook_deliveries.values())} deliveries of webhooks>"

    def delivered(self, outcome: str) -> None:
        """Count an attempt to deliver a webhook."""
        self.webhook_deliveries[(outcome,)] = self.webhook_deliveries.get((outcome,), 0) + 1

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator["Metric"]:
        """Yield every metric (the interface of a ``prometheus_client`` collector)."""
        yield counter("modelyard_webhook_deliveries", ("outcome",), self.webhook_deliveries)
        yield counter("modelyard_moves", ("outcome",), self.moves())
        if (waiting := self.webhooks_waiting()) is not None:
            yield _gauge("modelyard_webhook_waiting", (), {(): waiting[0]})
            yield _gauge("modelyard_webhook_oldest_seconds", (), {(): waiting[1]})
        sinks = list(self.sinks())
        if sinks:
            yield _gauge("modelyard_sink_pending", ("sink",), {(name,): pending for name, pending, _, _ in sinks})
            yield _gauge("modelyard_sink_waiting_bytes", ("sink",), {(name,): size for name, _, size, _ in sinks})
            yield _gauge("modelyard_sink_alarm", ("sink",), {(name,): is_alarm for name, _, _, is_alarm in sinks})


def _gauge(name: str, labels: Labels, values: Mapping[Labels, float]) -> "Metric":
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, NAMES[name], labels=labels)
    for key, number in values.items():
        family.add_metric(key, number)
    return family
