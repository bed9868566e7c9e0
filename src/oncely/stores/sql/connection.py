"""The port of databases: one session, with errors classified by consequence.

Statements are written once, with ``%s`` for a parameter. A test may wrap a :class:`Connection`:
every method is one round trip at most, except ``copy``, and deferred statements are sent by the
next call. So "before and after every call" covers all points at which a crash can occur, except
those between two messages of a COPY.

There is one session for each pipeline and process, reused across commits; in a worker one for each
thread that commits. A new session costs more than a small commit, so it is kept; after any failure
it is discarded, which also undoes a transaction of unknown state: the server rolls back the open
transaction of a closed connection. One that was ended while it was idle is replaced: a takeover of
some partitions ends the sessions of a run that goes on with its others. What the new session finds
decides.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from oncely.core.digest import Kind, Recipe
from oncely.errors import Stopped, TableMismatch, Unavailable
from oncely.phases import phase

Params = Sequence[object]
Row = tuple[Any, ...]


LONGEST_NAME = 63
"""Bytes of a name in PostgreSQL, which truncates a longer one without an error."""


class TableName(NamedTuple):
    """A table, its schema None for the connection's default."""

    schema: str | None
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name

    def sibling(self, name: str) -> TableName:
        """Another table in the same schema."""
        return TableName(self.schema, name)


class BadData(Stopped):
    """The database refused a value or a row; of a statement that is about no row, it ends the run.

    Attributes:
        line: index of the refused row among the rows that were sent, or None if unknown.
        reason: the database's message.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        self.reason, self.line = reason, line
        super().__init__(reason, way_out="correct the trigger or function that raised it")


class RowsDropped(Stopped):
    """The table has fewer new rows than were sent, and no error was raised."""

    def __init__(self, table: TableName, sent: int, taken: int) -> None:
        super().__init__(
            f"{table} was given {sent} rows and has taken {taken}: something in the"
            " database drops rows without a word; nothing was written",
            key="sink.table",
            way_out="look for a BEFORE INSERT trigger that returns NULL (or RAISE(IGNORE));"
            " filter in the transform instead, where what is left out is counted",
        )


class RowsKept(Stopped):
    """Rows that were deleted are still there, and no error was raised; nothing was changed."""

    def __init__(self, table: TableName) -> None:
        super().__init__(
            f"{table} keeps rows that were deleted: their replacement would be there"
            " beside them; nothing was changed",
            key="sink.table",
            way_out="look for a BEFORE DELETE trigger that returns NULL (or RAISE(IGNORE)), or a"
            " rule ON DELETE; disable it for the repair",
        )


class TableAltered(TableMismatch):
    """The table has changed since the run has bound its rows to it; nothing was written."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"{problem}: the table was altered during the run; nothing was written",
            key="sink.table",
            way_out="start again: a run reads the table's types at its start, and `oncely "
            "plan` shows whether they accept the rows",
        )


