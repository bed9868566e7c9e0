"""Wall and processor seconds of tests and fixtures, compared with those recorded in the repository.

``tests/durations.json`` has, by runtime, each test function (its parameters added up) and each
fixture of a wider scope than a test that takes a second or more. A run names at its end what has
grown; ``pytest --record-durations`` writes the record anew for the tests that ran.

Wall time says little on a busy machine. Processor time is that of a control group (cgroup v2,
Linux, which needs write access to the hierarchy): each process of the run moves itself into a group
of its own, which all processes that it starts inherit, JVMs and killed children included. Without
control groups only wall time is known, and nothing is compared. Servers that the processes of a
run share count for none of them. A fixture of a wider scope does not count for the test that asks
for it first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("durations.json")

_AT_LEAST = 1.0
"""Seconds below which neither test nor fixture is recorded."""
_GROWN, _GROWN_SECONDS = 1.5, 3.0
"""A test has grown when its processor time is this many times the recorded one, and larger by
these seconds: JVMs compile in the background, now during one test and now during another."""
_SHOWN = 20
_TEST, _FIXTURE = "duration of the test", "duration of a fixture: "

Seconds = tuple[float, float]
"""Wall seconds and processor seconds."""


class ControlGroup:
    """A control group with this process in it.

    Raises:
        OSError, StopIteration: there are no control groups here, or none can be made.
    """

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
        """Leave the group, with the processes that are left in it, and remove it."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # a process has just been started in it
            self.folder.rmdir()


@dataclass
class Durations:
    """Sums by name.

    Attributes:
        tests: seconds by file and test function.
        fixtures: seconds by fixture.
    """

    tests: dict[str, Seconds] = field(default_factory=dict)
    fixtures: dict[str, Seconds] = field(default_factory=dict)

    def add(self, node: str, name: str, seconds: Seconds) -> None:
        """Add the seconds of a property that a report has."""
        if name == _TEST:
            _add(self.tests, node.partition("[")[0], seconds)
        elif name.startswith(_FIXTURE):
            _add(self.fixtures, name.removeprefix(_FIXTURE), seconds)


def _add(sums: dict[str, Seconds], name: str, seconds: Seconds) -> None:
    wall, processor = sums.get(name, (0.0, 0.0))
    sums[name] = (wall + seconds[0], processor + seconds[1])


def grown(found: Durations, recorded: Durations) -> list[str]:
    """A line for each test or fixture whose processor time has grown."""
    lines = []
    for now, then in ((found.tests, recorded.tests), (found.fixtures, recorded.fixtures)):
        for name, (_, seconds) in sorted(now.items(), key=lambda one: -one[1][1]):
            before = then.get(name, (0.0, _AT_LEAST))[1]
            if seconds > before * _GROWN and seconds > before + _GROWN_SECONDS:
                lines.append(f"{name}: {seconds:.1f} processor seconds, recorded {before:.1f}")
    return lines


def read(runtime: str, path: Path = RECORD) -> Durations:
    """The durations that are recorded for a runtime."""
    if not path.exists():
        return Durations()
    stored = json.loads(path.read_text()).get(runtime, {})
    return Durations(
        *(
            {name: (wall, processor) for name, (wall, processor) in stored.get(part, {}).items()}
            for part in ("tests", "fixtures")
        )
    )


def write(runtime: str, found: Durations, path: Path = RECORD) -> None:
    """Record what was found; functions of files that did not run keep their record."""
    ran = {name.partition("::")[0] for name in found.tests}
    kept = {
        name: seconds
        for name, seconds in read(runtime, path).tests.items()
        if name.partition("::")[0] not in ran and Path(name.partition("::")[0]).exists()
    }
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored[runtime] = {
        "tests": _rounded(kept | found.tests),
        "fixtures": _rounded(read(runtime, path).fixtures | found.fixtures),
    }
    text = json.dumps(stored, indent=1, sort_keys=True)
    path.write_text(re.sub(r"\[\s+(\S+),\s+(\S+)\s+\]", r"[\1, \2]", text) + "\n")


def _rounded(sums: dict[str, Seconds]) -> dict[str, list[float]]:
    return {
        name: [round(wall, 1), round(processor, 1)]
        for name, (wall, processor) in sums.items()
        if max(wall, processor) >= _AT_LEAST
    }


class Recorder:
    """Measures tests and fixtures in this process, and collects what all processes have measured.

    Attributes:
        found: the sums, complete at the end of the process that shows the summary.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.found = Durations()
        self._runtime: str = config.getoption("--runtime")
        self._record: bool = config.getoption("--record-durations")
        try:
            self._group: ControlGroup | None = ControlGroup()
        except (OSError, StopIteration):
            self._group = None
        self._before = self._now()
        self._apart: Seconds = (0.0, 0.0)
        self._fixtures: dict[str, Seconds] = {}

    def _now(self) -> Seconds:
        return time.monotonic(), self._group.seconds() if self._group else 0.0

    def _since(self, before: Seconds) -> Seconds:
        wall, processor = self._now()
        return wall - before[0], processor - before[1]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        before, within = self._now(), self._apart
        yield
        if fixturedef.scope == "function":
            return
        wall, processor = self._since(before)
        # Fixtures that this one has asked for meanwhile count for themselves.
        own = (wall - self._apart[0] + within[0], processor - self._apart[1] + within[1])
        self._apart = (within[0] + wall, within[1] + processor)
        _add(self._fixtures, fixturedef.argname, own)

    def pytest_runtest_logstart(self) -> None:
        self._before = self._now()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: object) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()
        if report.when != "teardown":
            return
        wall, processor = self._since(self._before)
        own = (wall - self._apart[0], processor - self._apart[1])
        report.user_properties.append((_TEST, own))
        report.user_properties += [(_FIXTURE + name, one) for name, one in self._fixtures.items()]
        self._apart, self._fixtures = (0.0, 0.0), {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            for name, seconds in report.user_properties:
                if name.startswith((_TEST, _FIXTURE)):
                    self.found.add(report.nodeid, name, seconds)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        line = terminalreporter.write_line
        terminalreporter.section("wall and processor seconds")
        for title, sums in (("tests", self.found.tests), ("fixtures", self.found.fixtures)):
            wall, processor = (sum(one[at] for one in sums.values()) for at in (0, 1))
            line(f"{wall:8.1f} {processor:8.1f} {title}")
        files: dict[str, Seconds] = defaultdict(lambda: (0.0, 0.0))
        for name, seconds in self.found.tests.items():
            _add(files, name.partition("::")[0], seconds)
        for sums in (files, self.found.tests, self.found.fixtures):
            line("")
            for name, (wall, processor) in sorted(
                sums.items(), key=lambda one: -(one[1][1] or one[1][0])
            )[:_SHOWN]:
                line(f"{wall:8.1f} {processor:8.1f} {name}")
        if self._group is None:
            line("Processor seconds are unknown: no control group could be made")
        elif lines := grown(self.found, read(self._runtime)):
            terminalreporter.section("have grown since they were recorded")
            for one in lines:
                line(one)
        if self._record:
            write(self._runtime, self.found)

    def pytest_unconfigure(self) -> None:
        if self._group:
            self._group.close()
