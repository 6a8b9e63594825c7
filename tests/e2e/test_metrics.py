"""Real servers' `/metrics` pages, and `sparksched top` on them."""

import asyncio
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sparksched.commands.top.servers import find_servers
from sparksched.shared import card
from top.terminal import COLUMNS, piped, terminal

from testkit.server import Server, serve
from testkit.streaming import mixed_prompts, stream_all
from testkit.tiny_models import write_model

from .test_rings import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_REQUESTS = 8
VOCAB_SIZE = 400
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEP_SERIES = ("schedule_seconds_count", "update_from_output_seconds_count")


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass
class Observed:
    page: str
    top: str = ""
    screen: str = ""


def work(server: Server) -> None:
    prompts = mixed_prompts(NUM_REQUESTS, vocab_size=VOCAB_SIZE)
    asyncio.run(stream_all(server.base_url, server.model, prompts))


def scrape(server: Server) -> str:
    return httpx.get(f"{server.base_url}/metrics", timeout=60).raise_for_status().text


def observe(
    model_directory: Path,
    log_dir: Path,
    arguments: tuple[str, ...],
    look: Callable[[Server], Observed],
    **environment: str,
) -> Observed:
    with serve(
        model_directory,
        log_dir / "serve.log",
        scheduler="sparksched",
        is_preloaded=True,
        environment={"SPARKSCHED_STRICT": "1", **environment},
        arguments=arguments,
    ) as server:
        work(server)
        return look(server)


def look_at_all(server: Server, num_api_servers: int) -> Observed:
    """Look at a server that works, and then at the same when it is idle."""
    with terminal(server.base_url, "--interval", "0.5") as screen:
        screen.wait_for("API servers lost")
        work(server)
        screen.wait_for("API servers lost")
    server.wait_until_idle()
    once = piped(server.base_url, "--once", "--interval", "0.5")
    assert once.returncode == 0, once.stderr
    assert screen.longest_line <= COLUMNS
    assert server.metric("sparksched:requests_running") == 0
    assert server.metric("sparksched:requests_waiting") == 0
    # The step that tells the model runner of the last ends may be still to come.
    wait_until(lambda: len(set(counts(server))) == 1, "for the last step")
    num_scheduled, _ = counts(server)
    assert num_scheduled > 0
    # Each API server with requests in a step counts it.
    num_iterations = server.metric("vllm:iteration_tokens_total_count")
    assert num_scheduled / 2 <= num_iterations <= num_scheduled * num_api_servers
    assert server.metric("sparksched:rescues_total") == 0
    port = httpx.URL(server.base_url).port
    assert f"http://localhost:{port}" in {it.url for it in find_servers(card.find())}
    return Observed(scrape(server), once.stdout, screen.text)


def counts(server: Server) -> list[float]:
    """Return how many steps are scheduled, and how many are over."""
    return [server.metric(f"sparksched:{name}") for name in STEP_SERIES]


@pytest.mark.parametrize("num_api_servers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_server_shows_what_its_engine_does(
    num_api_servers: int, model_directory: Path, tmp_path: Path
) -> None:
    arguments = (f"--api-server-count={num_api_servers}",)
    look = functools.partial(look_at_all, num_api_servers=num_api_servers)
    observed = observe(model_directory, tmp_path, arguments, look)
    assert observed.page.count("sparksched:info{") == 1
    assert observed.page.count("# TYPE sparksched:schedule_seconds histogram") == 1
    assert 'transport="shm"' in observed.page
    for shown in (observed.screen, observed.top):
        assert "scheduler: sparksched, shared memory" in shown
        assert "gap to next schedule" in shown
    check_examples(observed.page)


def check_examples(page: str) -> None:
    """Check that alerts and dashboard ask for series and labels that the page has."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in expressions():
        asked = re.findall(r"((?:sparksched|vllm):\w+)(?:\{([^}]*)\})?", expression)
        assert asked, expression
        for name, matchers in asked:
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= labels[name], (name, matchers)


def expressions() -> Iterator[str]:
    alerts = yaml.safe_load((EXAMPLES / "prometheus-alerts.yml").read_text())
    yield from (rule["expr"] for group in alerts["groups"] for rule in group["rules"])
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@pytest.mark.full
def test_a_server_without_statistics_says_only_what_schedules(
    model_directory: Path, tmp_path: Path
) -> None:
    def look(server: Server) -> Observed:
        once = piped(server.base_url, "--once", "--interval", "0.5")
        assert once.returncode == 0, once.stderr
        return Observed(scrape(server), once.stdout)

    observed = observe(
        model_directory, tmp_path, ("--disable-log-stats",), look, SPARKSCHED_TRANSPORT="zmq"
    )
    names = {line.split("{")[0] for line in observed.page.splitlines() if "sparksched:" in line}
    assert {name for name in names if not name.startswith("#")} == {"sparksched:info"}
    assert "scheduler: sparksched, ZMQ" in observed.top
