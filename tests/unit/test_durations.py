"""Durations of tests: what is measured, recorded, and told as grown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import durations
from tests.durations import Durations

pytest_plugins = "pytester"


def test_what_has_grown_is_named_and_noise_is_not() -> None:
    then = Durations({"a.py::f": (1.0, 10.0), "a.py::g": (1.0, 2.0), "a.py::h": (1.0, 20.0)})
    now = Durations(
        {
            "a.py::f": (1.0, 15.1),
            "a.py::g": (9.0, 4.9),
            "a.py::h": (1.0, 29.0),
            "b.py::new": (1, 5),
        },
        {"server": (1.0, 4.1)},
    )
    assert durations.grown(now, then) == [
        "a.py::f: 15.1 processor seconds, recorded 10.0",
        "b.py::new: 5.0 processor seconds, recorded 1.0",
        "server: 4.1 processor seconds, recorded 1.0",
    ]


def test_a_record_keeps_files_that_did_not_run_and_the_other_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        Path(name).touch()
    path = tmp_path / "durations.json"
    first = Durations(
        {"a.py::f": (1.04, 2.0), "a.py::g": (3.0, 0.1), "b.py::f": (1.0, 1.0), "c.py::f": (9, 9)},
        {"server": (2.0, 1.0)},
    )
    durations.write("processes", first, path)
    durations.write("spark", Durations({"a.py::f": (7.0, 7.0)}), path)
    durations.write("processes", Durations({"a.py::f": (4.0, 5.0), "a.py::g": (0.9, 0.9)}), path)
    assert durations.read("processes", path) == Durations(
        {"a.py::f": (4.0, 5.0), "b.py::f": (1.0, 1.0)}, {"server": (2.0, 1.0)}
    )
    assert durations.read("spark", path).tests == {"a.py::f": (7.0, 7.0)}
    assert '   "a.py::f": [4.0, 5.0],\n' in path.read_text()


def test_a_fixture_of_the_module_counts_for_itself(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"""
        import sys, time
        sys.path.insert(0, {str(Path(durations.__file__).parent.parent)!r})
        from pathlib import Path
        from tests import durations

        def pytest_addoption(parser):
            parser.addoption("--runtime", default="processes")
            parser.addoption("--record-durations", action="store_true")

        def pytest_configure(config):
            time.told = 0.0
            durations.Recorder._now = lambda self: (time.told, 2 * time.told)
            durations.write.__defaults__ = durations.read.__defaults__ = (Path("recorded.json"),)
            config.pluginmanager.register(durations.Recorder(config), "durations")
        """
    )
    pytester.makepyfile(
        test_it="""
        import time, pytest

        @pytest.fixture(scope="module")
        def inner(): time.told += 1.1

        @pytest.fixture(scope="module")
        def outer(inner): time.told += 1.4

        @pytest.fixture
        def own(outer): time.told += 0.6

        @pytest.mark.parametrize("times", [1, 2])
        def test_first(own, times): time.told += 0.1

        def test_second(outer): pass
        """
    )
    pytester.runpytest_subprocess("-p", "no:randomly", "--record-durations").assert_outcomes(
        passed=3
    )
    found = durations.read("processes", pytester.path / "recorded.json")
    assert found.fixtures == {"inner": (1.1, 2.2), "outer": (1.4, 2.8)}
    assert found.tests == {"test_it.py::test_first": (1.4, 2.8)}
