"""PostgreSQL: sessions by psycopg, rows by binary COPY encoded straight from Arrow.

psycopg speaks the protocol and pgpq encodes whole Arrow batches; together they send 500,000
rows in 0.6 of the time that the ADBC driver takes (docs/decisions/0002).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import pgpq
import psycopg
import pyarrow as pa

from oncely.clients.sql.connection import (
    BadData,
    Column,
    ColumnFit,
    Connection,
    Contention,
    LoanBroken,
    Params,
    Row,
    RowByRow,
    RowsDropped,
    TableAltered,
    TableName,
)
from oncely.clients.sql.postgres_digest import (
    COMPUTES,
    NotComputable,
    digest_kind,
    row_digest,
)
from oncely.clients.sql.postgres_lent import LentTransaction, lent
from oncely.clients.sql.postgres_session import WatchedSession
from oncely.clients.sql.postgres_types import column_type, fit, refuse_too_early
from oncely.core.digest import Kind, Recipe
from oncely.errors import OncelyError, Stopped, TableMismatch, Unavailable, WrongInput
from oncely.secrets import Secrets, redact

log = logging.getLogger(__name__)
T = TypeVar("T")

# A zombie that was paused between its compare-and-set and COMMIT holds a row lock: no session waits
# for it longer than this, and the server ends it (SET LOCAL also works behind PgBouncer). READ
# COMMITTED, independent of the server's default: rows that another attempt has committed meanwhile
# must be visible, or they would look like constraint violations of ours.
_BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED;"
    " SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '60s';"
    " SELECT pg_is_in_recovery()"
)
_COPY_BYTES = 1 << 20
# The SQLSTATEs, or classes of them, of a value or row that is refused. 44 is the CHECK OPTION of a
# view. 54000 and 54001, a text too long for its index and JSON too deep for the stack, would be
# retried forever if they were not rejects.
_DATA = ("22", "23", "44", "54000", "54001")
_PLAN = "`oncely plan` prints the DDL"
_POLICY = "if row-level security refuses the rows, use a role with BYPASSRLS or change the policy"
_ROUTINE = (Stopped, "correct the trigger or function that raised it")
_LEDGER_HOLDS = "the pipeline continues from its ledger"
# Errors that no retry can fix, by SQLSTATE or by class. All others are Unavailable.
_PERMANENT: dict[str, tuple[type[OncelyError], str]] = {
    "09": _ROUTINE,
    "0A": (WrongInput, f"write to a table that supports the statement; {_POLICY}"),
    "0L": (WrongInput, "check the roles and their grants"),
    "0P": (WrongInput, "check the roles and their grants"),
    "21": (
        WrongInput,
        "two records have keys that differ, and that the unique index treats as equal (letter"
        " case, a trigger that changes them): make them equal in the transform, or change"
        " sink.keys; otherwise correct the subquery in the trigger or policy",
    ),
    "27": _ROUTINE,
    "28": (WrongInput, "check user, password and role in sink.url"),
    "2B": (WrongInput, "drop the dependent objects first"),
    "2F": _ROUTINE,
    "38": _ROUTINE,
    "39": _ROUTINE,
    "3D": (WrongInput, "check the database in sink.url"),
    "3F000": (TableMismatch, _PLAN),
    "42": (WrongInput, "`oncely plan` compares the table with the rows"),
    "42501": (
        WrongInput,
        f"grant it, or create the tables that `plan` prints; {_POLICY}",
    ),
    "42703": (TableMismatch, _PLAN),
    "42804": (TableMismatch, _PLAN),
    "42P01": (TableMismatch, _PLAN),
    "54": (WrongInput, "the table or the rows exceed a limit of the server: use fewer columns"),
    "55000": (WrongInput, "the table does not support this statement: a view, or a publication"),
    "F0": (WrongInput, "correct the server's configuration files"),
    "P0": _ROUTINE,
    "XX001": (Stopped, f"restore the database; {_LEDGER_HOLDS}"),
    "XX002": (Stopped, f"REINDEX, or restore the database; {_LEDGER_HOLDS}"),
}
# Of functions of the user: RAISE EXCEPTION, a statement beyond the time limit, a caught error.
_OF_THE_FUNCTION = ("P0001", "57014", "25P02")
_FAILED_BEFORE = "25P02"
_CHAIN = 20  # errors that were raised from another
_SETUP_LOCK = 0x0ECE_1E  # any constant: it serialises CREATE TABLE IF NOT EXISTS, which races
_REWRITE_LOCK = 0x0ECE_2E


class PostgresConnection:
    """A psycopg session whose errors are classified by SQLSTATE class."""

    def __init__(self, session: WatchedSession) -> None:
        self._session = session

    def begin(self) -> None:
        """Start a transaction with bounded waiting for locks.

        Raises:
            Unavailable: the server is a standby. It refuses some statements as not supported
                (0A000), an error that is permanent on a primary.
        """
        if _sorted_errors(lambda: _last_row(self._session.execute(_BEGIN))) == (True,):
            self.rollback()
            raise Unavailable(
                "PostgreSQL: the server is a standby, which accepts no writes",
                way_out="wait for the failover to end, or let sink.url reach the primary"
                " (target_session_attrs=read-write)",
            )

    def commit(self) -> None:
        """End the transaction.

        Raises:
            Unavailable: its outcome is unknown, or the server has rolled it back: COMMIT of a
                failed transaction returns ROLLBACK, and no error.
        """
        answer = _sorted_errors(lambda: self._session.execute("COMMIT")).statusmessage
        if answer != "COMMIT":
            raise Unavailable(f"PostgreSQL answered COMMIT with {answer}")

    def rollback(self) -> None:
        """Undo the transaction."""
        _sorted_errors(lambda: self._session.execute("ROLLBACK"))

    def query(self, sql: str, params: Params = ()) -> list[Row]:
        """Run one statement that returns rows."""
        return _sorted_errors(lambda: self._session.execute(sql.encode(), params).fetchall())

    def execute(self, sql: str, params: Params = ()) -> int:
        """Run one statement, and return the number of rows that it has changed."""
        return _sorted_errors(lambda: self._session.execute(sql.encode(), params).rowcount)

    def execute_many(self, sql: str, rows: Iterable[Params]) -> int:
        """Run one statement for each of ``rows``, pipelined into one round trip."""
        cursor = self._session.cursor()
        _sorted_errors(lambda: cursor.executemany(sql.encode(), list(rows)))
        return cursor.rowcount

    def copy(self, table: TableName, rows: pa.Table) -> None:
        """Append ``rows`` by binary COPY.

        Raises:
            BadData: with the index of the refused row.
            RowsDropped: a trigger has dropped rows.
        """
        columns = ", ".join(_quoted(name) for name in rows.column_names)
        statement = f"COPY {_regclass(table)} ({columns}) FROM STDIN WITH (FORMAT binary)"
        taken = _sorted_errors(lambda: self._send(statement, rows), copied=table.name)
        if taken != rows.num_rows:
            raise RowsDropped(table, rows.num_rows, taken)

    def _send(self, statement: str, rows: pa.Table) -> int:
        refuse_too_early(rows)
        encoder = pgpq.ArrowToPostgresBinaryEncoder(rows.schema)
        cursor = self._session.cursor()
        with cursor.copy(statement.encode()) as stream:
            stream.write(encoder.write_header())
            for batch in rows.to_batches(max_chunksize=_rows_a_message(rows)):
                stream.write(encoder.write_batch(batch))
            stream.write(encoder.finish())
        return cursor.rowcount

    def insert_each(self, into: RowByRow, rows: pa.Table) -> list[tuple[int, str]]:
        """Insert ``rows`` separately, in a loop inside the server."""
        self.execute("DROP TABLE IF EXISTS _oncely_refused")
        self.execute("CREATE TEMP TABLE _oncely_refused (n BIGINT, reason TEXT) ON COMMIT DROP")
        self.execute(into.create_staged)
        numbers = pa.array(range(rows.num_rows), pa.int64())
        self.copy(into.staged, rows.append_column(into.number, numbers))
        self.execute(_each_row(into))
        self.execute(f"DROP TABLE {_quoted(into.staged.name)}")
        refused = self.query("SELECT n, reason FROM _oncely_refused ORDER BY n")
        self.execute("DROP TABLE _oncely_refused")
        dropped = sum(1 for _, reason in refused if reason is None)
        if dropped:
            raise RowsDropped(into.table, rows.num_rows, rows.num_rows - dropped)
        return refused

    @contextmanager
    def lend(self, seconds: float) -> Iterator[psycopg.Connection[Row]]:
        """Lend the transaction in a savepoint (:mod:`oncely.clients.sql.postgres_lent`)."""
        tx = None
        try:
            with lent(self._session, seconds) as tx:
                yield tx
        except (OncelyError, LoanBroken):
            raise
        except Exception as error:
            failure = _failure(error, tx)
            found = None if failure is None else _sort_lent(failure)
            if isinstance(error, psycopg.Error) or isinstance(found, Unavailable):
                raise found or error from error
            raise

    def check_constraints(self) -> None:
        """Check deferred constraints now, then let later statements defer again."""
        _sorted_errors(
            lambda: self._session.execute(
                "SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED"
            )
        )

    def close(self) -> None:
        """End the session; never raises."""
        with suppress(psycopg.Error):
            self._session.close()


def _last_row(cursor: psycopg.Cursor[Row]) -> Row | None:
    """The row of the last of several statements."""
    while cursor.nextset():
        pass
    return cursor.fetchone()


def _rows_a_message(rows: pa.Table) -> int:
    """Number of rows whose encoding is about a megabyte, so that a chunk is not in memory twice."""
    rows_a_megabyte = _COPY_BYTES * max(1, int(rows.num_rows)) // max(1, int(rows.nbytes))
    return max(1, min(16_384, rows_a_megabyte))


def _sorted_errors(work: Callable[[], T], copied: str | None = None) -> T:
    """Run ``work``; convert an error of the driver by its consequence for the commit path."""
    try:
        return work()
    except psycopg.Error as error:
        raise _sort(error, copied) from error


def _sort(error: psycopg.Error, copied: str | None) -> Exception:
    state = error.sqlstate or ""
    text = redact((error.diag.message_primary or str(error)).strip())
    if state == "22P03":  # our encoding, not a record: the table was altered during the run
        return TableAltered(f"PostgreSQL: {text}")
    if state[:2] in _DATA or state in _DATA:
        return BadData(_reason(error, text), _line(error.diag.context, copied))
    if state[:2] == "40" or state == "55P03":
        return Contention(f"PostgreSQL: {text}")
    permanent = _PERMANENT.get(state) or _PERMANENT.get(state[:2])
    if permanent is not None:
        kind, way_out = permanent
        return kind(f"PostgreSQL: {text}", way_out=way_out)
    return Unavailable(f"PostgreSQL: {text}" if text else "PostgreSQL ended the session")


def _failure(error: BaseException, tx: LentTransaction | None) -> psycopg.Error | None:
    """The error of a statement behind an error of the block that has executed it."""
    seen: BaseException | None = error
    for _ in range(_CHAIN):
        if isinstance(seen, psycopg.Error) and seen.sqlstate != _FAILED_BEFORE:
            return seen
        seen = None if seen is None else seen.__cause__ or seen.__context__
    return None if tx is None else tx.failure


def _sort_lent(error: psycopg.Error) -> Exception:
    """As :func:`_sort`; what the user's own statements have raised or exceeded is bad data."""
    if error.sqlstate in _OF_THE_FUNCTION:
        return BadData(redact((error.diag.message_primary or str(error)).strip()))
    if error.sqlstate is None and isinstance(error, psycopg.ProgrammingError | psycopg.DataError):
        return BadData(redact(str(error).strip()))  # psycopg's own: nothing was sent
    return _sort(error, None)


