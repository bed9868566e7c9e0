"""Processor seconds of each test: ``pytest -p tests.processor_time``.

Wall time says little on a busy machine. Each process of the run moves itself into a control group
of its own (cgroup v2, Linux, needs write access to the hierarchy), which all processes that it
starts inherit, JVMs and killed children included, and reads the group's ``cpu.stat`` after each
test. The start of a fixture counts for the first test that asks for it; servers that the
processes of a run share count for the run.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHOWN = 40
_PROPERTY = "processor_seconds"


class Group:
    """A control group with this process in it."""

    def __init__(self) -> None:
        root = next(
            Path(line.split()[1])
            for line in Path("/proc/mounts").read_text().splitlines()
            if line.split()[2] == "cgroup2"
        )
        own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        self.parent = root / own
        self.folder = self.parent / f"oncely-tests-{os.getpid()}"
        self.folder.mkdir()
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        """Processor seconds that were used in the group so far, user and system."""
        stat = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
        return int(stat["usage_usec"]) / 1e6

    def close(self) -> None:
        """Leave the group, with whoever is left in it, and remove it."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # a process has just been started in it
            self.folder.rmdir()


class ProcessorTime:
    """Reads the group after each test, and shows the sums at the end of the run."""

    def __init__(self) -> None:
        self._group = Group()
        self._before = self._group.seconds()
        self._tests: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: object) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()
        if report.when == "teardown":
            now = self._group.seconds()
            report.user_properties.append((_PROPERTY, now - self._before))
            self._before = now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                self._tests[report.nodeid] = float(str(value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, float] = defaultdict(float)
        for test, seconds in self._tests.items():
            files[test.partition("::")[0]] += seconds
        write = terminalreporter.write_line
        terminalreporter.section("processor seconds")
        write(f"{sum(files.values()):8.1f} all tests, {self._group.seconds():.1f} in the process")
        for title, found in (("files", files), ("tests", self._tests)):
            terminalreporter.section(f"processor seconds: {title}")
            for name, seconds in sorted(found.items(), key=lambda one: -one[1])[:_SHOWN]:
                write(f"{seconds:8.1f} {name}")

    def pytest_unconfigure(self) -> None:
        self._group.close()


def pytest_configure(config: pytest.Config) -> None:
    """Account in this process, be it the only one, xdist's controller or one of its workers."""
    config.pluginmanager.register(ProcessorTime(), "processor-time")
