"""Engines found on this machine without a front end: `sparksched metrics`, and what `top` adds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sparksched.commands import local_engines as local
from sparksched.commands.top import servers as top
from sparksched.shared import card
from vllm.config import VllmConfig

from .engines import Engine, running_engine

pytestmark = pytest.mark.timeout(180)


def found(engine: Engine) -> list[card.EngineCard]:
    return [it for it in card.find() if it.pid == engine.process.pid]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_an_engine_is_found_as_long_as_it_runs(transport: str, config: VllmConfig) -> None:
    with running_engine(config, SPARKSCHED_TRANSPORT=transport) as engine:
        (its,) = found(engine)
        assert (its.transport, its.report.scheduler, its.engine) == (transport, "sparksched", "0")
        views = {view.labels: view for view in local.LocalEngines()()}
        view = views[its.model_name, "0"]
        assert view.meters is not None
        assert view.info["transport"] == transport
        names = {family.name for family in text_string_to_metric_families(local.page())}
        assert {"sparksched:info", "sparksched:schedule_seconds"} <= names
        page = top.page_of(top.Server(engine.pid, (its,), None))
        (running,) = page.samples["sparksched:requests_running"]
        assert running == ({"model_name": its.model_name, "engine": "0"}, 0)
        # The other engines of this machine, if there are any, have lines of their own.
        assert engine.pid in {
            card.pid for server in top.servers_here(None) for card in server.engines
        }
        assert top.servers_here(engine.pid)[0].engines == (its,)
    assert not found(engine)


def test_an_engine_without_metrics_has_no_card(config: VllmConfig) -> None:
    with running_engine(config, SPARKSCHED_METRICS="0") as engine:
        assert not found(engine)


def test_only_the_engine_itself_counts(tmp_path: Path) -> None:
    """Neither a child that has inherited the card, nor what can't be read, is an engine."""
    script = "import os, sys; fd = os.memfd_create('sparksched-engine', 0); os.write(fd, b'x')"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{script}; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid not in {it.pid for it in card.find()}
    finally:
        child.kill()
        child.communicate()
    assert os.getpid() not in {it.pid for it in card.find()}
