"""Handlers: what they do with their transaction takes effect with the positions, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import dict_row

from oncely.clients.sql import postgres_lent
from oncely.clients.sql.session import close_all
from oncely.commit.by_key import ByKey
from oncely.core.batch import BudgetSpent, Chunk
from oncely.core.claim import NO_RECORDS, Claim, Counts, Fence
from oncely.core.lanes import lane_of
from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced, Stopped, TooManyRejects, WrongInput
from oncely.ledgers.sql.ledger import SqlLedger
from oncely.sinks.handlers.batch import Batch, Record
from oncely.sinks.handlers.sink import Handler, HandlersSink, OnError
from tests.contracts.looking import history, ids, positions, rejected
from tests.sinktools import (
    T0,
    T1,
    Place,
    Rec,
    at_t0,
    chunk,
    commit_all,
    losing_first_commit,
    numbered,
    open_sink,
    through,
    together,
)

SWIFT = OnError(retries=1, pause=lambda _: None)
STOPS = OnError(retries=1, reject=False, pause=lambda _: None)


@pytest.fixture
def rows(on_postgres: Place) -> Place:
    """A place with a table."""
    on_postgres.sql("CREATE TABLE rows (id bigint PRIMARY KEY, name text)")
    return on_postgres


def handled(
    place: Place, handler: Handler, on_error: OnError = SWIFT, **more: Any
) -> tuple[HandlersSink, Fence]:
    """A sink of one handler, opened."""
    ledger = SqlLedger("p", place.dialect, place.table("oncely_positions"))
    sink = HandlersSink(ledger, {"t": handler}, on_error, **more)
    return sink, open_sink(sink, {T0: 0, T1: 0}).fence


def insert(place: Place, record: Record, tx: psycopg.Connection) -> None:
    tx.execute(f"INSERT INTO {place.schema}.rows VALUES (%s, %s)", (record["id"], record["name"]))


def inserting(place: Place, *poison: int) -> Handler:
    """Inserts every record; a poison one is refused by the database."""

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for record in batch:
            insert(place, record, tx)
            if record.offset in poison:
                insert(place, record, tx)

    return handler


def test_what_a_handler_does_takes_effect_with_the_positions(rows: Place) -> None:
    calls: list[tuple[int, list[int], int]] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        calls.append((batch.partition, [one.offset for one in batch], batch.table.num_rows))
        with (
            tx.cursor(row_factory=dict_row) as cursor,
            cursor.copy(f"COPY {rows.schema}.rows FROM STDIN") as copy,
        ):
            for record in batch:
                copy.write_row((record["id"], record["name"]))
        with tx.transaction(force_rollback=True):
            tx.execute(f"DELETE FROM {rows.schema}.rows")
        with pytest.raises(psycopg.errors.UniqueViolation), tx.transaction():
            insert(rows, batch.records[0], tx)

    sink, fence = handled(rows, handler)
    records = [*numbered(0, 3), Rec(3), Rec(4, bad="no JSON")]
    commit_all(sink, chunk({T0: (0, records), T1: (0, numbered(10, 12))}), fence)
    assert calls == [(0, [0, 1, 2], 3), (1, [10, 11], 2)]
    assert ids(rows) == [0, 1, 2, 10, 11]
    assert positions(rows) == [(0, 5), (1, 12)]
    assert history(rows) == [
        (0, 0, 5, 1, "data", 5, 3, 1, 1),
        (1, 0, 12, 1, "data", 2, 2, 0, 0),
    ]
    assert rejected(rows) == [(4, "no JSON")]


# -- the transaction belongs to Oncely -----------------------------------------------------


def committing(place: Place, how: Callable[[psycopg.Connection], object]) -> Handler:
    """Inserts every record, ends its transaction, inserts them again, and commits."""

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        if len(batch) == 1:
            return
        inserting(place)(batch, tx)
        how(tx)
        inserting(place)(batch, tx)
        tx.execute("COMMIT")

    return handler


def quietly(how: Callable[[psycopg.Connection], object]) -> Callable[[psycopg.Connection], object]:
    """With every error caught."""

    def tried(tx: psycopg.Connection) -> None:
        with suppress(psycopg.Error):
            how(tx)

    return tried


ENDINGS = {
    "commit": lambda tx: tx.execute("COMMIT"),
    "commit and begin": lambda tx: tx.execute("COMMIT; BEGIN"),
    "commit and chain": lambda tx: tx.execute("COMMIT AND CHAIN"),
    "prepare": lambda tx: tx.execute("PREPARE TRANSACTION 'x'"),
    "rollback": lambda tx: tx.execute("ROLLBACK"),
    "rollback and begin": lambda tx: tx.execute("ROLLBACK; BEGIN"),
    "begin anew": lambda tx: tx.execute("ROLLBACK; BEGIN; SAVEPOINT oncely_lent"),
}


def test_a_transaction_that_is_ended_by_sql_stops_and_leaves_nothing(rows: Place) -> None:
    at = 0
    for name, how in ENDINGS.items():
        for ending in (how, quietly(how)):
            sink, fence = handled(rows, committing(rows, ending))
            commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)
            at += 1
            with pytest.raises(Stopped, match="has ended its transaction"):
                commit_all(sink, at_t0(at, numbered(at, at + 3)), fence)
            assert ids(rows) == [], name
            assert positions(rows) == [(0, at), (1, 0)]


def test_a_server_that_does_not_report_the_end_is_asked(
    rows: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL 12 and 13."""
    monkeypatch.setattr(postgres_lent, "_REPORTED", b"nothing")
    sink, fence = handled(rows, lambda *_: None)
    for at, name in enumerate(("rollback and begin", "begin anew")):
        commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)  # the session has the table now
        ending = replace(sink, handlers={"t": lambda _, tx, how=ENDINGS[name]: how(tx)})
        with pytest.raises(Stopped, match="has ended its transaction"):
            commit_all(ending, at_t0(at + 1, numbered(at + 1, at + 2)), fence)
    assert positions(rows) == [(0, 2), (1, 0)]


