"""The controller's page of metrics: sinks and webhooks."""

from prometheus_client.parser import text_string_to_metric_families

from modelyard.observe.control_metrics import ControlMetrics
from modelyard.observe.metrics import NAMES


def page(metrics: ControlMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {" ".join((one.name, *one.labels.values())): one.value for family in families for one in family.samples}


def test_a_page_has_what_is_known_and_nothing_else() -> None:
    assert page(ControlMetrics()) == {}


def test_each_sink_has_its_backlog_and_its_alarm() -> None:
    metrics = ControlMetrics()
    metrics.sinks = lambda: [("kafka", 3, 4096, False), ("stripe", 0, 0, True)]
    metrics.webhooks_waiting = lambda: (2, 61.5)
    metrics.moves = lambda: {("moved",): 3, ("given_up",): 1}
    metrics.delivered("retried")
    metrics.delivered("retried")
    assert page(metrics) == {
        "modelyard_webhook_deliveries_total retried": 2,
        "modelyard_moves_total moved": 3,
        "modelyard_moves_total given_up": 1,
        "modelyard_webhook_waiting": 2,
        "modelyard_webhook_oldest_seconds": 61.5,
        "modelyard_sink_pending kafka": 3,
        "modelyard_sink_pending stripe": 0,
        "modelyard_sink_waiting_bytes kafka": 4096,
        "modelyard_sink_waiting_bytes stripe": 0,
        "modelyard_sink_alarm kafka": 0,
        "modelyard_sink_alarm stripe": 1,
    }
    assert all(any(name.startswith(known) for known in NAMES) for name in page(metrics))
