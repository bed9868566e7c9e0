"""The list of migrations names every column and table that the first version did not have."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from oncely.clients.sql.connection import TableName
from oncely.clients.sql.dialects import dialect_for
from oncely.ledgers.sql.tables import MIGRATIONS, TABLES, VERSION, LedgerTables

TESTS = Path(__file__).parents[2]
FIRST = TESTS / "first_wave" / "data" / "sqlite.sql"
SECOND = TESTS / "golden" / "earlier" / "ledger_sqlite.sql"


def names(script: str) -> set[str]:
    """The ledger's tables in a database that a script makes, and their columns."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(script)
        found = database.execute(
            "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c"
            " WHERE t.type = 'table'"
        ).fetchall()
    columns = [(table, column) for table, column in found if table in TABLES]
    return {name for table, column in columns for name in (table, f"{table}.{column}")}


def present() -> set[str]:
    made = LedgerTables(dialect_for("sqlite:////x.db"), TableName(None, "rows"), "p").ddl()
    return names(";".join(made))


def added_after(version: int) -> set[str]:
    return {name for step, named in MIGRATIONS.items() if step > version for name in named}


def of_new_tables(found: set[str], named: set[str]) -> set[str]:
    """Without the columns of tables that are named as a whole."""
    return {one for one in found if one in named or one.partition(".")[0] not in named}


def test_every_column_since_the_first_version_has_a_migration() -> None:
    lacking = of_new_tables(present() - names(FIRST.read_text()), added_after(1))
    assert lacking <= added_after(1)
    assert added_after(1) <= present()


def test_the_second_version_is_the_one_that_was_kept() -> None:
    lacking = of_new_tables(present() - names(SECOND.read_text()), added_after(2))
    assert lacking == added_after(2)


def test_versions_count_from_two_and_name_nothing_twice() -> None:
    assert list(MIGRATIONS) == list(range(2, VERSION + 1))
    named = [name for one in MIGRATIONS.values() for name in one]
    assert len(named) == len(set(named))
