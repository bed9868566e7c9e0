"""The models' checker: what is as expected, what is not, and what a machine without TLC is told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from models import check as checker
from models.check import Check, Mistake, Model, Result, read, report, run
from oncely import artifacts

COUNTER = """---- MODULE Counter ----
EXTENDS Integers
CONSTANTS Most, Mistake
VARIABLE n
Init == n = 0
Next == n < Most + (IF Mistake = "one too many" THEN 1 ELSE 0) /\\ n' = n + 1
Spec == Init /\\ [][Next]_n /\\ WF_n(Next)
Small == n <= Most
Grows == [][n' > n]_n
Ends == <>(n = Most)
====
"""
CHAIRS = """---- MODULE Chairs ----
EXTENDS Integers, FiniteSets, TLC
CONSTANTS Guests, Chairs, Mistake
VARIABLES sits, times
Init == sits = {} /\\ times = 0
Next == \\/ sits = {} /\\ \\E g \\in Guests, c \\in Chairs : sits' = {<<g, c>>} /\\ times' = 1
        \\/ sits # {} /\\ times' = 2 /\\ UNCHANGED sits
Spec == Init /\\ [][Next]_<<sits, times>>
One == Cardinality(sits) <= 1
View == <<sits>>
====
"""
MODEL = Model(
    "Counter",
    ("Small",),
    ("Grows", "Ends"),
    {"Most": "3"},
    ({"Most": "5"},),
    ({"Most": "50"},),
    (Mistake("one too many"),),
)
CLEAN, MISTAKEN = Check(MODEL, {"Most": "3"}), Check(MODEL, {"Most": "3"}, "one too many")

NOTHING_FAILS = """Starting... (2026-11-22 11:00:00)
Model checking completed. No error has been found.
12 states generated, 7 distinct states found, 0 states left on queue.
"""
VIOLATED = """Starting... (2026-11-22 11:00:00)
Error: Invariant Small is violated.
Error: The behavior up to this point is:
State 1: <Initial predicate>
n = 4
1,234 states generated, 1,007 distinct states found, 3 states left on queue.
"""


@pytest.fixture
def fresh_java() -> Iterator[None]:
    artifacts.java.cache_clear()
    yield
    artifacts.java.cache_clear()


def said(check: Check, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and what was printed of one run of TLC."""
    code = report([check], lambda _: read(text, 1.5), 1)
    return code, capsys.readouterr().out


def test_nothing_fails_without_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(CLEAN, NOTHING_FAILS, capsys)
    assert code == 0
    assert "ok    Counter" in out
    assert "7 states" in out
    assert "1 runs, 0 not as expected" in out


def test_a_property_that_fails_without_a_mistake_is_an_error_and_its_trace_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out = said(CLEAN, VIOLATED, capsys)
    assert code == 1
    assert "WRONG Counter" in out
    assert "1,007 states" in out
    assert "State 1: <Initial predicate>\nn = 4" in out


def test_a_mistake_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(MISTAKEN, VIOLATED, capsys)
    assert code == 0
    assert "mistake: one too many" in out
    assert "Small" in out
    assert "State 1" not in out


def test_a_mistake_that_is_not_found_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(MISTAKEN, NOTHING_FAILS, capsys)
    assert code == 1
    assert "WRONG Counter" in out
    assert "nothing fails" in out


@pytest.mark.parametrize("check", [CLEAN, MISTAKEN])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("java.lang.OutOfMemoryError: Java heap space\n", "OutOfMemoryError"),
        ("Error: The operator Nxt requires 1 arguments.\n", "operator Nxt"),
        ("", "TLC has said nothing"),
    ],
)
def test_a_failure_of_tlc_is_an_error_and_is_shown(
    check: Check, text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = said(check, text, capsys)
    assert code == 1
    assert "WRONG Counter" in out
    assert shown in out


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Error: Invariant Small is violated by the initial state:", "Small"),
        ("Error: Action property Grows is violated.", "Grows"),
        ("Error: Temporal properties were violated.", "a temporal property"),
    ],
)
def test_a_violation_is_named(line: str, name: str) -> None:
    assert read(f"{line}\n", 0.0).violated == name


def test_every_size_and_every_mistake_is_checked() -> None:
    usual = checker._checks(MODEL, deep=False)
    assert [(one.constants["Most"], one.mistake) for one in usual] == [
        ("3", None),
        ("5", None),
        ("3", "one too many"),
    ]
    deep = checker._checks(MODEL, deep=True)
    assert [(one.constants["Most"], one.mistake) for one in deep] == [("50", None)]


def test_one_wrong_run_of_many_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {None: Result(None, 1, 0.0), "one too many": Result(None, 1, 0.0)}
    assert report([CLEAN, MISTAKEN, CLEAN], lambda one: answers[one.mistake], 2) == 1
    assert "3 runs, 1 not as expected" in capsys.readouterr().out


def test_tlc_itself(tmp_path: Path) -> None:
    (jar, *_), java = artifacts.resolve(checker.TLC), artifacts.java()
    (tmp_path / "Counter.tla").write_text(COUNTER)
    clean = run(CLEAN, jar, java, tmp_path)
    assert (clean.violated, clean.states, clean.failure) == (None, 4, "")
    found = run(MISTAKEN, jar, java, tmp_path)
    assert (found.violated, found.failure) == ("Small", "")
    assert "State 5" in found.trace
    (tmp_path / "Counter.tla").write_text(COUNTER.replace("<>(n = Most)", "<>(n = Nowhere)"))
    broken = run(MISTAKEN, jar, java, tmp_path)
    assert broken.violated is None
    assert "Nowhere" in broken.failure


def test_symmetric_states_and_states_of_one_view_are_looked_at_once(tmp_path: Path) -> None:
    (jar, *_), java = artifacts.resolve(checker.TLC), artifacts.java()
    (tmp_path / "Chairs.tla").write_text(CHAIRS)
    constants = {"Guests": '{"a", "b"}', "Chairs": '{"c", "d"}'}
    every = Model("Chairs", ("One",), (), constants, (), (), ())
    symmetric = replace(every, symmetric=("Guests", "Chairs"))
    states = [
        run(Check(one, constants), jar, java, tmp_path).states
        for one in (every, symmetric, replace(symmetric, view="View"))
    ]
    # Nobody sits; or one of two guests on one of two chairs, for the first or second time.
    assert states == [1 + 4 + 4, 1 + 1 + 1, 1 + 1]


def test_a_registry_that_can_not_be_reached_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        settings = tmp_path / "settings.xml"
        settings.write_text(
            '<ivysettings><settings defaultResolver="central"/><resolvers><ibiblio name="central"'
            f' m2compatible="true" root="http://127.0.0.1:{nobody.getsockname()[1]}/"/>'
            "</resolvers></ivysettings>"
        )
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("ONCELY_IVY_SETTINGS", str(settings))
        assert checker.main([]) == 2
    told = capsys.readouterr()
    assert f"can't be checked on this machine: the download of {checker.TLC} failed" in told.err
    assert "ONCELY_IVY_SETTINGS" in told.err
    assert told.out == ""


def test_a_machine_without_java_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fresh_java: None,
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert checker.main(["--only", "SqlLedger"]) == 2
    assert "Java 17+ is needed" in capsys.readouterr().err
