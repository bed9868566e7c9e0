"""Destinations with a ledger in a SQL database: inspection without writing, dead letters, discards,
and the user's privileges by the catalog.

In a discard, the content of dead letters is removed, and their rows stay. One transaction locks the
pending dead letters, chooses some, and removes key, value and headers of these. A replay at the
same time has locked a dead letter before, and has deleted it, or waits for the lock and finds the
dead letter discarded. A repetition after a lost answer finds nothing to do.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from oncely.core.batch import Reject, Rejection
from oncely.errors import TableMismatch
from oncely.kinds.destination import Check, LedgerState, Room, Which, refusal
from oncely.stores.sql.connection import Connection, TableName, brief_session, plain, transaction
from oncely.stores.sql.dead_letters import FIRST
from oncely.stores.sql.ledger import SqlLedger
from oncely.stores.sql.tables import (
    AMENDMENTS,
    PIPELINES,
    POSITIONS,
    RANGES,
    REJECTS,
    TABLES,
    activity,
)
from oncely.stores.sql.takeover import check_known_table, check_same_table, require_ledger

if TYPE_CHECKING:
    from oncely.stores.sql.connection import Dialect
    from oncely.stores.sql.sqlite import Sqlite


def look(ledger: SqlLedger) -> LedgerState:
    """Read the ledger; empty if it was never created.

    Raises:
        WrongInput: the database refuses the login.
        NewerFormat, OlderFormat: another version has written the pipeline's ledger.
        Unavailable: no answer.
    """
    with session(ledger) as connection:
        if connection is None or not ledger.tables.exists(connection):
            return LedgerState()
        statements = ledger.statements
        registered = statements.registered(connection)
        if registered is None:
            return LedgerState()
        entries = statements.entries(connection)
        return LedgerState(
            registered.epoch,
            registered.cluster_id,
            {tp: entry.position for tp, entry in entries.items()},
            statements.topic_ids(connection),
            ledger.dead_letters.count(connection),
            statements.leader_epochs(connection),
            activity(connection, ledger.tables),
            refused=refusal(lambda: check_same_table(connection, statements, registered)),
            time_limits=ledger.dialect.time_limits(connection),
        )


def dead_letters(
    ledger: SqlLedger, limit: int, *, discarded: bool = False
) -> tuple[Sequence[Reject], int]:
    """The first pending, or discarded, dead letters, and their total number."""
    with session(ledger) as connection:
        if connection is None or not ledger.tables.exists(connection):
            return (), 0
        letters = ledger.dead_letters
        found = letters.read(connection, FIRST, limit, discarded=discarded)
        return found, letters.count(connection, discarded=discarded)


@contextmanager
def session(ledger: SqlLedger) -> Iterator[Connection | None]:
    """A session for inspection; None if the database is a file that does not exist yet."""
    with ExitStack() as opened:
        connection = None
        try:
            connection = opened.enter_context(brief_session(ledger.dialect, "look", ledger.connect))
        except TableMismatch:
            if not ledger.create:
                raise
        yield connection


_AT_ONCE = 500
"""Dead letters that are in memory, with their values."""


def discard_letters(
    ledger: SqlLedger, which: Which, execute: bool, check: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Discard pending dead letters: see
    :meth:`oncely.kinds.destination.Destination.discarding`."""
    letters, reasons = ledger.dead_letters, Counter[str]()
    with (
        brief_session(ledger.dialect, "discard", ledger.connect) as ours,
        transaction(ours) if execute else nullcontext(),
    ):
        for found in _pending(ledger, ours, lock=execute):
            chosen = [one.discarded for one in found if which(one)]
            reasons.update(one.reason for one in chosen)
            if execute:
                letters.change(ours, chosen)
        check()
    return reasons


def _pending(ledger: SqlLedger, ours: Connection, *, lock: bool) -> Iterator[list[Reject]]:
    after = FIRST
    while found := ledger.dead_letters.read(ours, after, _AT_ONCE, lock=lock):
        yield found
        after = (*found[-1].partition, found[-1].offset)


class Refused(Exception):
    """Rows of the open transaction were refused; it is rolled back.

    Attributes:
        rejections: their records.
    """

    def __init__(self, rejections: Sequence[Rejection]) -> None:
        self.rejections = rejections


