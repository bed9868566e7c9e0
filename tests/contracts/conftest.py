"""Where the contract is checked: every test once on each database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oncely.local.postgres import Postgres
from oncely.sinks.sql.session import close_all
from tests.sinktools import KINDS, Place, postgres_place, sqlite_place


@pytest.fixture(scope="session")
def shared_database(postgres: Postgres) -> str:
    """The URL of one database, in which each test has a schema."""
    return postgres.create_database("contracts")


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An empty place on each database."""
    if request.param == "sqlite":
        with sqlite_place() as place:
            yield place
    else:
        yield postgres_place(request.getfixturevalue("shared_database"))
    close_all()


@pytest.fixture
def on_postgres(shared_database: str) -> Iterator[Place]:
    """An empty schema of PostgreSQL."""
    yield postgres_place(shared_database)
    close_all()


@pytest.fixture
def on_sqlite() -> Iterator[Place]:
    """A file of SQLite that is not there yet."""
    with sqlite_place() as place:
        yield place
    close_all()
