"""What the SQL sink asks of a database: one session, its errors sorted by consequence.

Statements are written once, with ``%s`` for a parameter. A test may wrap a
:class:`Connection`: every method is one round trip, so "before and after every call" is every
point where a crash can fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from oncely.errors import Stopped, TableMismatch, Unavailable

Params = Sequence[object]
Row = tuple[Any, ...]


class TableName(NamedTuple):
    """A table, its schema None for the connection's default."""

    schema: str | None
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name

    def sibling(self, name: str) -> TableName:
        """Another table in the same schema."""
        return TableName(self.schema, name)


class BadData(Exception):
    """The database refused a value or a row (SQLSTATE class 22, 23 or 44).

    Attributes:
        line: index of the refused row among the rows that were sent, or None when not told.
        reason: the database's own sentence.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        self.reason, self.line = reason, line
        super().__init__(reason)


class RowsDropped(Stopped):
    """The table has taken fewer rows than it was given, and no error was raised."""

    def __init__(self, table: TableName, sent: int, taken: int) -> None:
        super().__init__(
            f"sink.table: {table} was given {sent} rows and has taken {taken}: something in the"
            " database drops rows without a word; nothing was written",
            way_out="look for a BEFORE INSERT trigger that returns NULL (or RAISE(IGNORE));"
            " filter in the transform instead, where what is left out is counted",
        )


class TableAltered(TableMismatch):
    """The table is not what the run has bound its rows to; nothing was written."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"{problem}: the table was altered while the run was up; nothing was written",
            way_out="start again: a run looks at the table's types when it begins, and"
            " `oncely plan` tells whether they take the rows",
        )


class Contention(Unavailable):
    """A deadlock, a serialization failure or a lock timeout: nothing is wrong with the rows."""


@dataclass(frozen=True)
class RowByRow:
    """Where rows go one by one.

    Attributes:
        table: the destination.
        staged: a table of the session, which holds the rows and the number of each.
        create_staged: the statement that creates it.
        number: the column of the numbers.
        casts: per column, the table's type when the value travels as text.
    """

    table: TableName
    staged: TableName
    create_staged: str
    number: str
    casts: Mapping[str, str | None]


class Connection(Protocol):
    """One session with the database. Not thread-safe; autocommit outside begin and commit."""

    def begin(self) -> None:
        """Start a transaction with bounded waiting for locks."""

    def commit(self) -> None:
        """End the transaction.

        Raises:
            Unavailable: its outcome is unknown, or the server has undone it.
        """

    def rollback(self) -> None:
        """Undo the transaction."""

    def query(self, sql: str, params: Params = ()) -> list[Row]:
        """Run one statement that returns rows."""

    def execute(self, sql: str, params: Params = ()) -> int:
        """Run one statement; the number of rows that it changed."""

    def execute_many(self, sql: str, rows: Iterable[Params]) -> None:
        """Run one statement for each of ``rows``."""

    def copy(self, table: TableName, rows: pa.Table) -> None:
        """Append ``rows`` by the bulk path; types are the table's already.

        Raises:
            BadData: with the index of the refused row when the database tells it.
            RowsDropped: a trigger has left rows out.
        """

    def insert_each(self, into: RowByRow, rows: pa.Table) -> list[tuple[int, str]]:
        """Insert ``rows`` one by one, in order; index and reason of those that are refused.

        For rows of which many are refused: all of it happens in the database. In an open
        transaction, which it leaves as if the refused rows had never been sent.

        Raises:
            BadData: a value can't even be sent; nothing is known of the other rows.
            RowsDropped: a trigger has left rows out.
        """

    def check_constraints(self) -> None:
        """Check now what the transaction would check at its commit (deferred constraints).

        Raises:
            BadData: a deferred constraint is violated.
        """

    def close(self) -> None:
        """End the session; never raises."""


class Column(NamedTuple):
    """A column of the destination table as the catalog has it."""

    name: str
    type: str
    required: bool
    """Neither nullable nor filled by a default or generated."""
    generated: bool


