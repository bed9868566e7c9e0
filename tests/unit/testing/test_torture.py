"""The parts of `oncely torture` that need no server."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from oncely import Worker, WrongInput
from oncely.cli import semantics
from oncely.cli.verbs import Torture
from oncely.errors import Stopped
from oncely.testing import faults
from oncely.testing.faults import KillAt
from oncely.testing.torture import trial
from oncely.testing.torture.trial import Record

# -- records -------------------------------------------------------------------------------


def test_records_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    lines: list[dict[str, Any]] = [
        {"topic": "a", "key": "k", "value": {"id": 1}, "headers": {"user": 7}},
        {"topic": "b", "value": "text"},
        {"topic": "a", "value": None, "key": 3},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert trial.read(file, ("a", "b")) == [
        Record("a", b'{"id": 1}', b"k", [("user", b"7")]),
        Record("b", b"text", None, []),
        Record("a", None, b"3", []),
    ]
    file.write_text('{"value": 1}')
    assert trial.read(file, ("a",)) == [Record("a", b"1", None, [])]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: no JSON"),
        ("\n[1]", "line 2: found"),
        ('{"topic": "a", "values": 1}', "line 1: found"),
        ('{"value": 1}', "topic None has no handler"),
        ('{"topic": "c"}', "topic 'c' has no handler"),
        ('{"topic": "a", "headers": []}', None),
        ('{"topic": "a", "headers": [1]}', "headers are an object"),
        ("", "no records"),
    ],
)
def test_records_that_do_not_fit_are_named(tmp_path: Path, text: str, said: str | None) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(text)
    if said is None:
        assert len(trial.read(file, ("a", "b"))) == 1
        return
    with pytest.raises(WrongInput, match=said):
        trial.read(file, ("a", "b"))


def test_samples_have_a_value_for_each_column() -> None:
    columns = {"id": pa.int64(), "name": pa.string(), "good": pa.bool_(), "day": pa.date32()}
    columns |= {"at": pa.timestamp("us"), "parts": pa.list_(pa.int8())}
    found = trial.samples(["a", "b"], pa.schema(columns), raw=False)
    assert [one.topic for one in found] == ["a"] * 5 + ["b"] * 5
    assert json.loads(found[1].value or b"") == {
        "id": 1, "name": "name 1", "good": False, "at": "2026-01-01T00:00:01Z",
        "day": "2026-01-02", "parts": None,
    }  # fmt: skip
    (raw, *_) = trial.samples(["a"], pa.schema([]), raw=True)
    assert raw == Record("a", b'{"id": 0}', b"0")


# -- kills ---------------------------------------------------------------------------------


class Session:
    """A session whose calls are noted."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def execute(self, _: str) -> None:
        """Any statement."""

    def begin(self) -> None:
        """BEGIN."""

    def commit(self) -> None:
        """COMMIT."""

    @contextmanager
    def lend(self, _: float) -> Any:
        yield self

    def wait(self, what: str, *, interval: float) -> None:
        assert interval
        self.waits.append(what)


def transaction(plan: KillAt, inner: Session) -> None:
    session: Any = faults._Killing(inner, plan)  # type: ignore[arg-type]
    session.execute("SELECT 1")
    session.begin()
    with session.lend(1.0) as tx:
        tx.wait("one", interval=1.0)
        tx.wait("two", interval=1.0)
    session.execute("UPDATE positions")
    session.commit()


CALLS = ["LEND", *["a statement of the function"] * 2, "GIVE BACK", "UPDATE positions", "COMMIT"]


def test_the_statements_of_a_handler_are_calls() -> None:
    plan, inner = KillAt(-1, armed_by=faults.LEND), Session()
    transaction(plan, inner)
    assert plan.counter.seen == CALLS
    assert inner.waits == ["one", "two"]


def test_a_kill_comes_before_or_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        """In the place of SIGKILL."""

    def kill() -> None:
        raise Killed

    monkeypatch.setattr(faults, "kill_self", kill)
    for call, after, waits in ((1, False, 0), (1, True, 1), (2, False, 1), (2, True, 2)):
        inner = Session()
        with pytest.raises(Killed):
            transaction(KillAt(call, after=after, armed_by=faults.LEND), inner)
        assert len(inner.waits) == waits


def test_a_worker_that_is_relocated_leads_to_no_real_server() -> None:
    worker = Worker(
        "billing",
        brokers="real:9092",
        url="postgresql://me:secret@real/db",
        source={"start": "latest", "kafka": {"fetch.min.bytes": 5}},
        worker={"instance": "one", "max_records": 7},
    )
    worker.handle("orders")(lambda batch, tx: None)
    worker.relocate("local:1", "postgresql://local/db", "group")
    settings = worker.pipeline.settings
    assert (settings.source.brokers, settings.source.start) == ("local:1", "earliest")
    assert worker.pipeline.source.kafka == {}
    assert settings.sink.url.get_secret_value() == "postgresql://local/db"  # type: ignore[union-attr]
    given = settings.worker
    assert (given.group, given.instance, given.max_records) == ("group", None, 7)
    worker.relocate("local:1", "postgresql://local/other", "another")
    assert worker.pipeline.settings.worker.group == "another"


# -- trials --------------------------------------------------------------------------------


