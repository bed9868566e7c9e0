"""Checks that the table is still that of the ledger's positions."""

from __future__ import annotations

from typing import NamedTuple

from oncely.clients.sql.connection import Connection, TableFacts
from oncely.errors import TableMismatch
from oncely.ledgers.sql.statements import LedgerStatements, Registered
from oncely.ledgers.sql.tables import POSITIONS, TABLES, LedgerTables

_ANY = ""
"""The identity that a reset stores for a missing table: the next table is accepted, or created."""


class _Identities(NamedTuple):
    """The ids by which the database distinguishes tables of one name; None: there is no table."""

    target: str | None
    ledger: str | None


def check_known_table(connection: Connection, tables: LedgerTables) -> None:
    """Compare the present table and ledger, before anything is created; reads only.

    Raises:
        TableMismatch: see :func:`check_same_table`; or a crash of the server empties a table of the
            ledger.
        NewerFormat, OlderFormat: another version has written the pipeline's ledger.
    """
    if tables.exists(connection):
        ours = [tables.beside.sibling(name) for name in TABLES]
        for table, facts in zip(ours, tables.dialect.facts(connection, ours), strict=True):
            require_fit(facts)
            if facts.relation.is_secured:
                raise TableMismatch(
                    f"sink.table: row-level security of {table} applies to the role in sink.url: it"
                    " could hide the positions",
                    way_out="use a role with BYPASSRLS, or disable it for the tables oncely_*",
                )
        ledger = LedgerStatements(tables)
        check_same_table(connection, ledger, ledger.registered(connection))


def require_fit(table: TableFacts) -> None:
    """Refuse a table whose rows would not be committed, or be lost, together with the ledger's.

    Raises:
        TableMismatch: the error names the table, or its partition.
    """
    if table.unfit is not None:
        problem, way_out = table.unfit
        raise TableMismatch(f"sink.table: {problem}", way_out=way_out)


def check_same_table(
    connection: Connection, ledger: LedgerStatements, registered: Registered | None
) -> None:
    """Compare the identities of the destination and ledger tables with those in the pipeline's row.

    A restore of table and ledger together changes both identities, and the positions belong to the
    rows. If only one of them changes, they do not.

    Raises:
        TableMismatch: a table of another name, a missing table, or another table of the same name,
            which would begin in the middle of the topic; or other positions for the same table.
    """
    if registered is None:
        return
    tables, pipeline = ledger.tables, ledger.tables.pipeline
    if registered.target != tables.beside.name:
        raise TableMismatch(
            f"sink.table: it is {tables.beside.name!r}, and pipeline {pipeline!r} has written to"
            f" {registered.target!r}: the new table would begin where the old one ends",
            way_out="give the pipeline a new name to begin again; if this is meant (the table was"
            " renamed), `oncely offsets reset FILE --shift-by 0 --execute` confirms it",
        )
    noted, now = _noted(registered), _identities(connection, tables)
    if noted.target == _ANY or noted == now or not ledger.begun(connection):
        return
    if now.target is None:
        raise TableMismatch(
            f"sink.table: {tables.beside} is missing, and the ledger holds positions of pipeline"
            f" {pipeline!r}: a new table would begin in the middle of the topic",
            way_out="restore table and ledger from the same backup; to begin again, "
            "`oncely offsets reset FILE --to-earliest --execute` (the next run creates the table)"
            " or a new name of the pipeline",
        )
    if noted.target is None or (noted.target != now.target and noted.ledger != now.ledger):
        return
    theirs, same = str(tables.beside), POSITIONS
    if noted.target == now.target:
        theirs, same = same, theirs
    raise TableMismatch(
        f"sink.table: {theirs} is not the table that pipeline {pipeline!r} has written to, but"
        f" another one of its name (dropped and made again, or restored), and {same} is the same"
        " as before: rows and positions don't belong together",
        way_out="restore table and ledger from the same backup; or set the positions:"
        " `oncely offsets reset FILE --to-earliest --execute` reads everything again,"
        " `--shift-by 0` accepts the present table",
    )


def note_table(connection: Connection, ledger: LedgerStatements, *, accept: bool = False) -> None:
    """Store the identities of table and ledger in the pipeline's row.

    Args:
        connection: in a transaction that holds the lock of the pipeline's row.
        ledger: the ledger's statements of the pipeline.
        accept: for a reset: a missing table may be created by the next run.
    """
    now = _identities(connection, ledger.tables)
    ledger.note_table(connection, now.target or (_ANY if accept else None), now.ledger)


def _noted(registered: Registered) -> _Identities:
    return _Identities(registered.target_identity, registered.ledger_identity)


def _identities(connection: Connection, tables: LedgerTables) -> _Identities:
    both = [tables.beside, tables.beside.sibling(POSITIONS)]
    return _Identities(*(one.identity for one in tables.dialect.facts(connection, both)))
