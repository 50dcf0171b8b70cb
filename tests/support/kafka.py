"""Kafka without a broker to install: librdkafka's own mock cluster, from the wheel of its client.

The cluster listens on real ports of this process, and speaks Kafka's protocol to any client; its brokers can be taken
down and up (``reference/faults.md`` 1.3).
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec

_PRODUCER = 0
_BROKER = 1


def _library() -> Any:
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    library = ctypes.CDLL(str(next(folder.glob("librdkafka*.so*"))))
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    library.rd_kafka_mock_cluster_bootstraps.argtypes = [ctypes.c_void_p]
    library.rd_kafka_mock_topic_create.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.rd_kafka_mock_topic_set_error.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    for name in ("rd_kafka_mock_broker_set_down", "rd_kafka_mock_broker_set_up"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.rd_kafka_mock_cluster_destroy.argtypes = [ctypes.c_void_p]
    library.rd_kafka_destroy.argtypes = [ctypes.c_void_p]
    return library


class MockKafka:
    """A cluster of one broker."""

    def __init__(self, library: Any, cluster: int) -> None:
        self._library = library
        self._cluster = cluster
        self.brokers: tuple[str, ...] = tuple(library.rd_kafka_mock_cluster_bootstraps(cluster).decode().split(","))

    def add_topic(self, name: str, partitions: int) -> None:
        assert self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1) == 0

    def down(self) -> None:
        assert self._library.rd_kafka_mock_broker_set_down(self._cluster, _BROKER) == 0

    def up(self) -> None:
        assert self._library.rd_kafka_mock_broker_set_up(self._cluster, _BROKER) == 0

    def fail_topic(self, name: str, code: int) -> None:
        """Answer so to whoever asks for a topic, or sends to it; 0: as ever."""
        self._library.rd_kafka_mock_topic_set_error(self._cluster, name.encode(), code)

    def events(self, topic: str, *, at_least: int, within_s: float = 60.0) -> list[tuple[str, dict[str, Any]]]:
        """Return key and value of what is in a topic, once ``at_least`` different keys are, and nothing more comes."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": ",".join(self.brokers),
                "group.id": f"reader-{time.monotonic_ns()}",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
            }
        )
        found: list[tuple[str, dict[str, Any]]] = []
        deadline = time.monotonic() + within_s
        try:
            partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
            consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in partitions])
            ended: set[int] = set()
            while time.monotonic() < deadline:
                message = consumer.poll(0.2)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    key, value = message.key(), message.value()
                    assert key is not None
                    assert value is not None
                    found.append((bytes(key).decode(), msgspec.json.decode(value)))
                    ended.discard(message.partition() or 0)
                elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    ended.add(message.partition() or 0)
                    if len(ended) == len(partitions) and len({key for key, _ in found}) >= at_least:
                        break
        finally:
            consumer.close()
        return found


@contextmanager
def mock_kafka() -> Iterator[MockKafka]:
    """Yield a running cluster."""
    library = _library()
    error = ctypes.create_string_buffer(512)
    handle = library.rd_kafka_new(_PRODUCER, None, error, len(error))
    assert handle, error.value
    cluster = library.rd_kafka_mock_cluster_new(handle, 1)
    assert cluster
    try:
        yield MockKafka(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(handle)