class Database:
    """In the place of processes and servers: after the kill at ``damaged`` a row is doubled."""

    def __init__(self, damaged: int = -1) -> None:
        self.damaged, self.reference = damaged, ("a", "a", "b")
        self.orders: list[list[tuple[str, int, bool]]] = []
        self.works = True

    def stage(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> trial.Stage:
        monkeypatch.setattr(trial.Stage, "database", lambda _, name: name)
        monkeypatch.setattr(trial.Stage, "rows", lambda _, url: self.rows(url))
        monkeypatch.setattr(trial, "_Order", lambda *_: Order(self))
        return trial.Stage("m:app", "b", str, tmp_path, "", ["t"])

    def rows(self, url: str) -> dict[str, Counter[str]]:
        found = Counter(self.reference if self.orders and self.works else ("by the setup",))
        if url.startswith(f"step{self.damaged}_"):
            found = Counter([*self.reference[1:], "x", "x"])
        return {"t": found}


class Order:
    def __init__(self, database: Database) -> None:
        self.works: list[tuple[str, int, bool]] = []
        database.orders.append(self.works)

    def add(self, url: str, call: int = -1, after: bool = False) -> None:
        self.works.append((url, call, after))

    def run(self) -> bool:
        return self.works[-1][1] >= 0

    def seen(self, _: int) -> list[str]:
        return [*CALLS, "LEND", "COMMIT", "SELECT positions"]


def test_each_kill_is_followed_by_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = Database()
    stage = database.stage(monkeypatch, tmp_path)
    expected, calls = trial.reference(stage)
    assert calls == [*CALLS, "LEND", "COMMIT"], "nothing that follows the last commit"
    database.orders.clear()
    outcomes = trial.run(stage, expected, calls[:2], lambda _: None)
    assert database.orders == [
        [("step0_0", 0, False)],
        [("step0_0", -1, False), ("step0_1", 0, True)],
        [("step0_1", -1, False), ("step1_0", 1, False)],
        [("step1_0", -1, False), ("step1_1", 1, True)],
        [("step1_1", -1, False)],
    ]
    assert [(one.step, one.after, one.killed, one.is_good) for one in outcomes] == [
        (0, False, True, True), (0, True, True, True),
        (1, False, True, True), (1, True, True, True),
    ]  # fmt: skip


def test_what_differs_is_counted_and_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(damaged=1)
    stage = database.stage(monkeypatch, tmp_path)
    expected, calls = trial.reference(stage)
    outcomes = trial.run(stage, expected, calls, lambda _: None)
    bad = [one for one in outcomes if not one.is_good]
    assert [(one.step, one.after) for one in bad] == [(1, False), (1, True)]
    assert bad[0].as_json() == {
        "step": 1, "call": "a statement of the function", "killed": "before",
        "lost": {"t": 1}, "surplus": {"t": 2},
    }  # fmt: skip
    capsys.readouterr()
    assert semantics._told(outcomes, as_json=True) == 1
    assert len(json.loads(capsys.readouterr().out)) == 16
    good = [one for one in outcomes if one.is_good]
    assert semantics._told(good, as_json=False) == 0
    assert "COMMIT" in capsys.readouterr().out


def test_a_run_that_changes_nothing_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = Database()
    database.works = False
    with pytest.raises(WrongInput, match="have changed nothing in t"):
        trial.reference(database.stage(monkeypatch, tmp_path))


def test_runs_that_differ_without_faults_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = Database()
    stage = database.stage(monkeypatch, tmp_path)
    several = iter([{"t": Counter()}, {"t": Counter("a")}, {"t": Counter("b")}])
    monkeypatch.setattr(trial.Stage, "rows", lambda *_: next(several))
    with pytest.raises(WrongInput, match=r"(?s)differ in t, .*--ignore"):
        trial.reference(stage)


def test_runs_with_other_numbers_of_rows_prove_work_after_the_transaction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread of the handler is cut off by the end of the last run's process."""
    stage = Database().stage(monkeypatch, tmp_path)
    several = iter([{"t": Counter()}, {"t": Counter("aab")}, {"t": Counter("a")}])
    monkeypatch.setattr(trial.Stage, "rows", lambda *_: next(several))
    with pytest.raises(Stopped, match=r"3 and 1 rows in t: .* not all in their transaction") as why:
        trial.reference(stage)
    assert why.value.exit_code == 1


def test_a_command_without_a_table_is_refused() -> None:
    with pytest.raises(WrongInput, match="no table"):
        semantics.torture_app(Torture(app_path="m:app"))


def test_a_worker_that_fails_by_itself_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not taken for a kill."""

    class Process(SimpleNamespace):
        def wait(self, _: float) -> int:
            return 1

        def kill(self) -> None:
            pass

        def log_tail(self) -> str:
            return "error: no table bills"

    monkeypatch.setattr(trial, "Process", lambda name, *_, **__: Process(name=name))
    stage = trial.Stage("m:app", "b", str, tmp_path, "", ["t"])
    order = trial._Order(stage, "trial0")
    order.add("postgresql://me:secret@h/d", 3)
    with pytest.raises(trial.Stopped, match=r"(?s)ended with code 1.*no table bills") as caught:
        order.run()
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