METHODS: dict[str, Callable[[psycopg.Connection], object]] = {
    "commit": lambda tx: tx.commit(),
    "rollback": lambda tx: tx.rollback(),
    "close": lambda tx: tx.close(),
    "set_autocommit": lambda tx: tx.set_autocommit(True),
    "autocommit": lambda tx: setattr(tx, "autocommit", True),
    "with tx": lambda tx: tx.__exit__(None, None, None),
}


def test_the_connection_can_t_end_its_transaction(rows: Place) -> None:
    ways = list(METHODS.values())

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        for how in ways:
            with pytest.raises(psycopg.ProgrammingError, match="its transaction"):
                how(tx)

    sink, fence = handled(rows, handler, STOPS)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1, 2]
    sink, fence = handled(rows, lambda _, tx: tx.commit(), STOPS)
    with pytest.raises(Stopped, match="a function can't commit its transaction"):
        commit_all(sink, at_t0(3, numbered(3, 4)), fence)


def test_a_caught_sql_error_is_an_error(rows: Place) -> None:
    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        quietly(lambda tx: insert(rows, batch.records[0], tx))(tx)
        quietly(lambda tx: tx.execute("SELECT 1"))(tx)

    sink, fence = handled(rows, handler, STOPS)
    with pytest.raises(Stopped, match=r"an SQL error was caught.*duplicate key"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == []
    assert positions(rows) == [(0, 0), (1, 0)]


def test_a_connection_that_is_kept_sends_nothing_more(rows: Place) -> None:
    kept: list[psycopg.Connection] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for one in kept:
            with pytest.raises(psycopg.InterfaceError, match="given back"):
                insert(rows, batch.records[0], one)
        kept.append(tx)

    sink, fence = handled(rows, handler)
    commit_all(sink, at_t0(0, numbered(0, 1)), fence)
    commit_all(sink, at_t0(1, numbered(1, 2)), fence)
    assert ids(rows) == []
    assert len(kept) == 2


def test_what_a_handler_changes_of_its_connection_is_not_the_ledgers(rows: Place) -> None:
    role = f"nobody_{rows.schema}"

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        tx.row_factory = dict_row  # type: ignore[assignment]
        tx.execute("SET search_path = pg_catalog")
        inserting(rows)(batch, tx)
        tx.execute(f"CREATE ROLE {role}")
        tx.execute(f"SET ROLE {role}")

    separator = "&" if "?" in rows.url else "?"
    unqualified = Place(f"{rows.url}{separator}options=-csearch_path%3D{rows.schema}")
    ledger = SqlLedger("p", unqualified.dialect, unqualified.table("oncely_positions"))
    sink = HandlersSink(ledger, {"t": handler}, STOPS)
    fence = open_sink(sink, {T0: 0}).fence
    commit_all(sink, at_t0(0, numbered(0, 1)), fence)
    rows.sql(f"DROP ROLE {role}")
    commit_all(sink, at_t0(1, numbered(1, 2)), fence)
    rows.sql(f"DROP ROLE {role}")
    assert ids(rows) == [0, 1]
    assert positions(rows) == [(0, 2)]


def test_a_statement_that_is_left_unfinished_stops(rows: Place) -> None:
    for leave in (lambda tx: tx.cursor().copy("COPY pg_class TO STDOUT"), lambda tx: tx.pipeline()):
        kept: list[Any] = []

        def handler(_: Batch, tx: psycopg.Connection, leave: Any = leave, kept: Any = kept) -> None:
            kept.append(leave(tx))
            kept[0].__enter__()

        sink, fence = handled(rows, handler)
        with pytest.raises(Stopped, match="unfinished"):
            commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert positions(rows) == [(0, 0), (1, 0)]


# -- errors --------------------------------------------------------------------------------


def test_poison_records_become_dead_letters_and_the_others_are_handled(rows: Place) -> None:
    calls: list[int] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        calls.append(len(batch))
        inserting(rows, 7)(batch, tx)
        if any(record.offset == 90 for record in batch):
            raise ValueError("no such user")

    sink, fence = handled(rows, handler)
    commit_all(sink, at_t0(0, numbered(0, 100)), fence)
    assert ids(rows) == [n for n in range(100) if n not in (7, 90)]
    assert positions(rows) == [(0, 100), (1, 0)]
    assert history(rows) == [(0, 0, 100, 1, "data", 100, 98, 2, 0)]
    (first, second) = rejected(rows)
    assert first[0] == 7
    assert "duplicate key" in first[1]
    assert second[0] == 90
    assert second[1].startswith("ValueError: no such user (test_handlers.py:")
    assert rows.sql("SELECT DISTINCT stage FROM oncely_rejects") == [("handle",)]
    assert calls[:2] == [100, 100]  # and one retry
    assert len(calls) < 35


def test_a_handler_rejects_records_itself(rows: Place) -> None:
    calls: list[int] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        calls.append(len(batch))
        for record in batch:
            insert(rows, record, tx)
            if record["id"] % 2:
                batch.reject(record, "odd")
        with pytest.raises(ValueError, match="not a record of this batch"):
            batch.reject(stranger, "")

    stranger = Record("t", 0, 5, {}, (), deleted=False, number=50)
    sink, fence = handled(rows, handler)
    commit_all(sink, at_t0(0, numbered(0, 4)), fence)
    assert calls == [4, 2]
    assert ids(rows) == [0, 2]
    assert rejected(rows) == [(1, "odd"), (3, "odd")]


def test_beyond_the_budget_nothing_is_committed(rows: Place) -> None:
    sink, fence = handled(rows, inserting(rows, *range(50)))
    with pytest.raises(TooManyRejects) as caught:
        commit_all(sink, at_t0(0, numbered(0, 50)), fence, max_rejects=3)
    assert not isinstance(caught.value, BudgetSpent)
    assert ids(rows) == []
    assert rejected(rows) == []


def test_errors_stop_by_choice_after_the_retries(rows: Place) -> None:
    pauses: list[float] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        raise KeyError("user")

    sink, fence = handled(rows, handler, OnError(3, reject=False, pause=pauses.append))
    with pytest.raises(Stopped, match=r"handler .*handler: t-0, offsets 0 to 2: KeyError: 'user'"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert pauses == [0.2, 0.4, 0.8]
    assert ids(rows) == []
    assert positions(rows) == [(0, 0), (1, 0)]


def test_the_whole_batch_is_retried_first(rows: Place) -> None:
    errors, calls = [SystemExit(3), OSError("mail server"), ValueError("no")], []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        calls.append(len(batch))
        inserting(rows)(batch, tx)
        if errors:
            raise errors.pop()

    sink, fence = handled(rows, handler, OnError(2, pause=lambda _: None))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert calls == [3, 3, 3, 3]
    assert ids(rows) == [0, 1, 2]
    assert rejected(rows) == []


class Wrapper(Exception):
    """An error of a library, raised from that of the driver."""


@pytest.mark.parametrize("wrapped", ["no", "raised from", "swallowed"])
def test_a_deadlock_is_no_fault_of_a_record(rows: Place, wrapped: str) -> None:
    failing = [True]

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        if failing and failing.pop():
            try:
                tx.execute("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
            except psycopg.Error as error:
                if wrapped == "no":
                    raise
                if wrapped == "raised from":
                    raise Wrapper from error

    sink, fence = handled(rows, handler, OnError(0, reject=False))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1, 2]
    assert rejected(rows) == []


def test_a_missing_table_is_no_fault_of_a_record(rows: Place) -> None:
    sink, fence = handled(rows, lambda _, tx: tx.execute("INSERT INTO bils VALUES (1)"))
    with pytest.raises(WrongInput, match=r"handler .*<lambda>: PostgreSQL: .*bils"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert rejected(rows) == []


def test_a_lost_connection_repeats_the_whole_attempt(rows: Place) -> None:
    failing = [True]

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        if failing and failing.pop():
            rows.sql("SELECT pg_terminate_backend(?)", tx.info.backend_pid)
            tx.execute("SELECT 1")

    sink, fence = handled(rows, handler, OnError(0, reject=False))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1, 2]
    assert rejected(rows) == []


def test_deferred_constraints_are_errors_of_the_record(rows: Place) -> None:
    rows.sql("ALTER TABLE rows ADD UNIQUE (name) DEFERRABLE INITIALLY DEFERRED")

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for record in batch:
            name = f"name {min(record['id'], 1)}"
            tx.execute(f"INSERT INTO {rows.schema}.rows VALUES (%s, %s)", (record["id"], name))

    sink, fence = handled(rows, handler)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1]
    assert [offset for offset, _ in rejected(rows)] == [2]


def test_a_statement_may_not_outlive_the_time_limit(rows: Place) -> None:
    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for record in batch:
            insert(rows, record, tx)
            if record.offset == 1:
                tx.execute("SELECT pg_sleep(600)")

    sink, fence = handled(rows, handler, OnError(0), time_limit=0.2)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 2]
    assert [offset for offset, _ in rejected(rows)] == [1]


