"""`sparksched top` without an address: what runs on this machine, each by itself."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from top.terminal import COLUMNS, piped

from .clients import connected, front_end, new_request, prompt_of, run_async
from .conftest import make_config
from .engines import running_engine, wait_until
from .test_queue_timeout import page_of

pytestmark = pytest.mark.timeout(180)

LONG = "/a/model/in/a/folder/whose/path/is/longer/than/the/screen/is/wide/and/goes/on"
LOOK = ("--once", "--interval", "0.2")


def test_two_models_are_not_added_up(model_directory: Path) -> None:
    short, long = (make_config(model_directory, served_model_name=name) for name in ("short", LONG))

    async def run() -> None:
        async with connected(short, one) as reader:
            await reader.client.pause_scheduler_async("keep")
            await reader.add(new_request("a", prompt_of(1), 2), new_request("b", prompt_of(1), 2))
            await asyncio.to_thread(look)

    def look() -> None:
        wait_until(lambda: page_of(one).total("sparksched:requests_waiting") == 2)
        found = objects()
        rows = {it["model_name"]: it for it in found if it["pid"] in (one.pid, two.pid)}
        assert {name: it["pid"] for name, it in rows.items()} == {"short": one.pid, LONG: two.pid}
        assert [rows[it]["interval"]["waiting"] for it in ("short", LONG)] == [2, 0]

        shown = piped(*LOOK).stdout
        assert max(map(len, shown.splitlines())) <= COLUMNS
        assert "…" not in shown
        words = [line.split() for line in shown.splitlines()]
        assert ["short", "0", str(one.pid)] in [it[:3] for it in words]
        (row,) = [it for it in words if str(two.pid) in it]
        assert LONG.startswith(row[0])
        assert row[1:3] == ["0", str(two.pid)]

        (interval,) = objects("--pid", str(two.pid))
        assert (interval["model_names"], interval["waiting"]) == ([LONG], 0)
        missing = piped(*LOOK, "--pid", "1")
        assert missing.returncode == 1
        assert "process 1 is no engine with sparksched; there are: " in missing.stderr
        assert str(one.pid) in missing.stderr

    with front_end(), running_engine(short) as one, running_engine(long) as two:
        run_async(run())


def objects(*arguments: str) -> list[dict[str, Any]]:
    looked = piped(*LOOK, "--json", *arguments)
    assert looked.returncode == 0, looked.stderr
    value = json.loads(looked.stdout)
    return value if isinstance(value, list) else [value]
