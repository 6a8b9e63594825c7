"""KV cache events of two schedulers, those of one of which are published."""

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher


class NotedEvents(EventPublisher):  # type: ignore[misc]
    """Publishes what it is given, if there is a publisher, and notes it to be compared."""

    def __init__(self, publisher: EventPublisher | None = None) -> None:
        super().__init__()
        self._publisher = publisher
        self._batches: list[EventBatch] | None = []

    def publish(self, events: EventBatch) -> None:
        """Publish a batch, and note it unless that is over."""
        if self._batches is not None:
            self._batches.append(events)
        if self._publisher is not None:
            self._publisher.publish(events)

    def take(self) -> list[EventBatch]:
        """Return the batches since the last call."""
        batches = self._batches or []
        if batches:
            self._batches = []
        return batches

    def forget(self) -> None:
        """Note nothing from now on."""
        self._batches = None

    def shutdown(self) -> None:
        """Stop publishing."""
        if self._publisher is not None:
            self._publisher.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return how events are published, if they are."""
        return None if self._publisher is None else self._publisher.get_publisher_config()