def test_a_call_may_not_outlive_the_time_limit(rows: Place) -> None:
    """Neither with many statements, nor without one."""

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for record in batch:
            insert(rows, record, tx)
            while record.offset == 1:
                tx.execute("SELECT 1")
            if record.offset == 2:
                time.sleep(0.21)

    sink, fence = handled(rows, handler, OnError(0), time_limit=0.2)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0]
    assert [offset for offset, _ in rejected(rows)] == [1, 2]
    assert all(why.startswith("it takes longer than 0.2 s") for _, why in rejected(rows))


# -- the ledger decides --------------------------------------------------------------------


def test_a_newer_run_fences_a_handler_that_was_paused(rows: Place) -> None:
    """The newer run takes over, and commits the same records, while the handler works."""
    taken: list[str] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        if not taken:
            taken.append("")
            newer, its = handled(rows, inserting(rows))
            commit_all(newer, at_t0(0, numbered(0, 3)), its)
            close_all()
        inserting(rows)(batch, tx)

    sink, fence = handled(rows, handler, OnError(0))
    with pytest.raises(Fenced):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1, 2]
    assert history(rows) == [(0, 0, 3, 2, "data", 3, 3, 0, 0)]
    assert rejected(rows) == []


def test_rows_of_another_attempt_are_no_poison(rows: Place) -> None:
    """The same run's other attempt commits while the handler works: duplicates, no rejects."""
    twice: list[str] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        if not twice:
            twice.append("")
            again = replace(sink, handlers={"t": inserting(rows)})
            commit_all(again, at_t0(0, numbered(0, 3)), fence)
        inserting(rows)(batch, tx)

    sink, fence = handled(rows, handler, OnError(0, reject=False))
    (outcome,) = commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert outcome.replayed
    assert ids(rows) == [0, 1, 2]
    assert rejected(rows) == []


