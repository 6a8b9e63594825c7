"""KV cache events of two schedulers, those of one of which are published."""

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher


class NotedEvents(EventPublisher):  # type: ignore[misc]
    """Keeps what it is given until it is known whose decision counts; then that is published."""

    def __init__(self, publisher: EventPublisher | None = None) -> None:
        super().__init__()
        self._publisher = publisher
        self._batches: list[EventBatch] | None = []

    def publish(self, events: EventBatch) -> None:
        """Note a batch, or publish it if nothing is noted any more."""
        if self._batches is not None:
            self._batches.append(events)
        elif self._publisher is not None:
            self._publisher.publish(events)

    def take(self) -> list[EventBatch]:
        """Return the batches since the last call."""
        batches = self._batches or []
        if batches:
            self._batches = []
        return batches

    def publish_only(self, publisher: EventPublisher | None) -> None:
        """Pass everything on from now on, and keep nothing."""
        self._publisher, self._batches = publisher, None

    def shutdown(self) -> None:
        """Stop publishing."""
        if self._publisher is not None:
            self._publisher.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        """Return how events are published, if they are."""
        return None if self._publisher is None else self._publisher.get_publisher_config()