def ledger_checks(ledger: SqlLedger, connection: Connection | None) -> Iterator[Check]:
    """The checks of a run: the database file, and the ledger.

    Args:
        ledger: the ledger.
        connection: None if the database is a file that does not exist yet.
    """
    if connection is None:
        if _is_file(ledger.dialect):
            yield "sink.url", ledger.dialect.require_creatable
        return
    if not ledger.create:
        yield "sink.create", lambda: require_ledger(connection, ledger.tables)
    yield "sink.table", lambda: check_known_table(connection, ledger.tables)


# -- privileges ------------------------------------------------------------------------------


_CHANGED = "SELECT INSERT UPDATE"
_RUN = {PIPELINES: _CHANGED, POSITIONS: _CHANGED, RANGES: "SELECT INSERT DELETE",
        REJECTS: "SELECT INSERT DELETE"}  # fmt: skip
"""What a run does with the ledger's tables: it joins old ranges, and a dead letter replaces the one
that its record had before."""

_FURTHER: Mapping[str, Mapping[str, str]] = {
    "audit": {AMENDMENTS: "SELECT", "": "SELECT"},
    "offsets reset": {RANGES: "UPDATE", AMENDMENTS: "SELECT UPDATE"},
    "rejects replay": {REJECTS: "UPDATE", AMENDMENTS: "INSERT"},
    "rejects discard": {REJECTS: "UPDATE"},
    "repair": {AMENDMENTS: "SELECT INSERT", "": "SELECT DELETE"},
}
"""What other commands do beside that; an empty name is the destination."""


@dataclass(frozen=True)
class Needs:
    """The operations of a pipeline on the database, except those on the ledger.

    Attributes:
        upsert: it updates and deletes rows.
        temporary: rows are sent through a temporary table.
        columns: the columns of the destination that are written.
    """

    upsert: bool = False
    temporary: bool = False
    columns: Sequence[str] = ()


def _is_file(dialect: Dialect) -> TypeGuard[Sqlite]:
    from oncely.stores.sql.sqlite import Sqlite  # not in tasks, which import this module

    return isinstance(dialect, Sqlite)


def missing_privileges(ledger: SqlLedger, connection: Connection, needs: Needs) -> list[str]:
    """One sentence for each missing privilege."""
    if _is_file(ledger.dialect):
        return list(_sqlite(Path(ledger.dialect.path)))
    return list(_postgres(ledger, connection, needs))


def room(ledger: SqlLedger, connection: Connection) -> Room | None:
    """The connections that the database has left; None if it does not count them."""
    if _is_file(ledger.dialect):
        return None
    ((limit, used),) = connection.query(
        "SELECT least("
        " current_setting('max_connections')::int"
        " - current_setting('superuser_reserved_connections')::int,"
        " coalesce(nullif((SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user), -1),"
        "  1000000),"
        " coalesce(nullif((SELECT datconnlimit FROM pg_database"
        "  WHERE datname = current_database()), -1), 1000000)),"
        " (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')"
    )
    return Room(int(limit), int(used))


def _sqlite(path: Path) -> Iterator[str]:
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"write in the directory {folder}: SQLite puts its journal there"
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        yield f"read and write the file {path}"


def _postgres(ledger: SqlLedger, connection: Connection, needs: Needs) -> Iterator[str]:
    ((user, read_only),) = connection.query(
        "SELECT quote_ident(current_user), pg_is_in_recovery()"
        " OR current_setting('default_transaction_read_only') = 'on'"
    )
    if read_only:
        yield "a database that takes writes: this one is a standby or read-only"
    schema = _schema(ledger, connection)
    if schema is None:
        yield f"the schema {ledger.target.schema or '(of search_path)'}, which does not exist"
        return
    own = "SELECT INSERT UPDATE DELETE" if needs.upsert else "INSERT"
    yield from _grants(ledger, connection, user, {**_RUN, "": own}, needs.columns)
    of_run = [*map(ledger.target.sibling, TABLES), ledger.target]
    facts = ledger.dialect.facts(connection, of_run)
    missing = [one.name for one, of in zip(of_run, facts, strict=True) if of.identity is None]
    if ledger.target.name not in missing:
        name = _named(ledger, connection, ledger.target)
        for one in _sequences(connection, name):
            yield f"GRANT USAGE ON SEQUENCE {one} TO {user}"
    yield from _in_schema(connection, schema, user, missing if ledger.create else [], needs)