def test_a_lost_answer_of_the_commit(rows: Place) -> None:
    lost: list[str] = []
    sink, fence = handled(rows, inserting(rows))
    losing = replace(sink.ledger, connect=through(losing_first_commit(lost)))
    close_all()
    sink = replace(sink, ledger=losing)
    (outcome,) = commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert lost
    assert outcome.replayed
    assert ids(rows) == [0, 1, 2]
    assert Counts(0, 0, 0, 0) == outcome.counts


def test_sqlite_lends_no_transaction(place: Place) -> None:
    if place.is_postgres:
        return
    sink, fence = handled(place, lambda *_: None)
    with pytest.raises(WrongInput, match="SQLite lends no transaction"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)


def by_lane(number: int, lanes: int) -> Chunk:
    """Records with keys that go round the lanes."""
    keys = [next(b"%d" % n for n in range(99) if lane_of(b"%d" % n, lanes) == lane)
            for lane in range(lanes)]  # fmt: skip
    given = pa.array([keys[at % lanes] for at in range(number)])
    return replace(at_t0(0, numbered(0, number)), keys=pa.chunked_array([given]))


def test_threads_call_a_handler_at_the_same_time(rows: Place) -> None:
    together_, inserting_ = threading.Barrier(3), inserting(rows)

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting_(batch, tx)
        if batch.records[0].offset < 3:
            together_.wait(60)  # each is inside its transaction

    sink, fence = handled(rows, handler, threads={"t": 3})
    outcomes = ByKey(together(sink), by_lane(30, 3), fence, None, 4).run()
    assert ids(rows) == list(range(30))
    assert positions(rows)[0] == (0, 30)
    assert sum(one.counts.rows for one in outcomes) == 30
    assert {one.kind for one in outcomes} == {"data", "ahead"}


