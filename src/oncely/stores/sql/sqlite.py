"""SQLite: one file on one machine, STRICT tables, one writer at a time.

``BEGIN IMMEDIATE`` takes the only write lock, so a transaction never waits in its middle and never
conflicts with another writer. Tasks open the file in mode ``rw``: a task without an existing file
must fail, or each machine of a cluster would silently write a file of its own.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from oncely.core.digest import Kind, Recipe, kind_of
from oncely.errors import TableMismatch, WrongInput
from oncely.stores.sql import sqlite_connection as sqlite_types
from oncely.stores.sql.connection import (
    Barred,
    Column,
    ColumnFit,
    Connection,
    Params,
    Relation,
    Row,
    Separately,
    TableFacts,
    TableName,
    TableTypes,
)
from oncely.stores.sql.sqlite_connection import SqliteConnection, quoted, sort_error

_NEEDS = (3, 37, 0)  # STRICT tables
_WORDS = {
    "BIGINT": "INTEGER",
    "BYTEA": "BLOB",
    "TIMESTAMPTZ": "TEXT",
    "CURRENT_TIMESTAMP": "(replace(datetime('now'), ' ', 'T') || 'Z')",
}
_WORD_OR_NAME = re.compile('"(?:[^"]|"")*"|' + "|".join(rf"\b{word}\b" for word in _WORDS))
_INDEX_IN_MAIN = re.compile(r'^(CREATE INDEX IF NOT EXISTS )(\w+\s+ON )"main"\.')
_SOME = "unknown"  # SQLite has no table id that a VACUUM keeps


@dataclass(frozen=True)
class Sqlite:
    """The dialect of SQLite 3.37 and later."""

    path: str
    connect_timeout_seconds: float = 10.0
    name: str = "sqlite"
    for_update: str = ""
    clock: str = _WORDS["CURRENT_TIMESTAMP"]
    clear_table: str = "DELETE FROM"

    @property
    def endpoint(self) -> str:
        """The file."""
        return self.path

    def connect(self, application: str) -> Connection:
        """Open a session with an existing file."""
        del application  # sessions of SQLite are not visible to others
        try:
            return SqliteConnection(self._open("rw"))
        except sqlite3.Error as error:
            if not Path(self.path).exists():
                raise TableMismatch(
                    f"there is no database file {self.path}",
                    key="sink.url",
                    way_out="set sink.create = true, or create it with the DDL of `oncely plan"
                    " --ddl`; SQLite needs a local spark.master",
                ) from None
            raise sort_error(error) from None

    def create_database(self) -> None:
        """Create an empty database in WAL mode, in which readers and the writer do not block each
        other.

        An existing file is not changed, nor is its journal mode: the protocol works with any.
        """
        if Path(self.path).exists():
            return
        try:
            session = self._open("rwc")
            try:
                session.execute("PRAGMA journal_mode = WAL")
            finally:
                session.close()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                return  # another process is creating it at the moment
            raise self._uncreatable(error) from None

    def require_creatable(self) -> None:
        """Refuse a path at which :meth:`create_database` cannot create the file.

        Raises:
            WrongInput: the directory is missing, or not writable.
        """
        folder = Path(self.path).absolute().parent
        problem = ""
        if not folder.is_dir():
            problem = f"there is no directory {folder}"
        elif not os.access(folder, os.W_OK | os.X_OK):
            problem = f"this user may not write in the directory {folder}"
        if problem:
            raise self._uncreatable(problem)

    def _uncreatable(self, reason: object) -> WrongInput:
        return WrongInput(
            f"{self.path} can't be created: {reason}",
            key="sink.url",
            way_out="the directory must exist and be writable",
        )

    def _open(self, mode: str) -> sqlite3.Connection:
        if sqlite3.sqlite_version_info < _NEEDS:
            raise WrongInput(
                f"this Python has SQLite {sqlite3.sqlite_version}, which has no STRICT tables",
                way_out="SQLite 3.37 or later is needed",
            )
        session = sqlite3.connect(
            f"{Path(self.path).absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=self.connect_timeout_seconds,  # the wait of BEGIN IMMEDIATE for the lock
            isolation_level=None,  # the driver must not begin transactions
            check_same_thread=False,  # never used by two threads at once
        )
        session.create_function("oncely_json", 1, _json)
        try:
            session.execute("PRAGMA synchronous = FULL")
            session.execute("PRAGMA foreign_keys = ON")
            session.execute("PRAGMA schema_version").fetchall()  # the first read of the file
        except BaseException:
            session.close()
            raise
        return session

    def quote(self, identifier: str) -> str:
        """Quoted, and with ``%`` doubled: statements carry ``%s`` parameters."""
        return quoted(identifier).replace("%", "%%")

    def as_json(self, column: str) -> str:
        """By Python: json_quote() takes no BLOB, and rounds numbers."""
        return f"oncely_json({self.quote(column)})"

    def translate(self, ddl: str) -> str:
        """Replace PostgreSQL's types by SQLite's, names unchanged; tables are STRICT.

        In SQLite the schema is named before an index, and never before the index's table.
        """
        own = _WORD_OR_NAME.sub(lambda found: _WORDS.get(found.group(), found.group()), ddl)
        own = _INDEX_IN_MAIN.sub(r'\1"main".\2', own)
        return f"{own} STRICT" if own.startswith("CREATE TABLE") else own

    def lock_for_setup(self, connection: Connection) -> None:
        """Does nothing: BEGIN IMMEDIATE has the only lock."""

    def lock_for_rewrite(self, connection: Connection, pipeline: str) -> None:
        """Does nothing: BEGIN IMMEDIATE has the only lock."""

    def end_sessions(
        self,
        connection: Connection,
        applications: str,
        tables: Sequence[TableName],
        only: Collection[str] | None = None,
    ) -> None:
        """Does nothing: SQLite has no server that could end sessions.

        This is safe. Only the holder of the write lock can change data, and this transaction's
        BEGIN IMMEDIATE has waited for it: the holder either finished, and its position was read, or
        died, and the operating system released its lock. A paused holder makes BEGIN IMMEDIATE wait
        until the busy timeout; then it fails, and nothing was taken over.
        """

    def time_limits(self, connection: Connection) -> dict[str, float]:  # noqa: ARG002
        """None: nothing ends a commit."""
        return {}

    def columns(self, connection: Connection, table: TableName) -> list[Column]:
        """The table's columns in order; empty if there is no such table.

        Raises:
            TableMismatch: the table is not STRICT, and would accept any value in any column.
        """
        if table.schema not in (None, "main"):
            raise TableMismatch(
                f"SQLite has no schema {table.schema!r}",
                key="sink.table",
                way_out=f'sink.table = "{table.name}"',
            )
        kind = connection.query(
            "SELECT type, strict FROM pragma_table_list(%s) WHERE schema = 'main'", (table.name,)
        )
        if not kind:
            return []
        if kind[0] != ("table", 1):
            raise TableMismatch(
                f"{table} is not a STRICT table: SQLite would not refuse wrong types",
                key="sink.table",
                way_out="create it again with the DDL of `oncely plan --ddl`",
            )
        rows = connection.query(
            'SELECT name, type, "notnull", dflt_value IS NOT NULL, pk, hidden'
            " FROM pragma_table_xinfo(%s) WHERE hidden <> 1 ORDER BY cid",
            (table.name,),
        )
        one_key = sum(1 for row in rows if row[4]) == 1
        return [
            Column(name, type_, _required(type_, notnull, filled, pk, one_key), hidden > 1)
            for name, type_, notnull, filled, pk, hidden in rows
        ]

    @property
    def check_constraints(self) -> Sequence[str]:
        """None: constraints are checked by row."""
        return ()

    def types_statement(self, table: TableName) -> Sequence[str]:  # noqa: ARG002
        """None: it takes several."""
        return ()

    def types_of(self, rows: Sequence[Row]) -> TableTypes:
        """Not called."""
        raise NotImplementedError(rows)

    def column_types(self, connection: Connection, table: TableName) -> TableTypes:
        """The types are current: no session can alter a table while a transaction holds the only
        lock."""
        types = {column.name: column.type for column in self.columns(connection, table)}
        return (_SOME if types else None), types

    def place(self) -> str:
        """The file, by whatever path it is reached."""
        there = Path(self.path).stat()
        return f"{there.st_dev}:{there.st_ino}"

    def facts(self, connection: Connection, tables: Sequence[TableName]) -> list[TableFacts]:
        """:meth:`columns` refuses views, no table inherits, all are equally durable, and there are
        no rules."""
        return [
            TableFacts(
                _SOME if self.columns(connection, one) else None,
                Relation(".".join(self.quote(part) for part in one if part)),
            )
            for one in tables
        ]

    def barred(self, connection: Connection, table: TableName, *, deletes: bool) -> Barred:
        """Neither: there are no policies."""
        del connection, table, deletes
        return ""

    def cascades(self, connection: Connection, table: TableName) -> list[str]:
        """Tables with a foreign key that deletes or changes their rows."""
        rows = connection.query(
            "SELECT DISTINCT m.name FROM sqlite_master m, pragma_foreign_key_list(m.name) f"
            " WHERE m.type = 'table' AND lower(f.\"table\") = lower(%s)"
            " AND f.on_delete IN ('CASCADE', 'SET NULL', 'SET DEFAULT') ORDER BY 1",
            (table.name,),
        )
        return [name for (name,) in rows]

    def unique_keys(self, connection: Connection, table: TableName) -> list[frozenset[str]]:
        """Column sets of full unique indexes, and the primary key, which may have no index."""
        columns = connection.query(
            "SELECT name FROM pragma_table_xinfo(%s) WHERE pk > 0", (table.name,)
        )
        parts = connection.query(
            "SELECT l.seq, i.name FROM pragma_index_list(%s) l, pragma_index_info(l.name) i"
            ' WHERE l."unique" = 1 AND l.partial = 0',
            (table.name,),
        )
        by_index: dict[int, list[str | None]] = {}
        for index, column in parts:
            by_index.setdefault(index, []).append(column)
        found = [frozenset(name for (name,) in columns)]
        # An indexed expression has no name, and ON CONFLICT (columns) does not match it.
        found += [frozenset(filter(None, n)) for n in by_index.values() if None not in n]
        return [key for key in found if key]

    def collations(self, connection: Connection, table: TableName) -> dict[str, str]:
        """NOCASE, RTRIM and functions of others."""
        rows = connection.query(
            "SELECT i.name, i.coll FROM pragma_index_list(%s) l, pragma_index_xinfo(l.name) i"
            " WHERE l.\"unique\" = 1 AND i.key AND i.name IS NOT NULL AND i.coll <> 'BINARY'",
            (table.name,),
        )
        return {name: self.quote(collation) for name, collation in rows}

    def separately(
        self,
        connection: Connection,
        table: TableName,
        keys: Collection[str],
        written: Collection[str],
    ) -> Separately:
        """Upserts only: other rows are written by a statement each anyway."""
        if not keys:
            return "never"
        unique = [one for one in self.unique_keys(connection, table) if one != frozenset(keys)]
        found = connection.query(
            "SELECT type = 'trigger', sql LIKE '%%CHECK%%' FROM sqlite_master"
            " WHERE tbl_name = %s COLLATE NOCASE AND type IN ('table', 'trigger')",
            (table.name,),
        )
        linked = connection.query(
            'SELECT lower("table") FROM pragma_foreign_key_list(%s)', (table.name,)
        )
        partial = connection.query(
            'SELECT 1 FROM pragma_index_list(%s) WHERE "unique" = 1 AND partial = 1', (table.name,)
        )
        if unique or partial or any(t for t, _ in found) or (table.name.lower(),) in linked:
            return "always"
        others = len(self.columns(connection, table)) > len(written)
        return "same keys" if linked or (others and any(c for _, c in found)) else "never"

    def column_type(self, arrow_type: pa.DataType) -> str:
        """The type of a created table's column for values of this type."""
        return sqlite_types.column_type(arrow_type)

    def fit(self, column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
        """The conversion of values of ``arrow_type`` to the column, or None if there is none."""
        return sqlite_types.fit(column, arrow_type)

    def digest_kind(self, column: Column, fit: ColumnFit) -> Kind | None:
        """By the values before they become texts."""
        del column
        return kind_of(fit.arrow_type)

    def digest(
        self,
        connection: Connection,
        table: TableName,
        recipe: Recipe,
        offset: str,
        where: tuple[str, Params],
    ) -> None:
        """None: SQLite has no such functions."""

    def keeps_order(self, arrow_type: pa.DataType) -> bool:
        """True if the stored form sorts in the order of the values."""
        return sqlite_types.keeps_order(arrow_type)

    def create_staging(self, name: TableName, columns: Sequence[tuple[str, str]]) -> str:
        """There is no ON COMMIT DROP: the creator of a temporary table drops it.

        A table that was not dropped was created in a failed transaction, and rolled back with it.
        """
        wanted = ", ".join(f"{self.quote(column)} {type_}" for column, type_ in columns)
        return f"CREATE TEMP TABLE {self.quote(name.name)} ({wanted}) STRICT"


def _required(type_: str, notnull: int, filled: int, pk: int, one_key: bool) -> bool:
    """True for required columns: a STRICT table's key columns are not null; a single INTEGER key
    has a default."""
    fills_itself = one_key and pk and type_.upper() == "INTEGER"
    return bool((notnull or pk) and not filled and not fills_itself)


def _json(value: str | bytes | float | None) -> str:
    """As JSON; bytes, and numbers that JSON lacks or that a reader would round, as text."""
    if isinstance(value, bytes):
        value = f"\\x{value.hex()}"
    return json.dumps(str(value) if isinstance(value, float) else value)