class LoanBroken(Exception):
    """A function has ended the transaction that was lent to it, or can't give it back.

    Attributes:
        reason: what it has done.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Contention(Unavailable):
    """A deadlock, a serialization failure or a lock timeout: the rows are not at fault."""


@dataclass(frozen=True)
class RowByRow:
    """The destination of rows that are inserted separately.

    Attributes:
        table: the destination.
        staged: a table of the session, with the rows and the number of each.
        columns: its columns and their types.
        number: the column of the numbers.
        insert: the statement that inserts the row ``_oncely_row``.
        delete: of an upsert, the statement that deletes the row of its key.
        deleted: of an upsert, the column that is 1 if the row is to be deleted.
    """

    table: TableName
    staged: TableName
    columns: Sequence[tuple[str, str]]
    number: str
    insert: str
    delete: str = ""
    deleted: str = ""


class Statement(NamedTuple):
    """A statement and its parameters.

    Attributes:
        otherwise: raised if the statement, an UPDATE or a DELETE, changes no row.
    """

    sql: str
    params: Params = ()
    otherwise: Exception | None = None


class StatementResult(NamedTuple):
    """The answer to a statement: the number of rows that it has changed, and those it returns."""

    changed: int
    rows: list[Row]


class Connection(Protocol):
    """One session with the database. Not thread-safe; autocommit outside begin and commit."""

    def begin(self) -> None:
        """Start a transaction with bounded waiting for locks; deferred like :meth:`defer`."""

    def defer(self, sql: str) -> None:
        """Run a statement without parameters, whose answer is not needed, before the next call.

        A database to which a round trip matters is sent it with the next call, in one message;
        that call then raises the statement's error.
        """

    def commit(self) -> None:
        """End the transaction.

        Raises:
            Unavailable: its outcome is unknown, or the server has rolled it back.
        """

    def rollback(self) -> None:
        """Undo the transaction."""

    def query(self, sql: str, params: Params = (), *, of_rows: bool = False) -> list[Row]:
        """Run one statement that returns rows.

        Args:
            of_rows: it processes values of records: an internal error of the server belongs to
                one of these, and is BadData.
        """

    def execute(self, sql: str, params: Params = (), *, of_rows: bool = False) -> int:
        """Run one statement, and return the number of rows that it has changed.

        Args:
            of_rows: as of :meth:`query`.
        """

    def execute_many(self, sql: str, rows: Iterable[Params]) -> int:
        """Run one statement for each of ``rows``, in order, and return the number of rows that all
        of them together have changed."""

    def execute_all(self, statements: Sequence[Statement]) -> None:
        """Run statements in order, in one round trip, up to the first that fails.

        Raises:
            the ``otherwise`` of a statement that has changed no row.
        """

    def copy(
        self, table: TableName, rows: pa.Table, then: Sequence[str] = (), *, of_rows: bool = True
    ) -> Sequence[StatementResult]:
        """Append ``rows`` by the bulk path; they have the table's types.

        Args:
            table: the destination.
            rows: the rows.
            then: statements that process these rows, without parameters. They are run after the
                rows, in the round trip of their end.
            of_rows: as of :meth:`query`. False for tables of the ledger: a refusal by a unique
                index is then Contention, because another attempt has stored the same row.

        Returns:
            The answers to ``then``, values as texts if the database sends texts.

        Raises:
            BadData: with the index of the refused row if the database reports it.
            RowsDropped: a trigger has dropped rows.
        """

    def insert_each(self, into: RowByRow, rows: pa.Table) -> list[tuple[int, str]]:
        """Insert ``rows`` separately, in order; return index and reason of refused rows.

        For input with many refused rows: all steps are executed in the database. Called in an open
        transaction, in which refused rows leave no trace.

        Raises:
            BadData: a value cannot be sent; the outcome of the other rows is unknown.
            WrongInput: the database can't do it for such rows, or may not.
            RowsDropped: a trigger has dropped rows.
        """

    def lend(self, seconds: float) -> AbstractContextManager[Any]:
        """Lend the open transaction, as a connection of the driver, to a function of the user.

        If the block raises, what it has done is undone, and the transaction goes on.

        Args:
            seconds: the time limit of the block.

        Raises:
            BadData: a statement was refused, or the limit is exceeded. Errors of the block that
                come from no statement pass through.
            Unavailable: the server did not answer, or refuses any work at this moment; also if the
                block has turned that error into another one.
            LoanBroken: the block has ended the transaction.
            OncelyError: another error that no retry can correct.
        """

    def check_constraints(self) -> None:
        """Check deferred constraints now, instead of at the commit.

        Raises:
            BadData: a deferred constraint is violated.
        """

    def is_ended(self) -> bool:
        """True if the server has ended the session while it was idle; sends nothing."""

    def close(self) -> None:
        """End the session; never raises."""


class Column(NamedTuple):
    """A column of the destination table, from the catalog.

    Attributes:
        name: the column.
        type: its type; of a domain, the type that the domain restricts, with its length or digits.
        required: it is not nullable, has no default and is not generated.
        generated: the database computes its values.
        domain: its type, or that of its elements, is a domain.
    """

    name: str
    type: str
    required: bool
    generated: bool
    domain: bool = False


TableTypes = tuple[str | None, dict[str, str]]
"""The identity of a table, and the types of its columns."""


class Relation(NamedTuple):
    """How statements refer to a table.

    Attributes:
        rows: the name, quoted, in a statement that reads or deletes rows: those of tables that
            inherit from it are not its own. Partitions hold rows of their table.
        is_view: it is a view, to which no rows are copied: COPY counts each row that is sent, also
            if a trigger drops it.
        is_secured: row-level security applies to this user, for which there is no COPY.
    """

    rows: str
    is_view: bool = False
    is_secured: bool = False


class TableFacts(NamedTuple):
    """What a database tells of a table.

    Attributes:
        identity: an id that distinguishes the table from others of its name, the same text for all
            if the database has no such id; None: there is no such table.
        relation: how statements refer to it.
        unfit: why rows would be lost, or not survive with the ledger's, and the way out; None: they
            survive.
    """

    identity: str | None
    relation: Relation
    unfit: tuple[str, str] | None = None


@dataclass(frozen=True)
class ColumnFit:
    """The conversion of a column of the rows to a column of the table.

    Attributes:
        name: the column.
        arrow_type: the type to which values are cast before they are sent.
        cast: the table's type if the value must be sent as text and cast by the server.
        rounds: the column keeps fewer digits than values of the declared type may have.
        scale: digits after the point that the column keeps of a float, or None for all; a value may
            have more.
        longest: the longest text that the column keeps whole, where the database cuts longer ones
            off without an error; None: it refuses them.
        form: what the database does to some texts without an error, which stay the same value for
            the type; empty: nothing.
        collation: of a key, the collation by which its unique index compares texts, quoted; None if
            it compares their bytes.
    """

    name: str
    arrow_type: pa.DataType
    cast: str | None = None
    rounds: bool = False
    scale: int | None = None
    longest: Longest | None = None
    form: str = ""
    collation: str | None = None


class Longest(NamedTuple):
    """The limit of a type of texts.

    Attributes:
        type: the type's name.
        length: the largest length.
        unit: of the length.
        spaces: the database cuts off spaces alone, and refuses other characters.
    """

    type: str
    length: int
    unit: Literal["bytes", "characters"]
    spaces: bool


Barred = Literal["", "hides", "refuses"]

Separately = Literal["never", "same keys", "always"]
"""Whether rows are written by separate statements: a statement of several rows could have another
effect; "same keys": only if several rows have the same key."""


class Dialect(Protocol):
    """The differences between databases, except the statements of the commit path."""

    @property
    def name(self) -> str:
        """The database's name."""

    @property
    def clear_table(self) -> str:
        """The beginning of a statement that empties a table of Oncely's own."""

    @property
    def for_update(self) -> str:
        """Suffix that locks the selected rows; empty if a transaction has the only lock."""

    @property
    def clock(self) -> str:
        """The time of the statement, not that at which its transaction began."""

    def connect(self, application: str) -> Connection:
        """Open a session that other sessions can recognise by ``application``.

        Raises:
            Unavailable: no answer.
            WrongInput: the database refuses the login.
        """

    def create_database(self) -> None:
        """Create an empty database if there is none and a client can create it (a file).

        Raises:
            WrongInput: it cannot be created.
        """

    def quote(self, identifier: str) -> str:
        """The quoted identifier, safe inside a statement for any content."""

    def as_json(self, column: str) -> str:
        """An expression: the value of a column as JSON text, from which the server's
        ``json_populate_record`` makes the same value."""

    def translate(self, ddl: str) -> str:
        """A ledger table's definition in the dialect's own types."""

    def lock_for_setup(self, connection: Connection) -> None:
        """Serialise concurrent creation of tables, until the transaction's end."""

    def lock_for_rewrite(self, connection: Connection, pipeline: str) -> None:
        """Serialise the rewrites of a pipeline's rows, until the transaction's end."""

    def end_sessions(
        self,
        connection: Connection,
        applications: str,
        tables: Sequence[TableName],
        only: Collection[str] | None = None,
    ) -> object:
        """End other sessions whose application name begins with ``applications``.

        With ``only`` those of these names.
        Only sessions that use these ``tables``: another schema or database may contain a ledger in
        which a pipeline has the same name.
        """

    def columns(self, connection: Connection, table: TableName) -> list[Column]:
        """The table's columns in order; empty if there is no such table."""

    @property
    def check_constraints(self) -> Sequence[str]:
        """The statements of :meth:`Connection.check_constraints`."""

    def types_statement(self, table: TableName) -> Sequence[str]:
        """The statement that reads :meth:`column_types`; none if one is not enough."""

    def types_of(self, rows: Sequence[Row]) -> TableTypes:
        """The types from the answer to :meth:`types_statement`."""

    def column_types(self, connection: Connection, table: TableName) -> TableTypes:
        """The identity of the table's :class:`TableFacts`, and its columns' types."""

    def facts(self, connection: Connection, tables: Sequence[TableName]) -> list[TableFacts]:
        """The facts of each table, asked for at once."""

    def place(self) -> str:
        """What distinguishes two databases that are made in one second and have equal ids."""

    def time_limits(self, connection: Connection) -> dict[str, float]:
        """Settings by which the server ends a long commit, with the way out, and their seconds."""

    def barred(self, connection: Connection, table: TableName, *, deletes: bool) -> Barred:
        """Whether the server hides rows from this user that the condition of a DELETE selects
        (asked for if ``deletes``), or refuses each new row."""

    def cascades(self, connection: Connection, table: TableName) -> list[str]:
        """Tables whose rows a DELETE in this table also deletes or changes."""

    def unique_keys(self, connection: Connection, table: TableName) -> list[frozenset[str]]:
        """Column sets that a unique constraint or index makes unique."""

    def collations(self, connection: Connection, table: TableName) -> dict[str, str]:
        """The collation of each unique column that treats different texts as equal."""

    def separately(
        self,
        connection: Connection,
        table: TableName,
        keys: Collection[str],
        written: Collection[str],
    ) -> Separately:
        """Whether the effect of a row may depend on other rows of its statement.

        A foreign key to the table itself and a trigger AFTER a statement are checked at its end,
        when later rows are there already. An upsert writes the last row of a key only, and rows in
        the order of keys: then other unique columns and triggers see another order, and foreign
        keys and checks of columns that are not written do not see the rows before the last.
        """

    def column_type(self, arrow_type: pa.DataType) -> str:
        """The type of a created table's column for values of this type."""

    def fit(self, column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
        """The conversion of values of ``arrow_type`` to the column, or None if there is none."""

    def digest_kind(self, column: Column, fit: ColumnFit) -> Kind | None:
        """The kind of a column's values in digests; None: they are not covered.

        Values are covered if the column returns exactly those that were sent.
        """

    def digest(
        self,
        connection: Connection,
        table: TableName,
        recipe: Recipe,
        offset: str,
        where: tuple[str, Params],
    ) -> int | None:
        """The digest of the rows that a condition selects; None if the database can't compute it.

        Args:
            table: the table.
            recipe: the columns that it covers.
            offset: the column of the offset.
            where: the condition, and its parameters.
        """

    def keeps_order(self, arrow_type: pa.DataType) -> bool:
        """True if the stored form sorts in the order of the values: required for a version
        column."""

    def create_staging(self, name: TableName, columns: Sequence[tuple[str, str]]) -> str:
        """The statement that creates an empty table of (name, type) columns, without constraints.

        It belongs to the session and ends with its transaction.
        """

    @property
    def endpoint(self) -> str:
        """The address of the database, for messages: never with a password."""


Connect = Callable[[Dialect, str], Connection]
"""Opens a session: ``(dialect, application) -> Connection``. Tests use a wrapper."""


def plain(statement: str) -> str:
    """A statement, or a name, for people: with the percent signs that parameters have doubled."""
    return statement.replace("%%", "%")


def connect(dialect: Dialect, application: str) -> Connection:
    """Open a session, without a wrapper."""
    return dialect.connect(application)


_kept: dict[tuple[Dialect, str], list[tuple[str, Connection]]] = {}
_lock = threading.Lock()
_MOST = 4  # kept sessions of a pipeline of which this process holds partitions under many epochs


@lru_cache(maxsize=64)
def application_prefix(pipeline: str) -> str:
    """The common prefix of the names of a pipeline's sessions, for all epochs (63 bytes at most).

    Plain ASCII, because PostgreSQL replaces other characters.
    """
    digest = hashlib.sha256(pipeline.encode()).hexdigest()[:8]
    return f"oncely/{re.sub('[^!-~]', '_', pipeline[:24])}-{digest}/"


def application_name(pipeline: str, epoch: int) -> str:
    """The name of this epoch's sessions."""
    return f"{application_prefix(pipeline)}{epoch}"


@contextmanager
def session(
    dialect: Dialect, pipeline: str, epoch: int, connect: Connect, *, several: bool = False
) -> Iterator[Connection]:
    """The process's session for the pipeline; discarded if the block raises.

    A session of an older epoch is closed first: its name would make others terminate it.

    Args:
        dialect: the kind of database, and its address.
        pipeline, epoch: the run.
        connect: opens the session.
        several: the process holds partitions under several epochs in turn, and keeps sessions for
            each of the last ones used: as many as threads have used at the same time.
    """
    name = application_name(pipeline, epoch)
    key = (dialect, name if several else pipeline)
    connection = _reused(key, name)
    if connection is None:
        connection = connect(dialect, name)
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    with _lock:
        idle = _kept.pop(key, [])
        keeps = several or not idle
        if keeps:
            idle.append((name, connection))
        _kept[key] = idle  # the last one used
    if not keeps:  # another thread has put its own session back
        connection.close()
    if several:
        _close_beyond(_MOST, dialect, application_prefix(pipeline))


def _reused(key: tuple[Dialect, str], name: str) -> Connection | None:
    """A kept session of this name, which is then this thread's; others of the key are closed, and
    so is one that has ended."""
    with _lock:
        idle = _kept.pop(key, [])
        found = idle.pop() if idle and idle[-1][0] == name else None
        if found is not None and idle:
            _kept[key], idle = idle, []
    for _, other in idle:
        other.close()
    if found is None:
        return None
    if found[1].is_ended():
        found[1].close()
        return _reused(key, name)
    return found[1]


def _close_beyond(most: int, dialect: Dialect, prefix: str) -> None:
    """Close the sessions of a pipeline that were not used for the longest time."""
    with _lock:
        own = [key for key in _kept if key[0] == dialect and key[1].startswith(prefix)]
        gone = [_kept.pop(key) for key in own[: max(0, len(own) - most)]]
    for _, connection in itertools.chain(*gone):
        connection.close()


@contextmanager
def transaction(connection: Connection) -> Iterator[Connection]:
    """BEGIN … COMMIT; rolled back if the block raises. BEGIN may be sent with its first call."""
    connection.begin()
    try:
        yield connection
    except BaseException:
        with suppress(Exception):
            connection.rollback()
        raise
    # Outside the try: after a COMMIT that raised, only the ledger shows the outcome.
    try:
        with phase("commit"):
            connection.commit()
    except BadData:
        with suppress(Exception):
            connection.rollback()
        raise


@contextmanager
def brief_session(dialect: Dialect, purpose: str, connect: Connect) -> Iterator[Connection]:
    """A session for reading or setup, closed at the end; no takeover ends it."""
    connection = connect(dialect, f"oncely-{purpose}")
    try:
        yield connection
    finally:
        connection.close()


def close_all() -> None:
    """Close every kept session of this process."""
    while _kept:
        for _, connection in _kept.popitem()[1]:
            connection.close()
