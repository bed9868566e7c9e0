"""The user's privileges, read from the database's catalog."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql.connection import Connection, TableName, plain
from oncely.stores.sql.sqlite import Sqlite
from oncely.stores.sql.tables import AMENDMENTS, PIPELINES, POSITIONS, RANGES, REJECTS, TABLES

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
    """

    upsert: bool = False
    temporary: bool = False


@dataclass(frozen=True)
class Room:
    """Connections of a database.

    Attributes:
        limit: the maximum for this user.
        used: the present number, of all users.
    """

    limit: int
    used: int


def missing_privileges(sink: SqlSink, connection: Connection, needs: Needs) -> list[str]:
    """One sentence for each missing privilege."""
    if isinstance(sink.dialect, Sqlite):
        return list(_sqlite(Path(sink.dialect.path)))
    return list(_postgres(sink, connection, needs))


def room(sink: SqlSink, connection: Connection) -> Room | None:
    """The connections that the database has left; None if it does not count them."""
    if isinstance(sink.dialect, Sqlite):
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


def _postgres(sink: SqlSink, connection: Connection, needs: Needs) -> Iterator[str]:
    ((user, read_only),) = connection.query(
        "SELECT quote_ident(current_user), pg_is_in_recovery()"
        " OR current_setting('default_transaction_read_only') = 'on'"
    )
    if read_only:
        yield "a database that takes writes: this one is a standby or read-only"
    schema = _schema(sink, connection)
    if schema is None:
        yield f"the schema {sink.wanted.table.schema or '(of search_path)'}, which does not exist"
        return
    own = "SELECT INSERT UPDATE DELETE" if needs.upsert else "INSERT"
    yield from _grants(sink, connection, user, {**_RUN, "": own})
    of_run = [*map(sink.wanted.table.sibling, TABLES), sink.wanted.table]
    facts = sink.dialect.facts(connection, of_run)
    missing = [one.name for one, of in zip(of_run, facts, strict=True) if of.identity is None]
    if sink.wanted.table.name not in missing:
        name = _named(sink, connection, sink.wanted.table)
        for one in _sequences(connection, name):
            yield f"GRANT USAGE ON SEQUENCE {one} TO {user}"
    yield from _in_schema(connection, schema, user, missing if sink.create else [], needs)


def further_privileges(sink: SqlSink, connection: Connection) -> Iterator[str]:
    """One sentence for each command for which a user who may run the pipeline lacks privileges."""
    if isinstance(sink.dialect, Sqlite):
        return
    ((user,),) = connection.query("SELECT quote_ident(current_user)")
    for verb, wanted in _FURTHER.items():
        if lacks := "; ".join(_grants(sink, connection, user, wanted)):
            yield f"`oncely {verb}` needs more than a run: {lacks}"


def _grants(
    sink: SqlSink, connection: Connection, user: str, wanted: Mapping[str, str]
) -> Iterator[str]:
    """A statement for each table that exists, by its name; of the destination by an empty one."""
    for one, privileges in wanted.items():
        table = sink.wanted.table.sibling(one) if one else sink.wanted.table
        if sink.dialect.columns(connection, table):
            columns = [] if one else sink.wanted.schema.names
            if lacks := _lacks(connection, sink, table, privileges.split(), columns):
                yield f"GRANT {', '.join(lacks)} ON {_named(sink, connection, table)} TO {user}"


def _named(sink: SqlSink, connection: Connection, table: TableName) -> str:
    quoted = plain(sink.ledger.tables.quoted(table))
    ((name,),) = connection.query("SELECT to_regclass(%s)::text", (quoted,))
    return str(name)


def _schema(sink: SqlSink, connection: Connection) -> str | None:
    rows = connection.query(
        "SELECT nspname FROM pg_namespace WHERE nspname = coalesce(%s::text, current_schema())",
        (sink.wanted.table.schema,),
    )
    return str(rows[0][0]) if rows else None


def _lacks(
    connection: Connection,
    sink: SqlSink,
    table: TableName,
    wanted: Sequence[str],
    columns: Sequence[str],
) -> list[str]:
    """The privileges that the user has neither on the table nor on each of the columns."""
    name = plain(sink.ledger.tables.quoted(table))
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
