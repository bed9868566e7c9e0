"""Handlers: what they do with their transaction takes effect with the positions, or not at all."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import dict_row

from oncely.commit.backoff import Backoff
from oncely.commit.path import ByKey
from oncely.context import Record
from oncely.core.batch import BudgetSpent, Chunk, lane_of
from oncely.core.claim import NO_RECORDS, Claim, Counts, Fence
from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced, GivenUp, Interrupted, Stopped, TooManyRejects, WrongInput
from oncely.kinds.handlers import sink as handlers_sink
from oncely.kinds.handlers.batch import Batch
from oncely.kinds.handlers.sink import Handler, HandlersSink, OnError
from oncely.stores.sql import postgres_lent
from oncely.stores.sql.connection import Contention, close_all, connect
from oncely.stores.sql.ledger import SqlLedger
from tests.contracts.looking import history, ids, positions, rejected
from tests.sinktools import (
    T0,
    T1,
    Place,
    Rec,
    Wrapped,
    at_t0,
    chunk,
    commit_all,
    losing_first_commit,
    numbered,
    open_sink,
    through,
    together,
)

SWIFT = OnError(retries=1, pause=0)
STOPS = OnError(retries=1, reject=False, pause=0)


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


@pytest.mark.parametrize(
    "how",
    [
        "RESET ALL",
        "SET default_transaction_read_only = off",
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE",
    ],
)
def test_a_setting_that_the_server_reports_is_no_end(rows: Place, how: str) -> None:
    """The server is asked; and the settings of the loan are made again."""
    endings: list[str] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        tx.execute(how.encode())
        assert tx.execute("SHOW statement_timeout").fetchone() == ("1min",)
        for ending in endings:
            tx.execute(ending.encode())
            tx.execute("SELECT 1")

    sink, fence = handled(rows, handler, STOPS)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1, 2]
    endings.append("ROLLBACK; BEGIN; SAVEPOINT oncely_lent")
    with pytest.raises(Stopped, match="has ended its transaction"):
        commit_all(sink, at_t0(3, numbered(3, 4)), fence)
    assert positions(rows) == [(0, 3), (1, 0)]


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("how", ["SET CONSTRAINTS ALL IMMEDIATE", "DISCARD TEMP"])
def test_a_statement_that_is_not_supported_stops_and_is_named(
    rows: Place, how: str, caught: bool
) -> None:
    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        with suppress(*[psycopg.Error] if caught else []), tx.transaction():
            tx.execute(how.encode())

    sink, fence = handled(rows, handler, OnError(0))
    with pytest.raises(Stopped, match=rf"{how} .* is not supported"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert positions(rows) == [(0, 0), (1, 0)]


def test_several_calls_of_a_transaction_use_the_same_names(rows: Place) -> None:
    """Of temporary tables and cursors, as each is the first call."""

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        tx.execute("CREATE TEMP TABLE staging (id bigint PRIMARY KEY, name text) ON COMMIT DROP")
        tx.execute("CREATE TEMP TABLE parts (id bigint) PARTITION BY LIST (id)")
        tx.execute("CREATE TEMP TABLE part PARTITION OF parts DEFAULT")
        tx.execute("CREATE TEMP VIEW staged AS SELECT * FROM staging")
        with tx.cursor().copy("COPY staging FROM STDIN") as copy:
            for record in batch:
                copy.write_row((record["id"], record["name"]))
        tx.execute("DECLARE held CURSOR WITH HOLD FOR SELECT * FROM staged")
        tx.cursor("named").execute("SELECT * FROM staged").fetchone()
        tx.execute(f"INSERT INTO {rows.schema}.rows SELECT * FROM staged")

    sink, fence = handled(rows, handler, OnError(0))
    commit_all(sink, chunk({T0: (0, numbered(0, 3)), T1: (0, numbered(10, 12))}), fence)
    assert ids(rows) == [0, 1, 2, 10, 11]
    assert rejected(rows) == []


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
        tx.execute("SET client_encoding = 'SQL_ASCII'")
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


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_uses_the_transaction_no_longer_than_its_handler(
    rows: Place, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """One that ends in time is fine; a later statement is refused, and one in hand stops."""
    threads: list[threading.Thread] = []
    require_usable, refused = postgres_lent._require_usable, []

    def late(tx: postgres_lent.LentTransaction) -> None:
        with pytest.raises(psycopg.InterfaceError, match="given back"):
            tx.execute("SELECT 1")
        refused.append(tx)
        require_usable(tx)

    def writes(tx: psycopg.Connection, begun: threading.Event) -> None:
        begun.set()
        with suppress(psycopg.Error):
            tx.execute(f"INSERT INTO {rows.schema}.rows SELECT 9 FROM pg_sleep(2)")

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        begun = threading.Event()
        threads.append(threading.Thread(target=inserting(rows), args=(batch, tx)))
        threads.append(threading.Thread(target=writes, args=(tx, begun)))
        threads[-2].start()
        threads[-2].join()
        if batch.records[0].offset:
            threads[-1].start()
            begun.wait()
            time.sleep(0.2)
            if fails:
                raise ValueError

    monkeypatch.setattr(postgres_lent, "_require_usable", late)
    sink, fence = handled(rows, handler)
    commit_all(sink, at_t0(0, numbered(0, 1)), fence)
    assert len(refused) == 1
    with pytest.raises(Stopped, match="a thread of it still uses its transaction"):
        commit_all(sink, at_t0(1, numbered(1, 3)), fence)
    threads[-1].join(20)
    assert not threads[-1].is_alive()
    assert ids(rows) == [0]
    assert positions(rows) == [(0, 1), (1, 0)]


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

    def given_up(seconds: float) -> bool:
        pauses.extend([seconds] if seconds else [])
        return False

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        raise KeyError("user")

    sink, fence = handled(rows, handler, OnError(3, reject=False))
    with pytest.raises(Stopped, match=r"handler .*handler: t-0, offsets 0 to 2: KeyError: 'user'"):
        commit_all(sink, at_t0(0, numbered(0, 3)).until(given_up), fence)
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

    sink, fence = handled(rows, handler, OnError(2, pause=0))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert calls == [3, 3, 3, 3]
    assert ids(rows) == [0, 1, 2]
    assert rejected(rows) == []


class Leaves(BaseException):
    """A library's way to leave."""


