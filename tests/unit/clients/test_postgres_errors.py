"""Whether an internal error of PostgreSQL belongs to a row depends on the statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import psycopg
import pytest

from oncely.errors import Stopped, Unavailable
from oncely.stores.sql.connection import BadData
from oncely.stores.sql.postgres import PostgresConnection
from oncely.stores.sql.postgres_session import WatchedSession


class Failing:
    """A session in which each statement fails."""

    def __init__(self, state: str) -> None:
        self._state = state

    def execute(self, *_: Any) -> Any:
        raise psycopg.errors.lookup(self._state)("because")

    executemany = execute

    wait = execute

    def cursor(self) -> Failing:
        return self

    @property
    def pgconn(self) -> Failing:
        return self

    def send_query(self, query: bytes) -> None:
        pass


OF_NO_ROW: dict[str, Callable[[PostgresConnection], object]] = {
    "begin": lambda session: begun(session).query("SELECT", of_rows=True),
    "rollback": lambda session: session.rollback(),
    "query": lambda session: session.query("SELECT"),
    "execute": lambda session: session.execute("UPDATE"),
    "execute_many": lambda session: session.execute_many("UPDATE", [()]),
}
OF_ROWS: dict[str, Callable[[PostgresConnection], object]] = {
    "query": lambda session: session.query("SELECT", of_rows=True),
    "execute": lambda session: session.execute("INSERT", of_rows=True),
    "check_constraints": lambda session: session.check_constraints(),
    "commit": lambda session: session.commit(),
}


def begun(session: PostgresConnection) -> PostgresConnection:
    """BEGIN is sent with the next call, which raises its error."""
    session.begin()
    return session


def failing(state: str) -> PostgresConnection:
    return PostgresConnection(cast(WatchedSession, Failing(state)))


@pytest.mark.parametrize("state", ["XX000", "58000", "58P01", "58P02", "53200", "57P04"])
@pytest.mark.parametrize("statement", OF_NO_ROW)
def test_an_error_of_the_server_is_tried_again(statement: str, state: str) -> None:
    with pytest.raises(Unavailable, match="because"):
        OF_NO_ROW[statement](failing(state))


@pytest.mark.parametrize("statement", OF_ROWS)
def test_an_internal_error_of_a_statement_of_rows_may_belong_to_one(statement: str) -> None:
    with pytest.raises(BadData, match="because"):
        OF_ROWS[statement](failing("XX000"))


@pytest.mark.parametrize("state", ["XX001", "XX002"])
def test_no_attempt_can_mend_damage(state: str) -> None:
    for statement in (*OF_NO_ROW.values(), *OF_ROWS.values()):
        with pytest.raises(Stopped, match="because") as caught:
            statement(failing(state))
        assert type(caught.value) is Stopped
