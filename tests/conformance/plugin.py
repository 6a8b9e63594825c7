"""A pytest plugin: vLLM's tests on sparksched, and what came of them.

It is loaded before the tests are collected, so that they import our classes under the names of
vLLM's schedulers.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from sparksched.compat import releases

from . import census, expected, names, not_applicable
from .census import CENSUS
from .report import Built, Report, Verdict, judge
from .scheduler import MirroredAsyncScheduler, MirroredScheduler, accept_fallbacks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what writes the list of expected outcomes anew."""
    parser.addoption("--update", action="store_true", help="write the list of expected outcomes")
    parser.addoption("--stock", action="store_true", help="use vLLM's own scheduler")
    parser.addoption("--short", action="store_true", help="only what the list says that it passes")


def pytest_configure(config: pytest.Config) -> None:
    """Put our classes in the place of vLLM's, unless the tests start engines, which choose."""
    on_stock, built = config.option.stock, census.IN_ENGINES
    if not (on_stock or config.pluginmanager.hasplugin("conformance.engine")):
        built = CENSUS
        census.start()
        names.bind(MirroredScheduler, MirroredAsyncScheduler)
        accept_fallbacks()
    config.pluginmanager.register(Conformance(built, on_stock=on_stock), "conformance")


class Conformance:
    """The verdicts on one session's tests."""

    def __init__(self, built: Built, *, on_stock: bool) -> None:
        self._built = built
        self._on_stock = on_stock
        self._release = releases.installed()
        self._table = not_applicable.read(self._release, on_stock=on_stock)
        self._report = Report()
        self._list = expected.path_of(self._release)
        self._known = expected.read(self._list) if self._list.exists() else {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        CENSUS.reset()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        phase: pytest.TestReport = yield
        if phase.when == "call" or not phase.passed:
            self._judge(item.nodeid, phase)
        return phase

    def _judge(self, nodeid: str, phase: pytest.TestReport) -> None:
        """Enter a test into the report, and let pytest know of it what the report says."""
        listed = self._table.reason(nodeid)
        verdict, reason = judge(phase.outcome, self._built, listed)
        if phase.skipped:
            reason = f"vLLM skips it: {_skip_reason(phase)}"
        self._report.enter(nodeid, verdict, reason)
        if verdict is Verdict.NOT_APPLICABLE and phase.failed:
            phase.outcome = "skipped"
            phase.wasxfail = reason
        elif verdict is Verdict.LISTED_BUT_PASSES:
            phase.outcome = "failed"
            phase.longrepr = f"it passes, but {not_applicable.FILE.name} says: {listed}"

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what says nothing about sparksched, if time is short and that is known."""
        if config.option.short and self._known:
            items[:] = [it for it in items if not_applicable.short_name(it.nodeid) in self._known]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        nodeids = [item.nodeid for item in session.items]
        is_complete = not (session.config.option.keyword or session.config.option.short)
        if is_complete:
            self._report.unknown_names = self._table.unknown_names(nodeids)
        known = self._known
        if self._on_stock:  # it may pass more
            known = dict.fromkeys(known, Verdict.PASSED.value)
            nodeids = [it for it in nodeids if not_applicable.short_name(it) in known]
        outcomes = expected.outcomes_of(self._report.verdicts)
        if session.config.option.update and is_complete and not self._on_stock:
            expected.write(self._list, expected.merged(known, outcomes, nodeids))
        else:
            self._report.changes = expected.changes(known, outcomes, nodeids)
            if is_complete:
                self._report.unknown_names += expected.missing(known, nodeids)
        if self._report.is_wrong and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("vLLM's own tests on sparksched")
        terminalreporter.write_line(self._report.text())


def _skip_reason(phase: pytest.TestReport) -> str:
    if hasattr(phase, "wasxfail"):
        return str(phase.wasxfail)
    return str(phase.longrepr[2]) if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