@dataclass(frozen=True)
class ColumnFit:
    """How one column of the rows reaches one column of the table.

    Attributes:
        name: the column.
        arrow_type: what the values are cast to before they are sent.
        cast: the table's type when the value must travel as text and be cast by the server.
        rounds: the column keeps fewer digits than values of the declared type may have.
        scale: digits after the point that the column keeps of a float, or None for all; whether
            a value has more is not known before.
    """

    name: str
    arrow_type: pa.DataType
    cast: str | None = None
    rounds: bool = False
    scale: int | None = None


class Dialect(Protocol):
    """The differences between databases that are not a statement of the commit path."""

    @property
    def name(self) -> str:
        """The database's name."""

    @property
    def clear_table(self) -> str:
        """How a statement begins that empties a table of our own."""

    @property
    def for_update(self) -> str:
        """Suffix that locks the selected rows, or nothing where a transaction has the only lock."""

    def connect(self, application: str) -> Connection:
        """Open a session that is recognisable to others by ``application``.

        Raises:
            Unavailable: no answer.
            WrongInput: the database does not let us in.
        """

    def create_database(self) -> None:
        """Make an empty database where there is none and a client can (a file).

        Raises:
            WrongInput: it can't be made.
        """

    def quote(self, identifier: str) -> str:
        """The identifier, safe inside a statement whatever it holds."""

    def translate(self, ddl: str) -> str:
        """A ledger table's definition in the dialect's own types."""

    def lock_for_setup(self, connection: Connection) -> None:
        """Serialise whoever creates tables at the same time, until the transaction's end."""

    def end_sessions(
        self, connection: Connection, applications: str, tables: Sequence[TableName]
    ) -> int:
        """End other sessions whose application name begins with ``applications``.

        Only those that work with these ``tables``: another schema or database may hold a ledger
        in which a pipeline has the same name.
        """

    def columns(self, connection: Connection, table: TableName) -> list[Column]:
        """The table's columns in order; empty when there is no such table."""

    def column_types(
        self, connection: Connection, table: TableName
    ) -> tuple[str | None, dict[str, str]]:
        """The table's :meth:`identity` and its columns' types, by one statement."""

    def identity(self, connection: Connection, table: TableName) -> str | None:
        """What tells the table from others of its name; None: there is no such table.

        The same text for all tables where the database has no such thing.
        """

    def not_durable(self, connection: Connection, table: TableName) -> tuple[str, str] | None:
        """Why its rows would not survive with the ledger's, and the way out; None: they do."""

    def hides_rows(self, connection: Connection, table: TableName) -> bool:
        """Whether a DELETE of this user may leave out rows that its condition selects."""

    def unique_keys(self, connection: Connection, table: TableName) -> list[frozenset[str]]:
        """Column sets that a unique constraint or index makes unique."""

    def tables_like(self, connection: Connection, table: TableName, prefix: str) -> list[str]:
        """Names of tables beside ``table`` that begin with ``prefix``."""

    def column_type(self, arrow_type: pa.DataType) -> str:
        """The type that a created table gives a column of this kind."""

    def fit(self, column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
        """How values of ``arrow_type`` reach the column, or None when they can't."""

    def keeps_order(self, arrow_type: pa.DataType) -> bool:
        """Whether stored values compare as the values themselves: a version column must."""

    def create_staging(
        self, name: TableName, columns: Sequence[tuple[str, str]], *, temporary: bool
    ) -> str:
        """The statement that makes an empty table of (name, type) columns, no constraints.

        A temporary one belongs to the session and ends with its transaction.
        """

    @property
    def endpoint(self) -> str:
        """Where the database is, for people: never a password."""


Connect = Callable[[Dialect, str], Connection]
"""How a session is opened: ``(dialect, application) -> Connection``. Tests put a wrapper here."""


def connect(dialect: Dialect, application: str) -> Connection:
    """Open a session, plainly."""
    return dialect.connect(application)
