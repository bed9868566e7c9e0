"""PostgreSQL's errors, classified by their consequence for the commit path.

Errors that another attempt may not meet are listed: a lost connection, a shutdown, a conflict, a
lack of resources. Errors that no attempt can mend, of whatever row, are listed too. Any other
SQLSTATE belongs to the row, or to the call of a function, whose statement has raised it: a refused
value, and what a trigger, a function or an extension raises, with a SQLSTATE of its own as well.
An extension may also raise an internal error (XX000) for a value. In a statement of the ledger or
of the session it is the server's, and another attempt may not meet it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import psycopg

from oncely.clients.sql.connection import BadData, Contention, TableAltered
from oncely.errors import OncelyError, Stopped, TableMismatch, TooLong, Unavailable, WrongInput
from oncely.secrets import redact

T = TypeVar("T")

_END_IT = "wait for the end of its transaction, or end it: SELECT pg_terminate_backend(<process>)"

_POLICY = "if row-level security refuses the rows, use a role with BYPASSRLS or change the policy"
_LEDGER_HOLDS = "the pipeline continues from its ledger"
SHRINKS = (
    "commits that take longer become smaller until they pass; larger ones need a longer"
    " statement_timeout or transaction_timeout of the role: ALTER ROLE ... SET statement_timeout"
)
_OF_THE_ROW = (BadData, "")
_INTERNAL = "XX"
_KEY_TAKEN = "23505"
_CONSEQUENCES: dict[tuple[type[OncelyError], str], str] = {
    # 54000 and 54001 are a text too long for its index, and JSON too deep for the stack. 42601 is a
    # text that is no tsvector, tsquery, jsonpath or ltree: it is no error of the statement, which
    # is the same for all rows.
    _OF_THE_ROW: "42601 54000 54001",
    # 25006 and 25P02 follow from an earlier error of the session, 25P03 and 25P04 end it.
    (Unavailable, ""): "08 25006 25P02 25P03 53 57 58 72000",
    (TooLong, SHRINKS): "57014 25P04",
    (Contention, ""): "40 55P03",
    (TableMismatch, "`oncely plan --ddl` prints the DDL"): "3F000 42703 42804 42P01",
    (Stopped, "correct the trigger or function that raised it"): "25 2D",
    (Stopped, f"restore the database; {_LEDGER_HOLDS}"): "XX001",
    (Stopped, f"REINDEX, or restore the database; {_LEDGER_HOLDS}"): "XX002",
    (WrongInput, f"write to a table that supports the statement; {_POLICY}"): "0A",
    (WrongInput, "check the roles and their grants"): "0L 0P",
    (
        WrongInput,
        "two records have keys that differ, and that the unique index treats as equal (letter"
        " case, a trigger that changes them): make them equal in the transform, or change"
        " sink.keys; otherwise correct the subquery in the trigger or policy",
    ): "21",
    (WrongInput, "check user, password and role in sink.url"): "28",
    (WrongInput, "drop the dependent objects first"): "2B",
    (WrongInput, "check the database in sink.url"): "3D",
    (WrongInput, "`oncely plan` compares the table with the rows"): "42",
    (WrongInput, f"grant it, or create the tables that `plan` prints; {_POLICY}"): "42501",
    (WrongInput, "the table or the rows exceed a limit of the server: use fewer columns"): "54",
    (WrongInput, "the table does not support this statement: a view, or a publication"): "55",
    (WrongInput, "correct the server's configuration files"): "F0",
}
_MEANINGS = {one: found for found, states in _CONSEQUENCES.items() for one in states.split()}
# Of a function's own statements: a statement beyond the time limit, a transaction that it has made
# read-only, an error that it has caught.
_OF_THE_CALL = ("57014", "25006", "25P02")
# Of every call, whatever the record: a missing table, column or privilege, a damaged database.
_OF_EVERY_CALL = ("3F000", "42501", "42703", "42P01", "XX001", "XX002")


def sorted_errors(work: Callable[[], T], copied: str | None = None, *, of_rows: bool = True) -> T:
    """Run ``work``; convert an error of the driver by its consequence for the commit path.

    Args:
        copied: the table of a COPY, whose errors name a row.
        of_rows: the statement processes values of records.
    """
    try:
        return work()
    except psycopg.Error as error:
        raise sort_error(error, copied, of_rows=of_rows) from error


def sort_error(
    error: psycopg.Error, copied: str | None = None, *, of_rows: bool = True
) -> Exception:
    """Convert an error of the driver by its consequence for the commit path."""
    state = error.sqlstate or ""
    text = redact((error.diag.message_primary or str(error)).strip())
    if state == "22P03":  # our encoding, not a record: the table was altered during the run
        return TableAltered(f"PostgreSQL: {text}")
    if holders := "; ".join(getattr(error, "__notes__", ())):
        return Contention(f"PostgreSQL: {text}: {redact(holders)}", way_out=_END_IT)
    kind, way_out = _MEANINGS.get(state) or _MEANINGS.get(state[:2]) or _OF_THE_ROW
    if not state and not isinstance(error, psycopg.ProgrammingError | psycopg.DataError):
        kind = Unavailable  # the connection's; those two are psycopg's own, and nothing was sent
    if kind is BadData and not of_rows and state[:2] == _INTERNAL:
        kind = Unavailable
    if kind is BadData and not of_rows and copied and state == _KEY_TAKEN:
        kind = Contention  # another attempt has stored the row meanwhile
    if kind is BadData:
        detail = redact(error.diag.message_detail or "")
        reason = f"{text} ({detail})" if detail else text
        return BadData(reason, _line(error.diag.context, copied))
    return kind(f"PostgreSQL: {text}" if text else "PostgreSQL ended the session", way_out=way_out)


def sort_lent(error: psycopg.Error, *, lost: bool) -> Exception:
    """As :func:`sort_error`, of a statement of a function that the transaction was lent to.

    Args:
        lost: the session has ended. An error without SQLSTATE is then its end; otherwise it is of
            another connection.
    """
    found, state = sort_error(error), error.sqlstate or ""
    again = isinstance(found, Unavailable) and state not in _OF_THE_CALL and (state or lost)
    if again or state in _OF_EVERY_CALL or isinstance(found, BadData):
        return found
    return BadData(redact((error.diag.message_primary or str(error)).strip()))


def not_of_the_row(state: str) -> str:
    """The condition in SQL that a SQLSTATE, given as an expression, does not belong to the row."""
    rows = [one for one in _MEANINGS if _MEANINGS[one] == _OF_THE_ROW]
    others = [one for one in _MEANINGS if one not in rows]
    lists = (", ".join(f"'{one}'" for one in some) for some in (others, rows))
    return "({0} IN ({1}) OR left({0}, 2) IN ({1}) AND {0} NOT IN ({2}))".format(state, *lists)


def _line(context: str | None, copied: str | None) -> int | None:
    """The 0-based row that COPY names in its context: ``COPY <table>, line 3, column b``.

    Table and column may be any text, including line breaks, so the known table name is matched as a
    whole.
    """
    if copied is None:
        return None
    named = re.search(rf"^COPY {re.escape(copied)}, line (\d+)", context or "", re.MULTILINE)
    return int(named.group(1)) - 1 if named else None