def test_a_poison_record_of_a_thread_becomes_a_dead_letter(rows: Place) -> None:
    sink, fence = handled(rows, inserting(rows, 5), threads={"t": 2})
    outcomes = ByKey(together(sink), by_lane(12, 2), fence, None, 3).run()
    assert ids(rows) == [n for n in range(12) if n != 5]
    assert [offset for offset, _ in rejected(rows)] == [5]
    assert positions(rows)[0] == (0, 12)
    assert sum((one.counts for one in outcomes), NO_RECORDS) == Counts(12, 11, 1, 0)


def test_after_a_handler_has_stopped_only_its_records_are_handled_again(rows: Place) -> None:
    others = threading.Event()
    inserting_ = inserting(rows)

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting_(batch, tx)
        if batch.records[0].offset == 0:
            assert others.wait(60)
            raise ValueError("not yet")

    class Telling(HandlersSink):
        def finish(self, *args: Any) -> Any:
            found = super().finish(*args)
            others.set()
            return found

    sink, fence = handled(rows, handler, STOPS, threads={"t": 2})
    with pytest.raises(Stopped, match="not yet"):
        ByKey(together(Telling(**vars(sink))), by_lane(12, 2), fence, None, 100).run()
    assert ids(rows) == list(range(1, 12, 2))
    assert positions(rows)[0] == (0, 0)
    calls: list[int] = []

    def again(batch: Batch, tx: psycopg.Connection) -> None:
        calls.extend(one.offset for one in batch)
        inserting_(batch, tx)

    sink, fence = handled(rows, again, threads={"t": 2})
    ByKey(together(sink), by_lane(12, 2), fence, None, 100).run()
    assert calls == list(range(0, 12, 2))
    assert ids(rows) == list(range(12))
    assert positions(rows)[0] == (0, 12)


def test_times_of_commits_ascend_with_the_position(rows: Place) -> None:
    """Not with the beginnings of the threads' transactions: the handler comes between."""
    sink, fence = handled(rows, lambda *_: None, threads={"t": 2})
    ledger = sink.ledger

    def finish(tx: Any, offset: int) -> None:
        one = OffsetRange(offset, offset + 1)
        claim = Claim(fence, {T0: one}, ledger.positions(fence), "ahead", parts={T0: (one,)})
        ledger.finish(tx, claim, {T0: [NO_RECORDS]})

    with ledger.transaction(fence) as earlier:
        with ledger.transaction(fence) as later:
            finish(later, 0)
        finish(earlier, 1)
    times = rows.sql(f"SELECT committed_at FROM {rows.schema}.oncely_ranges ORDER BY range_start")
    assert len(times) == 2
    assert times[0] < times[1]
