"""A KV connector of one's own: vLLM loads it by the name of this module."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class AskingConnector(ExampleConnector):  # type: ignore[misc]
    """Asks in each step for the blocks of each request, as some connectors do."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        for request_id in scheduler_output.num_scheduled_tokens:
            state.resolve_block_ids(request_id)
        return super().build_connector_meta(scheduler_output)
