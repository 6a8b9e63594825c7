"""KV connectors that say what can't be, and the logs of failed loads."""

import logging
from typing import Any

import pytest
from bare_core import build_core, build_request, runner_output
from sparksched._core import SchedulerCore
from sparksched.engine.kv_transfer import KVTransfer
from vllm.v1.outputs import KVConnectorOutput

pytestmark = pytest.mark.release

KV_TRANSFER = {
    "defer_block_free": False,
    "requires_kv_delivery": False,
    "recompute_load_failures": True,
}


class Connector:
    """Stands in for `KVTransfer`: answers what the test wants."""

    def __init__(self) -> None:
        self.hit: tuple[int | None, bool] = (0, False)
        self.keeps = False

    def find_external_hit(self, _request: Any, _num_local: int) -> tuple[int | None, bool]:
        return self.hit

    def note_allocation(self, *_arguments: Any) -> None:
        pass

    def has_pending_block_frees(self) -> bool:
        return False

    def finish_request(self, _request: Any, _block_ids: Any) -> tuple[bool, None]:
        return self.keeps, None

    def update(self, _report: Any) -> None:
        pass

    def collect_stats(self, _report: Any) -> None:
        pass

    def take_events(self) -> list[Any]:
        return []

    def take_stats(self, _num_fetches: list[int]) -> tuple[dict[str, int], None, None]:
        return {}, None, None

    def log_failures(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def connector() -> Connector:
    return Connector()


@pytest.fixture
def core(connector: Connector) -> SchedulerCore:
    return build_core(kv_transfer=connector, config_of_kv_transfer=KV_TRANSFER)


def report_after_a_step(core: SchedulerCore, **report: Any) -> dict[int, Any]:
    scheduled = core.decide(False, 2.0)
    core.update_after_schedule(scheduled)
    output = runner_output(scheduled)
    output.kv_connector_output = KVConnectorOutput(**report)
    return core.update_from_output(scheduled, output)


@pytest.mark.parametrize("is_async", [False, True])
def test_more_tokens_than_there_are(
    core: SchedulerCore, connector: Connector, is_async: bool
) -> None:
    connector.hit = (11, is_async)
    core.add_request(build_request(), 1.0)
    with pytest.raises(ValueError, match="has 11 tokens of request a, which lacks 10"):
        core.decide(False, 2.0)


@pytest.mark.parametrize("kind", ["finished_recving", "finished_sending"])
@pytest.mark.parametrize("request_id", ["a", "nobody"])
def test_transfers_that_never_began(core: SchedulerCore, kind: str, request_id: str) -> None:
    core.add_request(build_request(), 1.0)
    with pytest.raises(RuntimeError, match=f"the end of a transfer for request {request_id}"):
        report_after_a_step(core, **{kind: {request_id}})
    with pytest.raises(RuntimeError, match="stopped after an earlier error"):
        core.decide(False, 2.0)


def test_numbers_of_blocks_in_a_model_with_groups(core: SchedulerCore) -> None:
    core.add_request(build_request(), 1.0)
    with pytest.raises(RuntimeError, match="several KV cache groups"):
        report_after_a_step(core, invalid_block_ids={1})


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (None, "2 requests compute 9 tokens again"),
        ({"b", "a"}, "2 requests fail for it (kv_load_failure_policy=fail): a, b"),
    ],
)
def test_failed_loads_are_logged(
    failed: set[str] | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.sparksched")
    logger.addHandler(caplog.handler)
    try:
        KVTransfer.log_failures(None, 2, 9, failed)
    finally:
        logger.removeHandler(caplog.handler)
    assert message in caplog.text
