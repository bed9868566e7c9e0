"""Settings of a server, a database or a role that would change what is sent or read."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import psycopg
import pyarrow as pa
import pytest

from oncely.commit.backoff import Backoff
from oncely.config import parse
from oncely.kinds.sql_ledger import look
from oncely.pipeline import Pipeline
from oncely.stores.sql.connection import BadData, TableName
from oncely.stores.sql.dialects import dialect_for
from oncely.stores.sql.postgres_types import TEXT_SETTINGS
from tests.sinktools import Place, at_t0, commit_all, numbered, ready, rec, sink_to, trigger

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


OTHER = {
    "array_nulls": "off", "bytea_output": "escape", "datestyle": "SQL,DMY",
    "extra_float_digits": "-15", "intervalstyle": "sql_standard", "lc_monetary": "C.UTF-8",
    "quote_all_identifiers": "on", "standard_conforming_strings": "off",
    "timezone": "Asia/Tokyo", "timezone_abbreviations": "Australia",
    "transform_null_equals": "on", "xmloption": "document",
}  # fmt: skip
"""Of a role: everything means something else."""

NO_TEXT = {
    "backslash_quote": "literals double their quotes",
    "check_function_bodies": "of CREATE FUNCTION",
    "client_min_messages": "of messages",
    "client_encoding": "set when a session begins",
    "default_text_search_config": "of to_tsvector: no cast reads it",
    "default_transaction_deferrable": "of serializable transactions",
    "default_transaction_isolation": "BEGIN names it",
    "default_transaction_read_only": "such a session is refused",
    "escape_string_warning": "a warning",
    "lc_messages": "of messages",
    "lc_numeric": "of to_char: no cast reads it",
    "lc_time": "of to_char: no cast reads it",
    "row_security": "audits set it, and upserts check policies",
    "search_path": "names the table, as the role has it",
    "session_replication_role": "of triggers",
    "xmlbinary": "of xmlelement: no cast reads it",
}
"""Settings that a role may have, by which no text that is sent or read means something else."""

OF_NO_TEXT = (
    "Autovacuum", "Client Connection Defaults / Other", "Client Connection Defaults / Shared",
    "Connections", "Customized", "Developer", "Error Handling", "File Locations",
    "Lock Management", "Preset", "Process Title", "Query Tuning", "Replication", "Reporting",
    "Resource Usage", "Statistics", "Vacuuming", "WAL", "Write-Ahead Log",
)  # fmt: skip
NO_MEANING = ("timeout", "default_table", "temp_tablespaces", "vacuum_", "gin_", "toast",
              "synchronize_seqscans", "lo_compat", "createrole", "event_triggers", "icu_valid",
              "restrict_nonsystem", "allow_", "idle_", "operator_precedence", "transaction_",
              "xact_")  # fmt: skip


def test_every_setting_of_a_role_is_classified(shared_database: str) -> None:
    """A setting that a later server adds is set by sessions, or added here with the reason."""
    connection = dialect_for(shared_database).connect("test")
    found = connection.query(
        "SELECT lower(name), category, boot_val FROM pg_settings WHERE context IN"
        " ('user', 'superuser', 'backend', 'superuser-backend')"
    )
    connection.close()
    defaults = {name: default for name, _, default in found if name in TEXT_SETTINGS}
    assert defaults | {"timezone": "UTC", "timezone_abbreviations": "Default"} == TEXT_SETTINGS
    assert [
        (name, category)
        for name, category, _ in found
        if name not in TEXT_SETTINGS
        and name not in NO_TEXT
        and not category.startswith(OF_NO_TEXT)
        and not any(part in name for part in NO_MEANING)
    ] == []


def role_with_other_settings(url: str) -> str:
    for name, value in OTHER.items():
        url = (
            having(url, name, value) if "options" not in url else url + quote(f" -c {name}={value}")
        )
    return url


def test_texts_mean_the_same_whatever_a_role_has_set(on_postgres: Place) -> None:
    assert OTHER.keys() == TEXT_SETTINGS.keys()
    on_postgres.sql("CREATE DOMAIN at AS timestamptz")
    on_postgres.sql(
        "CREATE TABLE rows (id bigint, tags varchar(9)[], span interval, at at, abbr at, u uuid,"
        " raw text, day at[])"
    )
    names = ["tags", "span", "at", "abbr", "u", "raw", "day"]
    types = [pa.list_(pa.string()) if one in ("tags", "day") else pa.string() for one in names]
    schema = pa.schema([("id", pa.int64()), *zip(names, types, strict=True)])
    url = role_with_other_settings(on_postgres.url)
    place = replace(on_postgres, url=url)
    sink = sink_to(place, schema)
    bound, fence = ready(sink)
    u = "6d0f0a4e-0000-4000-8000-000000000001"
    sent = rec(0, id=1, tags=["x", None, "NULL"], span="-1 02:03:04", at="02/01/2013 05:06:07",
               abbr="2013-02-01 05:06 EST", u=u, raw="a\\'b",
               day=["2013-02-01", None])  # fmt: skip
    commit_all(bound, at_t0(0, [sent], schema), fence)
    assert on_postgres.sql("SELECT reason FROM oncely_rejects") == []
    ((tags, span, at, abbr, uuid_, raw, day),) = on_postgres.sql(
        f"SELECT tags, extract(epoch FROM span)::int, extract(epoch FROM at)::bigint,"
        f" extract(epoch FROM abbr)::bigint, {', '.join(n + '::text' for n in names[4:6])},"
        " extract(epoch FROM day[1])::bigint FROM rows"
    )
    assert (tags, uuid_, raw) == (["x", None, "NULL"], u, "a\\'b")
    assert span == -24 * 3600 + 2 * 3600 + 3 * 60 + 4
    assert at == datetime(2013, 2, 1, 5, 6, 7, tzinfo=UTC).timestamp()
    assert abbr == datetime(2013, 2, 1, 10, 6, tzinfo=UTC).timestamp()
    assert day == datetime(2013, 2, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("name", [*TEXT_SETTINGS])
def test_a_transaction_sets_what_texts_mean(shared_database: str, name: str) -> None:
    connection = dialect_for(having(shared_database, name, OTHER[name])).connect("test")
    connection.begin()
    assert connection.query(f"SELECT current_setting('{name}')") == [(TEXT_SETTINGS[name],)]
    connection.rollback()
    connection.close()


def test_commits_become_smaller_until_they_take_less_than_the_roles_limit(
    on_postgres: Place, caplog: pytest.LogCaptureFixture
) -> None:
    sink, fence = ready(sink_to(on_postgres))
    trigger(on_postgres, "PERFORM pg_sleep(0.1); RETURN NEW;")
    limited = dialect_for(having(on_postgres.url, "statement_timeout", "1500"))
    bound = replace(sink, dialect=limited)
    patience = Backoff(wait=lambda _: pytest.fail("it waits, and repeats the same commit"))
    commit_all(bound, at_t0(0, numbered(0, 24)), fence, patience=patience)
    assert on_postgres.sql("SELECT count(*), count(DISTINCT id) FROM rows") == [(24, 24)]
    ranges = on_postgres.sql("SELECT range_start, range_end FROM oncely_ranges ORDER BY 1")
    assert len(ranges) > 1
    assert (ranges[0][0], ranges[-1][1]) == (0, 24)
    (told,) = [
        one.getMessage() for one in caplog.records if "statement_timeout" in one.getMessage()
    ]
    assert "ALTER ROLE" in told
    ((said, seconds),) = look(bound.ledger).time_limits.items()
    assert (said.startswith("statement_timeout is 1.5 s: "), seconds) == (True, 1.5)
    assert "ALTER ROLE" in said
    assert look(sink.ledger).time_limits == {}


def test_the_limit_of_statements_is_none_of_handlers(on_postgres: Place) -> None:
    """They have `sink.time_limit`; the limit of a transaction is theirs, too."""
    _, fence = ready(sink_to(on_postgres))
    for name in ("statement_timeout", "transaction_timeout"):
        url = having(on_postgres.url, name, "90000")
        sink = {"kind": "handlers", "url": url, "ledger_schema": on_postgres.schema}
        source = {"brokers": "b:1", "topics": ["t"]}
        raw = {"name": fence.pipeline, "source": source, "decode": {"format": "raw"}, "sink": sink}
        known = Pipeline(parse(raw)).destination.look()
        assert known.epoch == fence.epoch
        told = [*known.time_limits.values()]
        assert told == ([90.0] if name == "transaction_timeout" else []), name
