"""``EventSink`` in Kafka: librdkafka's idempotent producer; needs the extra ``kafka``.

What was handed over and is not acknowledged stays with librdkafka for as long
as it takes, and its idempotence keeps a retry from being a second event. A
process that is killed starts from its cursor, so events then come twice with
one key.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from modelyard.config.books import KafkaConfig
from modelyard.errors import StartupError
from modelyard.stores import SinkError

QUEUE_MESSAGES = 100_000
BUFFER_PAUSE_S = 0.1
BUFFER_WAIT_S = 10.0
"""Longest wait for room in the client, which 'kafka.options' may have made small: the spool must be looked after."""

_log = logging.getLogger(__name__)
_OURS = {
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": 0,  # for ever: the spool is the journal, and it is bounded there
    "linger.ms": 20,
    "compression.type": "lz4",
    "queue.buffering.max.messages": QUEUE_MESSAGES,
    "client.id": "modelyard",
    "log_level": 2,  # a line for each try to connect else; what matters comes by callbacks
}


def check(settings: KafkaConfig) -> None:
    """Say at the start what could never work.

    Raises:
        StartupError: the client is missing, or an option is wrong.
    """
    try:
        importlib.import_module("confluent_kafka")
    except ImportError as error:
        raise StartupError(
            "'kafka.brokers' is set, and Kafka's client is not installed. Run: pip install 'modelyard[kafka]'"
        ) from error
    try:
        KafkaSink(settings).close()
    except SinkError as error:
        raise StartupError(f"Bad setting: {error}. librdkafka's CONFIGURATION.md has all options.") from error


class KafkaSink:
    """A producer."""

    def __init__(self, settings: KafkaConfig) -> None:
        kafka: Any = importlib.import_module("confluent_kafka")
        self._topic = settings.topic
        self._failure = ""
        self.trouble = ""
        given = {**_OURS, **settings.options, "bootstrap.servers": ",".join(settings.brokers)}
        try:
            self._producer: Any = kafka.Producer({**given, "error_cb": self._note}, logger=_log)
        except kafka.KafkaException as error:
            raise SinkError(f"'kafka.options' is wrong: {error.args[0].str()}") from error

    def __repr__(self) -> str:
        return f"<KafkaSink {self._topic}: {len(self._producer)} on their way>"

    def send(self, events: Sequence[tuple[bytes, bytes]], *, wait_s: float) -> bool:
        """Hand events over and wait; see the contract."""
        for event in events:
            self._hand_over(*event)
        return self.wait(wait_s)

    def _hand_over(self, key: bytes, value: bytes) -> None:
        for _ in range(max(1, round(BUFFER_WAIT_S / BUFFER_PAUSE_S))):
            try:
                self._producer.produce(self._topic, value=value, key=key, on_delivery=self._told)
            except BufferError:
                self._producer.poll(BUFFER_PAUSE_S)
            else:
                return
        raise SinkError(f"Kafka's client is full, and nothing leaves it: {self.trouble or 'the brokers say nothing'}")

    def wait(self, wait_s: float) -> bool:
        """Wait for acknowledgements; see the contract."""
        left = self._producer.flush(wait_s)
        if self._failure:
            raise SinkError(self._failure)
        if not left:
            self.trouble = ""
        return not left

    def close(self) -> None:
        """Drop what is not acknowledged."""
        self._producer.purge()
        self._producer.flush(BUFFER_PAUSE_S)

    def _told(self, error: Any, _: object) -> None:
        if error is not None:
            self._failure = self._failure or f"Kafka refused an event: {error.str()}"

    def _note(self, error: Any) -> None:
        if error.fatal():
            self._failure = f"Kafka's client cannot go on: {error.str()}"
        else:
            self.trouble = error.str()