def further_privileges(
    ledger: SqlLedger, connection: Connection, columns: Sequence[str]
) -> Iterator[str]:
    """One sentence for each command for which a user who may run the pipeline lacks privileges."""
    if _is_file(ledger.dialect):
        return
    ((user,),) = connection.query("SELECT quote_ident(current_user)")
    for verb, wanted in _FURTHER.items():
        if lacks := "; ".join(_grants(ledger, connection, user, wanted, columns)):
            yield f"`oncely {verb}` needs more than a run: {lacks}"


def _grants(
    ledger: SqlLedger,
    connection: Connection,
    user: str,
    wanted: Mapping[str, str],
    columns: Sequence[str],
) -> Iterator[str]:
    """A statement for each table that exists, by its name; of the destination by an empty one."""
    for one, privileges in wanted.items():
        table = ledger.target.sibling(one) if one else ledger.target
        if ledger.dialect.columns(connection, table):
            written = () if one else columns
            if lacks := _lacks(connection, ledger, table, privileges.split(), written):
                yield f"GRANT {', '.join(lacks)} ON {_named(ledger, connection, table)} TO {user}"


def _named(ledger: SqlLedger, connection: Connection, table: TableName) -> str:
    quoted = plain(ledger.tables.quoted(table))
    ((name,),) = connection.query("SELECT to_regclass(%s)::text", (quoted,))
    return str(name)


def _schema(ledger: SqlLedger, connection: Connection) -> str | None:
    rows = connection.query(
        "SELECT nspname FROM pg_namespace WHERE nspname = coalesce(%s::text, current_schema())",
        (ledger.target.schema,),
    )
    return str(rows[0][0]) if rows else None


def _lacks(
    connection: Connection,
    ledger: SqlLedger,
    table: TableName,
    wanted: Sequence[str],
    columns: Sequence[str],
) -> list[str]:
    """The privileges that the user has neither on the table nor on each of the columns."""
    name = plain(ledger.tables.quoted(table))
    return [
        one
        for one in wanted
        if not connection.query(
            "SELECT CASE WHEN has_table_privilege(%s, %s) THEN TRUE WHEN %s THEN FALSE ELSE"
            " (SELECT bool_and(has_column_privilege(%s, c, %s)) FROM unnest(%s::text[]) AS c) END",
            (name, one, one == "DELETE" or not columns, name, one, list(columns)),
        )[0][0]
    ]


def _sequences(connection: Connection, table: str) -> list[str]:
    """Sequences of defaults that this user may not use; those of identities need no privilege."""
    rows = connection.query(
        "SELECT s.oid::regclass::text FROM pg_attrdef d JOIN pg_depend p ON p.objid = d.oid"
        " AND p.classid = 'pg_attrdef'::regclass AND p.refclassid = 'pg_class'::regclass"
        " JOIN pg_class s ON s.oid = p.refobjid WHERE d.adrelid = to_regclass(%s)"
        " AND CASE WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE') END",
        (table,),
    )
    return [name for (name,) in rows]


def _in_schema(
    connection: Connection, schema: str, user: str, missing: Sequence[str], needs: Needs
) -> Iterator[str]:
    ((usage, create, temporary, schema),) = connection.query(
        "SELECT has_schema_privilege(%s, 'USAGE'), has_schema_privilege(%s, 'CREATE'),"
        " has_database_privilege(current_database(), 'TEMP'), quote_ident(%s)",
        (schema, schema, schema),
    )
    if not usage:
        yield f"GRANT USAGE ON SCHEMA {schema} TO {user}"
    if missing and not create:
        yield (
            f"GRANT CREATE ON SCHEMA {schema} TO {user}, or somebody else creates"
            f" {', '.join(missing)} by the DDL and sink.create = false"
        )
    if needs.temporary and not temporary:
        ((database,),) = connection.query("SELECT quote_ident(current_database())")
        yield f"GRANT TEMP ON DATABASE {database} TO {user}"