def _reason(error: psycopg.Error, text: str) -> str:
    detail = redact(error.diag.message_detail or "")
    return f"{text} ({detail})" if detail else text


def _line(context: str | None, copied: str | None) -> int | None:
    """The 0-based row that COPY names in its context: ``COPY <table>, line 3, column b``.

    Table and column may be any text, including line breaks, so the known table name is matched as a
    whole.
    """
    if copied is None:
        return None
    named = re.search(rf"^COPY {re.escape(copied)}, line (\d+)", context or "", re.MULTILINE)
    return int(named.group(1)) - 1 if named else None


def _each_row(into: RowByRow) -> str:
    """A loop over the staged rows that notes errors that :func:`_sort` classifies as bad data."""
    table = ".".join(_quoted(part) for part in into.table if part)
    names = ", ".join(_quoted(name) for name in into.casts)
    values = ", ".join(
        f"CAST(_oncely_row.{_quoted(name)} AS {cast})" if cast else f"_oncely_row.{_quoted(name)}"
        for name, cast in into.casts.items()
    )
    number, data = _quoted(into.number), ", ".join(f"'{state}'" for state in _DATA)
    body = f"""
DECLARE
    _oncely_row record; _oncely_taken bigint;
    _oncely_state text; _oncely_reason text; _oncely_detail text;
BEGIN
    SET CONSTRAINTS ALL IMMEDIATE;
    FOR _oncely_row IN SELECT * FROM {_quoted(into.staged.name)} ORDER BY {number} LOOP
        BEGIN
            INSERT INTO {table} ({names}) VALUES ({values});
            GET DIAGNOSTICS _oncely_taken = ROW_COUNT;
            IF _oncely_taken <> 1 THEN
                INSERT INTO _oncely_refused VALUES (_oncely_row.{number}, NULL);
            END IF;
        EXCEPTION WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS _oncely_state = RETURNED_SQLSTATE,
                _oncely_reason = MESSAGE_TEXT, _oncely_detail = PG_EXCEPTION_DETAIL;
            IF left(_oncely_state, 2) NOT IN ({data}) AND _oncely_state NOT IN ({data}) THEN
                RAISE;
            END IF;
            IF _oncely_detail <> '' THEN
                _oncely_reason := _oncely_reason || ' (' || _oncely_detail || ')';
            END IF;
            INSERT INTO _oncely_refused VALUES (_oncely_row.{number}, _oncely_reason);
        END;
    END LOOP;
    SET CONSTRAINTS ALL DEFERRED;
END"""
    tag = "$oncely$"
    while tag in body:  # a name may be any text
        tag = f"{tag[:-1]}_$"
    return f"DO {tag}{body}{tag}".replace("%", "%%")


