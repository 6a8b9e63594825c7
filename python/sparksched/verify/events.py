"""KV cache events that a scheduler publishes, noted to be compared."""

from vllm.distributed.kv_events import EventBatch, EventPublisher


class NotedEvents:
    """Notes what a publisher is given."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher, self._publish = publisher, publisher.publish
        self._batches: list[EventBatch] = []
        publisher.publish = self._note

    def _note(self, events: EventBatch) -> None:
        self._batches.append(events)
        self._publish(events)

    def take(self) -> list[EventBatch]:
        """Return the batches since the last call."""
        batches, self._batches = self._batches, []
        return batches

    def forget(self) -> None:
        """Note nothing from now on."""
        self._publisher.publish = self._publish
