"""Settings of a server, a database or a role that would change what is sent or read."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import psycopg
import pyarrow as pa
import pytest

from oncely.clients.sql.connection import BadData, TableName
from oncely.clients.sql.dialects import dialect_for

ROWS = TableName(None, "rows")


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def encoded(request: pytest.FixtureRequest, shared_database: str) -> Iterator[tuple[str, str]]:
    """A database of another encoding than UTF-8: its URL and the encoding."""
    name = f"encoded_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(shared_database, autocommit=True) as session:
        session.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{request.param}'"
            " LOCALE_PROVIDER libc LOCALE 'C'".encode()
        )
        yield urlsplit(shared_database)._replace(path=f"/{name}").geturl(), request.param
        session.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_texts_are_utf8_whatever_the_database_has(encoded: tuple[str, str]) -> None:
    url, encoding = encoded
    connection = dialect_for(url).connect("test")
    connection.execute("CREATE TABLE rows (name text)")
    connection.copy(ROWS, pa.table({"name": ["ä"]}))
    connection.execute("INSERT INTO rows VALUES (%s), ('ö')", ("ü",))
    assert connection.query("SELECT name FROM rows") == [("ä",), ("ü",), ("ö",)]
    stored = connection.query("SELECT octet_length(name) FROM rows WHERE name = 'ä'")
    assert stored == [(1 if encoding == "LATIN1" else 2,)]
    if encoding == "LATIN1":
        with pytest.raises(BadData, match="no equivalent"):
            connection.copy(ROWS, pa.table({"name": ["☃"]}))
    connection.close()


def having(url: str, name: str, value: str) -> str:
    """The URL of sessions that begin with a setting, as those of a role that has it."""
    return (
        f"{url}{'&' if '?' in url else '?'}options={quote(f'-c {name}={value}'.replace(', ', ','))}"
    )


@pytest.mark.parametrize("style", ["German, DMY", "SQL, DMY", "Postgres, MDY", "ISO, DMY"])
def test_times_are_read_whatever_their_style(shared_database: str, style: str) -> None:
    connection = dialect_for(having(shared_database, "datestyle", style)).connect("test")
    sent = "SELECT '2013-02-01T05:06:07Z'::timestamptz, '2013-02-01'::date::text"
    assert connection.query(sent) == [(datetime(2013, 2, 1, 5, 6, 7, tzinfo=UTC), "2013-02-01")]
    connection.close()


def test_numbers_have_all_their_digits(shared_database: str) -> None:
    url = having(shared_database, "extra_float_digits", "0")
    connection = dialect_for(url).connect("test")
    connection.begin()
    assert connection.query("SELECT array[0.1::float8 + 0.2]::text") == [("{0.30000000000000004}",)]
    connection.rollback()
    connection.close()