def _regclass(table: TableName) -> str:
    """The name in the syntax of ``to_regclass``."""
    return ".".join(_quoted(part) for part in table if part)


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


@dataclass(frozen=True)
class Postgres:
    """The dialect of PostgreSQL 12 and later."""

    url: str = field(repr=False)
    connect_timeout_seconds: int = 10
    name: str = "postgresql"
    for_update: str = " FOR UPDATE"
    clock: str = "clock_timestamp()"
    clear_table: str = "TRUNCATE TABLE"

    @property
    def endpoint(self) -> str:
        """The address of the database, for messages: never with a password."""
        info = psycopg.conninfo.conninfo_to_dict(self.url)
        return f"{info.get('host', 'localhost')}:{info.get('port', 5432)}/{info.get('dbname', '')}"

    def connect(self, application: str) -> Connection:
        """Open a session that is recognisable by its ``application_name``."""
        try:
            session = WatchedSession.connect(
                self.url,
                autocommit=True,
                application_name=application,
                connect_timeout=self.connect_timeout_seconds,
                prepare_threshold=None,  # prepared statements break behind PgBouncer
                # A host that disappears without closing the connection is detected within a minute.
                keepalives_idle=30,
                keepalives_interval=10,
                keepalives_count=3,
                tcp_user_timeout=30_000,
            )
        except psycopg.ProgrammingError as error:
            raise WrongInput(
                f"sink.url: {self._secrets.redact(str(error))}",
                way_out="postgresql://user:password@host:port/database",
            ) from None
        except psycopg.OperationalError as error:
            secrets = self._secrets
            said = secrets.redact(str(error))
            raise _refused(said, secrets.redact(self.endpoint)) from None
        session.url, session.connect_timeout_seconds = self.url, self.connect_timeout_seconds
        return PostgresConnection(session)

    @property
    def _secrets(self) -> Secrets:
        written = re.findall(r"://[^:@/?]*:(\S*)@|password=([^&\s]*)", self.url)
        values = [part for parts in written for part in parts]
        shown: list[str] = []
        with suppress(
            psycopg.ProgrammingError
        ):  # libpq cannot parse it, and may quote a part of it
            parts = psycopg.conninfo.conninfo_to_dict(self.url)
            values += [str(parts[key]) for key in ("password", "sslpassword") if parts.get(key)]
            shown = [str(parts[key]) for key in ("user", "host", "dbname") if parts.get(key)]
        return Secrets.of(values, shown)

    def create_database(self) -> None:
        """Does nothing: a server's databases are created by its administrator."""

    def quote(self, identifier: str) -> str:
        """Quoted, and with ``%`` doubled: statements carry ``%s`` parameters."""
        return _quoted(identifier).replace("%", "%%")

    def translate(self, ddl: str) -> str:
        """The ledger's definition unchanged: it is written with PostgreSQL's types."""
        return ddl

    def lock_for_setup(self, connection: Connection) -> None:
        """Serialise concurrent creation of tables, until the transaction's end."""
        connection.query("SELECT pg_advisory_xact_lock(%s)", (_SETUP_LOCK,))

    def lock_for_rewrite(self, connection: Connection, pipeline: str) -> None:
        """An advisory lock, which no run takes. Pipelines of one name in two schemas share it."""
        connection.query(
            "SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (_REWRITE_LOCK, pipeline)
        )

    def end_sessions(
        self,
        connection: Connection,
        applications: str,
        tables: Sequence[TableName],
        only: Collection[str] | None = None,
    ) -> int:
        """``pg_terminate_backend`` for other sessions of the pipeline.

        No timeout of the server fires while it waits for COPY data, so a paused process would keep
        its session, and its locks, forever. A session's name does not contain its schema: if
        another schema of this database has a ledger too, sessions are identified by the locks that
        they hold. A session without locks blocks no other session, and its compare-and-set will
        read a newer epoch.
        """
        names = [".".join(_quoted(part) for part in table if part) for table in tables]
        named = None if only is None else list(only)
        ended = connection.query(
            "WITH own AS (SELECT to_regclass(name) AS relation FROM unnest(%s::text[]) AS t(name))"
            " SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a"
            " WHERE starts_with(a.application_name, %s)"
            " AND (%s::text[] IS NULL OR a.application_name = ANY (%s::text[]))"
            " AND a.pid <> pg_backend_pid() AND a.usename = current_user"
            " AND a.datname = current_database()"
            " AND (NOT EXISTS (SELECT 1 FROM pg_class c WHERE c.relname = %s AND c.relkind = 'r'"
            " AND c.oid NOT IN (SELECT relation FROM own WHERE relation IS NOT NULL))"
            " OR EXISTS (SELECT 1 FROM pg_locks l JOIN own ON own.relation = l.relation"
            " WHERE l.pid = a.pid))",
            (names, applications, named, named, tables[0].name),
        )
        return len(ended)

    def columns(self, connection: Connection, table: TableName) -> list[Column]:
        """The table's columns in order; empty if there is no such table."""
        rows = connection.query(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,"
            " a.atthasdef OR a.attidentity <> '', a.attgenerated <> '' OR a.attidentity = 'a'"
            " FROM pg_attribute a WHERE a.attrelid = to_regclass(%s)"
            " AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
            (_regclass(table),),
        )
        return [
            Column(name, kind, bool(notnull and not filled and not generated), bool(generated))
            for name, kind, notnull, filled, generated in rows
        ]

    def column_types(
        self, connection: Connection, table: TableName
    ) -> tuple[str | None, dict[str, str]]:
        """OID and types; they may be outdated unless the transaction holds a lock of the table."""
        rows = connection.query(
            "SELECT a.attrelid::text, a.attname, format_type(a.atttypid, a.atttypmod)"
            " FROM pg_attribute a WHERE a.attrelid = to_regclass(%s)"
            " AND a.attnum > 0 AND NOT a.attisdropped",
            (_regclass(table),),
        )
        return (rows[0][0] if rows else None), {name: type_ for _, name, type_ in rows}

    def identity(self, connection: Connection, table: TableName) -> str | None:
        """The OID, which a table keeps until it is dropped."""
        ((oid,),) = connection.query("SELECT to_regclass(%s)::oid::text", (_regclass(table),))
        return None if oid is None else str(oid)

    def not_durable(self, connection: Connection, table: TableName) -> tuple[str, str] | None:
        """UNLOGGED and foreign tables, also as partitions."""
        name = _regclass(table)
        rows = connection.query(
            "SELECT c.oid::regclass::text, c.relkind = 'f' FROM pg_class c WHERE c.oid IN"
            " (SELECT to_regclass(%s) UNION SELECT relid FROM pg_partition_tree(to_regclass(%s)))"
            " AND (c.relkind = 'f' OR c.relpersistence <> 'p') ORDER BY 1 LIMIT 1",
            (name, name),
        )
        if not rows:
            return None
        ((found, foreign),) = rows
        if foreign:
            return (
                f"{found} is a foreign table: its rows are not in the transaction of the positions",
                "write to a table of this database, and copy from there",
            )
        return (
            f"{found} is UNLOGGED: a crash of the server empties it, and the positions stay",
            f"`ALTER TABLE {found} SET LOGGED`",
        )

    def hides_rows(self, connection: Connection, table: TableName) -> bool:
        """True if row-level security applies to this role and its policies do not pass all rows.

        A DELETE with a condition is subject to the policies for SELECT and for DELETE.
        """
        policies = connection.query(
            "SELECT p.polcmd::text, p.polpermissive, pg_get_expr(p.polqual, p.polrelid)"
            " FROM pg_class c LEFT JOIN pg_policy p ON p.polrelid = c.oid"
            " AND EXISTS (SELECT FROM unnest(p.polroles) AS role (id)"
            " WHERE CASE WHEN id = 0 THEN TRUE ELSE pg_has_role(id, 'USAGE') END)"
            " WHERE c.oid = to_regclass(%s) AND row_security_active(c.oid)",
            (_regclass(table),),
        )
        return bool(policies) and not all(_all_rows(policies, one) for one in ("r", "d"))

    def cascades(self, connection: Connection, table: TableName) -> list[str]:
        """Tables with a foreign key that deletes or changes their rows."""
        rows = connection.query(
            "SELECT DISTINCT conrelid::regclass::text FROM pg_constraint WHERE contype = 'f'"
            " AND confrelid = to_regclass(%s) AND confdeltype IN ('c', 'n', 'd') ORDER BY 1",
            (_regclass(table),),
        )
        return [name for (name,) in rows]

    def unique_keys(self, connection: Connection, table: TableName) -> list[frozenset[str]]:
        """Column sets of valid, full, immediate unique indexes: those that ON CONFLICT can
        infer."""
        rows = connection.query(
            "SELECT array_agg(a.attname) FROM pg_index i"
            " JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)"
            " WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid"
            " AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL"
            " GROUP BY i.indexrelid",
            (_regclass(table),),
        )
        return [frozenset(names) for (names,) in rows]

    def tables_like(self, connection: Connection, prefix: TableName) -> list[str]:
        """Names of tables in the schema of ``prefix`` that begin with its name."""
        rows = connection.query(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relkind = 'r' AND n.nspname = COALESCE(%s::text, current_schema())"
            " AND starts_with(c.relname, %s)",
            (prefix.schema, prefix.name),
        )
        return [name for (name,) in rows]

    def column_type(self, arrow_type: pa.DataType) -> str:
        """The type of a created table's column for values of this type."""
        return column_type(arrow_type)

    def fit(self, column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
        """The conversion of values of ``arrow_type`` to the column, or None if there is none."""
        return fit(column, arrow_type)

    def digest_kind(self, column: Column, fit: ColumnFit) -> Kind | None:
        """Not of types that the server casts or pads, and not of columns that round."""
        return digest_kind(column, fit)

    def digest(
        self,
        connection: Connection,
        table: TableName,
        recipe: Recipe,
        offset: str,
        where: tuple[str, Params],
    ) -> int | None:
        """The sum of the rows' digests."""
        if connection.query(COMPUTES) != [(True,)]:
            return None
        _, types = self.column_types(connection, table)
        try:
            one = row_digest(recipe, types, self.quote, offset)
        except NotComputable:
            return None
        condition, params = where
        name = ".".join(self.quote(part) for part in table if part)
        sums = connection.query(
            f"SELECT COALESCE(SUM({one}), 0)::text FROM {name} WHERE {condition}", params
        )
        return int(sums[0][0]) % (1 << 64)

    def keeps_order(self, arrow_type: pa.DataType) -> bool:
        """True for all types except structs and maps (jsonb), which do not keep their order."""
        return not pa.types.is_nested(arrow_type)

    def create_staging(
        self, name: TableName, columns: Sequence[tuple[str, str]], *, temporary: bool
    ) -> str:
        """Unlogged: if a crash empties it, the published count differs and nothing commits."""
        kind, tail = ("TEMP", " ON COMMIT DROP") if temporary else ("UNLOGGED", "")
        wanted = ", ".join(f"{self.quote(column)} {type_}" for column, type_ in columns)
        return f"CREATE {kind} TABLE {'.'.join(self.quote(p) for p in name if p)} ({wanted}){tail}"


def _all_rows(policies: Iterable[Row], command: str) -> bool:
    """True if a command's policies pass all rows: one permissive policy must, and each restrictive
    one.

    Without a USING expression a policy neither permits nor restricts existing rows.
    """
    permits = False
    for of, permissive, using in policies:
        if of not in ("*", command):
            continue
        if permissive:
            permits = permits or using == "true"
        elif using not in (None, "true"):
            return False
    return permits


_HINT = "Is the server running"


def _refused(text: str, endpoint: str) -> Exception:
    """Wrong credentials or a wrong database must be fixed by the user; other errors may be
    transient."""
    text = text.rpartition("All failures were:")[2]  # the sentence before it repeats the last one
    lines = [line.strip() for line in text.splitlines() if line.strip() and _HINT not in line]
    last = lines[-1].removeprefix("connection failed: ")
    mistakes = (
        "authentication failed",
        "no password supplied",
        "does not exist",
        "certificate",
        "not permitted",
        "no pg_hba.conf entry",
        "does not support SSL",
    )
    if any(mistake in last for mistake in mistakes):
        return WrongInput(f"sink.url: {last}", way_out="check user, password, database, sslmode")
    reasons = "; ".join(line.removeprefix("connection failed: ") for line in lines)
    return Unavailable(
        f"no connection to PostgreSQL at {endpoint}: {reasons}",
        way_out="start the server, or correct host and port in sink.url; check the network between",
    )