def test_a_handler_that_would_end_the_process_fails_on_its_record(
    rows: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``oncely work`` calls it: Python raises no KeyboardInterrupt for SIGINT."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    ways = {1: SystemExit(0), 2: KeyboardInterrupt(), 3: GeneratorExit(), 4: Leaves("bye")}

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for record in batch:
            insert(rows, record, tx)
            if record.offset in ways:
                raise ways[record.offset]

    sink, fence = handled(rows, handler)
    commit_all(sink, at_t0(0, numbered(0, 6)), fence)
    assert ids(rows) == [0, 5]
    letters = rejected(rows)
    assert [offset for offset, _ in letters] == [1, 2, 3, 4]
    for offset, reason in letters:
        assert reason.startswith(type(ways[offset]).__name__)
        assert "(test_handlers.py:" in reason


@pytest.mark.parametrize(
    ("how", "code"), [(3, 3), (None, 0), ("no", 1), ("raises", 1), ("", 0), ("writes", 1)]
)
def test_a_child_that_a_handler_forks_ends_where_the_handler_ends(
    rows: Place, how: object, code: int
) -> None:
    """It is no second worker on the same session."""
    codes, in_child = [], []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        if in_child:
            return
        pid = os.fork()
        if pid == 0:
            in_child.append(pid)
            signal.alarm(20)
            if how == "raises":
                raise ValueError
            if how == "writes":
                inserting(rows)(batch, tx)
            if how != "":
                sys.exit(how)  # type: ignore[arg-type]
            return
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        inserting(rows)(batch, tx)

    sink, fence = handled(rows, handler)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert codes == [code]
    assert ids(rows) == [0, 1, 2]
    assert rejected(rows) == []


class Wrapper(Exception):
    """An error of a library, raised from that of the driver."""


def deadlock(how: str, tx: psycopg.Connection) -> None:
    try:
        tx.execute("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
    except psycopg.Error as error:
        if how == "no":
            raise
        if how == "raised from":
            raise Wrapper from error


def lost_connection(rows: Place, tx: psycopg.Connection, *pauses: float) -> None:
    rows.sql("SELECT pg_terminate_backend(?)", tx.info.backend_pid)
    for seconds in pauses:
        with suppress(psycopg.OperationalError):
            tx.execute("SELECT 1")
        time.sleep(seconds)
    tx.execute("SELECT 1")


@pytest.mark.parametrize(
    "fault", ["no", "raised from", "swallowed", "lost", "lost, behind the time limit"]
)
def test_a_deadlock_and_a_lost_connection_are_no_fault_of_a_record(rows: Place, fault: str) -> None:
    """The whole attempt is repeated."""
    failing, late = [True], fault.endswith("limit")

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        if failing and failing.pop():
            if fault.startswith("lost"):
                lost_connection(rows, tx, *([1.01] if late else []))
            deadlock(fault, tx)

    on_error, more = OnError(0, reject=late), {"time_limit": 1.0} if late else {}
    sink, fence = handled(rows, handler, on_error, **more)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1, 2]
    assert rejected(rows) == []


def test_a_missing_table_is_no_fault_of_a_record(rows: Place) -> None:
    sink, fence = handled(rows, lambda _, tx: tx.execute("INSERT INTO bils VALUES (1)"))
    with pytest.raises(WrongInput, match=r"handler .*<lambda>: PostgreSQL: .*bils"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert rejected(rows) == []


# What the SQL of one record may raise: SQLSTATEs of the user's own, of PL/pgSQL, and of statements
# that no transaction may contain.
OF_ONE_RECORD = {
    "U0001": "DO $$ BEGIN RAISE 'because' USING ERRCODE = 'U0001'; END $$",
    "45000": "DO $$ BEGIN RAISE 'because' USING ERRCODE = '45000'; END $$",
    "no data": "DO $$ BEGIN RAISE no_data_found; END $$",
    "assertion": "DO $$ BEGIN ASSERT false, 'because'; END $$",
    "subquery": "SELECT (SELECT generate_series(1, 2))",
    "function": "SELECT no_such_function()",
    "syntax": "SELEC 1",
    "cursor": "FETCH no_such_cursor",
    "prepared": "EXECUTE no_such_statement",
    "savepoint": "ROLLBACK TO SAVEPOINT no_such_savepoint",
    "vacuum": "VACUUM",
    "discard": "DISCARD ALL",
    "procedure": "CALL {schema}.commits()",
    "internal": "DO $$ BEGIN RAISE 'because' USING ERRCODE = 'XX000'; END $$",
    "read only": "SET TRANSACTION READ ONLY",
    "read only, and a write": "SET TRANSACTION READ ONLY; DELETE FROM {schema}.rows",
    "isolation level": "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "no server": "COPY {schema}.rows TO PROGRAM 'exit 1'",
}


@pytest.mark.parametrize("quiet", [False, True], ids=["raised", "caught"])
def test_whatever_the_sql_of_a_record_raises_is_a_dead_letter(rows: Place, quiet: bool) -> None:
    """Each second record executes one of the statements."""
    rows.sql("CREATE PROCEDURE commits() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$")
    statements = [one.format(schema=rows.schema) for one in OF_ONE_RECORD.values()]
    calls: list[int] = []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        calls.append(len(batch))
        for record in batch:
            insert(rows, record, tx)
            if record["id"] % 2:
                with suppress(psycopg.Error) if quiet else nullcontext():
                    tx.execute(statements[record["id"] // 2])

    sink, fence = handled(rows, handler)
    end = 2 * len(statements)
    commit_all(sink, at_t0(0, numbered(0, end)), fence)
    assert ids(rows) == list(range(0, end, 2))
    assert [offset for offset, _ in rejected(rows)] == list(range(1, end, 2))
    assert calls[:3] == [end, end, end]
    assert len(calls) <= 2 + 2 * end


def test_a_retry_is_logged_with_its_cause(rows: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Once: it is retried for as long as the pauses last."""
    sink, fence = handled(rows, inserting(rows, 1), OnError(3, pause=0))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    (line,) = [one.getMessage() for one in caplog.records if "duplicate key" in one.getMessage()]
    assert "handler" in line
    assert "t-0, offsets 0 to 2" in line


@pytest.mark.parametrize("retries", [30, 0], ids=["retries", "isolation"])
def test_what_nobody_waits_for_any_more_ends(
    rows: Place, retries: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Retries in their pause, isolation between two calls. Until then the log tells of them."""
    monkeypatch.setattr(handlers_sink, "_SECONDS_A_LINE", 0.0)
    monkeypatch.setattr(handlers_sink, "_LONGEST_PAUSE", 100.0)
    given_up, calls = threading.Event(), []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        calls.append(batch.offsets)
        if retries:
            threading.Timer(0.1, given_up.set).start()
        elif len(calls) == 3:
            given_up.set()
        raise ValueError("away")

    sink, fence = handled(rows, handler, OnError(retries, pause=100))
    began = time.monotonic()
    with pytest.raises(GivenUp):
        commit_all(sink, at_t0(0, numbered(0, 64)).until(given_up.wait), fence)
    assert len(calls) == (1 if retries else 3)
    assert time.monotonic() - began < 90
    told = "away (test_handlers.py" if retries else "at t-0, offset 0; 0 refused"
    assert any(told in one.getMessage() for one in caplog.records)
    assert positions(rows) == [(0, 0), (1, 0)]


def copying(tx: psycopg.Connection, keep: list[Any], *, whole: bool) -> None:
    """Leave a COPY open, and keep its context or the object in it."""
    context = tx.cursor().copy("COPY pg_class FROM STDIN")
    keep.append(context.__enter__())
    if whole:
        keep.append(context)


BROKEN: dict[str, tuple[Callable[[psycopg.Connection, list[Any]], object], str]] = {
    "closed": (lambda tx, _: psycopg.Connection.close(tx), "has closed its connection"),
    "closed below": (lambda tx, _: tx.pgconn.finish(), "has closed its connection"),
    "copy": (partial(copying, whole=True), "unfinished"),
    "copy without its context": (partial(copying, whole=False), "COPY from stdin failed"),
    "copy in by execute": (lambda tx, _: tx.execute("COPY pg_class FROM STDIN"), "COPY"),
    "copy out by execute": (lambda tx, _: tx.execute("COPY pg_class TO STDOUT"), "COPY"),
}


@pytest.mark.parametrize("after", [False, True], ids=["", "and a statement"])
@pytest.mark.parametrize("quiet", [False, True], ids=["raised", "caught"])
def test_a_connection_that_is_unusable_afterwards_stops(
    rows: Place, quiet: bool, after: bool
) -> None:
    kept: list[Any] = []
    for name, (how, says) in BROKEN.items():
        kept.clear()

        def handler(batch: Batch, tx: psycopg.Connection, how: Any = how) -> None:
            insert(rows, batch.records[0], tx)
            with suppress(psycopg.Error) if quiet else nullcontext():
                how(tx, kept)
            with suppress(psycopg.Error) if quiet else nullcontext():
                if after:
                    tx.execute("SELECT 1")

        sink, fence = handled(rows, handler, STOPS)
        with pytest.raises(Stopped, match=says):
            commit_all(sink, at_t0(0, numbered(0, 3)), fence)
        assert ids(rows) == [], name
    assert positions(rows) == [(0, 0), (1, 0)]


def test_a_session_that_a_handler_has_made_read_only_is_not_used_again(rows: Place) -> None:
    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        if batch.records[0].offset == 0:
            tx.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")

    sink, fence = handled(rows, handler, STOPS)
    for at in range(3):
        commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)
    assert ids(rows) == [0, 1, 2]


def test_a_server_of_the_handlers_own_that_is_away_is_its_error(rows: Place) -> None:
    """Only the session of the transaction tells of a lost connection."""

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        inserting(rows)(batch, tx)
        psycopg.connect("host=127.0.0.1 port=1")

    sink, fence = handled(rows, handler, STOPS)
    with pytest.raises(Stopped, match="connection failed"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)


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


@contextmanager
def held(place: Place) -> Iterator[None]:
    """Another session has changed the row 7, and does not end its transaction."""
    with closing(place.session()) as other:
        other.execute("BEGIN")
        other.execute("UPDATE rows SET name = 'x' WHERE id = 7")
        yield
        other.execute("ROLLBACK")


WAITS = {
    "lock": (0.6, ["UPDATE {schema}.rows SET name = name WHERE id = 7"]),
    # The wait is shorter than lock_timeout, and the time limit ends it.
    "work, then the lock": (
        2.4,
        [
            "DO $$ BEGIN PERFORM pg_sleep(1.5); UPDATE {schema}.rows SET name = name WHERE id = 7;"
            " END $$"
        ],
    ),
    # The limit passes between two statements.
    "waits in a savepoint": (0.9, 3 * ["UPDATE {schema}.rows SET name = name WHERE id = 7"]),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_a_lock_is_no_fault_of_a_record(rows: Place, wait: str) -> None:
    """The time limit is shorter than the longest wait for a lock."""
    rows.sql("INSERT INTO rows VALUES (7, 'held')")
    limit, statements = WAITS[wait]
    recovered = [psycopg.errors.LockNotAvailable] if len(statements) > 1 else []

    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for record in batch:
            insert(rows, record, tx)
        for one in statements:
            with suppress(*recovered), tx.transaction():
                tx.execute(one.format(schema=rows.schema))

    for on_error in (OnError(0), OnError(0, reject=False)):
        sink, fence = handled(rows, handler, on_error, time_limit=limit)
        with held(rows), pytest.raises(Contention, match="lock"):
            commit_all(sink, at_t0(0, numbered(0, 3)), fence, patience=Backoff(0.01, 0.01, 0.0))
    sink, fence = handled(rows, handler, OnError(0))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0, 1, 2, 7]
    assert rejected(rows) == []


def test_a_handler_whose_body_has_not_run_has_handled_nothing(rows: Place) -> None:
    """What a coroutine or a generator is wrapped in does not show it before it is called."""

    def yielding(batch: Batch, tx: psycopg.Connection) -> Iterator[None]:
        inserting(rows)(batch, tx)
        yield

    sink, fence = handled(rows, partial(yielding), STOPS)
    with pytest.raises(Stopped, match="a generator, whose body has not run"):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert positions(rows) == [(0, 0), (1, 0)]


def test_a_signal_is_not_taken_for_a_lost_connection(rows: Place) -> None:
    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        rows.sql("SELECT pg_terminate_backend(?)", tx.info.backend_pid)
        try:
            tx.execute("SELECT 1")
        except psycopg.OperationalError:
            raise Interrupted from None

    sink, fence = handled(rows, handler)
    with pytest.raises(Interrupted):
        commit_all(sink, at_t0(0, numbered(0, 3)), fence, patience=Backoff(0.01, 0.01, 0.0))


def test_after_a_handler_the_ledger_waits_as_long_as_it_may(rows: Place) -> None:
    """Its statements have no time limit, and the longest wait for a lock."""
    seen: list[Any] = []

    def looking(name: str, call: Callable[[], Any]) -> Any:
        if name == "execute_all" and kept:
            seen.extend(
                kept[-1].query(
                    "SELECT name, setting FROM pg_settings"
                    " WHERE name IN ('lock_timeout', 'statement_timeout') ORDER BY name"
                )
            )
        return call()

    kept: list[Any] = []

    def connecting(dialect: Any, application: str) -> Any:
        kept.append(connect(dialect, application))
        return Wrapped(kept[-1], looking)

    sink, fence = handled(rows, inserting(rows), time_limit=2.0)
    close_all()
    kept.clear()
    sink = replace(sink, ledger=replace(sink.ledger, connect=connecting))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert seen[:2] == [("lock_timeout", "10000"), ("statement_timeout", "0")]


def test_a_statement_may_not_outlive_the_time_limit(rows: Place) -> None:
    def handler(batch: Batch, tx: psycopg.Connection) -> None:
        for record in batch:
            insert(rows, record, tx)
            if record.offset == 1:
                tx.execute("SELECT pg_sleep(600)")

    sink, fence = handled(rows, handler, OnError(0), time_limit=0.6)
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
                time.sleep(0.61)

    sink, fence = handled(rows, handler, OnError(0), time_limit=0.6)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    assert ids(rows) == [0]
    assert [offset for offset, _ in rejected(rows)] == [1, 2]
    assert all(why.startswith("it takes longer than 0.6 s") for _, why in rejected(rows))


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
            together_.wait(180)  # each is inside its transaction

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
            assert others.wait(180)
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
