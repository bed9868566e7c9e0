"""A wait for a lock ends with the text that tells whose lock it is."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime

import psycopg
import pytest

from oncely.commit import backoff, path
from oncely.commit.backoff import Backoff
from oncely.stores.sql import postgres, postgres_session
from oncely.stores.sql.connection import Contention
from oncely.stores.sql.dialects import dialect_for
from oncely.testing.servers.postgres import Postgres
from tests.sinktools import Place, at_t0, commit_all, numbered, open_sink, ready, sink_to


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_session, "SILENCE_SECONDS", 0.2)
    begin = postgres._BEGIN.replace(f"{postgres.LOCK_SECONDS}s", "4s")
    assert begin != postgres._BEGIN
    monkeypatch.setattr(postgres, "_BEGIN", begin)
    monkeypatch.setattr(path, "tell", backoff.RateLimitedLog().tell)


@contextmanager
def locked(place: Place, what: str) -> Iterator[int]:
    """Another program's session holds a lock, and is idle."""
    with psycopg.connect(place.url, application_name="nightly report") as other:
        other.execute(f"SET search_path TO {place.schema}")
        other.execute(what)
        yield other.info.backend_pid


@pytest.mark.parametrize(
    ("what", "on"),
    [
        ("LOCK TABLE rows IN ACCESS EXCLUSIVE MODE", "rows"),
        ("SELECT 1 FROM oncely_positions FOR UPDATE", "oncely_positions"),
    ],
)
def test_a_commit_tells_whose_lock_it_waits_for(
    on_postgres: Place, what: str, on: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = on_postgres
    caplog.set_level(logging.WARNING, "oncely")
    sink, fence = ready(sink_to(place))
    with locked(place, what) as pid, pytest.raises(Contention) as found:
        commit_all(sink, at_t0(0, numbered(0, 3)), fence, patience=Backoff(total=0))
    year = datetime.now(UTC).year
    assert f"{on} is held by process {pid}, application nightly report, role " in str(found.value)
    assert f"idle in transaction, its last statement began {year}" in str(found.value)
    assert "pg_terminate_backend" in found.value.way_out
    (line,) = [one for one in caplog.messages if "lock timeout" in one]
    assert f"process {pid}, application nightly report" in line
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)


def test_a_start_on_a_locked_ledger_ends_with_that_text(on_postgres: Place) -> None:
    ready(sink_to(on_postgres))
    with (
        locked(on_postgres, "LOCK TABLE oncely_pipelines IN ACCESS EXCLUSIVE MODE") as pid,
        pytest.raises(Contention, match=f"oncely_pipelines is held by process {pid}"),
    ):
        open_sink(sink_to(on_postgres))


def test_a_wait_outside_of_a_transaction_ends_too(on_postgres: Place) -> None:
    on_postgres.sql("CREATE TABLE notes (n int)")
    with (
        closing(dialect_for(on_postgres.url, 2.0).connect("oncely-test")) as session,
        locked(on_postgres, "LOCK TABLE notes IN ACCESS EXCLUSIVE MODE") as pid,
        pytest.raises(Contention, match=f"notes is held by process {pid}, application nightly"),
    ):
        session.query(f"SELECT * FROM {on_postgres.schema}.notes")


def test_what_may_not_be_read_is_left_out(on_postgres: Place) -> None:
    """A role may not see what another role's session does, and since when."""
    on_postgres.sql("CREATE TABLE notes (n int)")
    role = f"r_{on_postgres.schema}"
    on_postgres.sql(f"CREATE ROLE {role} LOGIN PASSWORD 'none'")
    on_postgres.sql(f"GRANT USAGE ON SCHEMA {on_postgres.schema} TO {role}")
    on_postgres.sql(f"GRANT SELECT ON notes TO {role}")
    url = re.sub("//[^@]*@", f"//{role}:none@", on_postgres.url)
    with (
        closing(dialect_for(url, 2.0).connect("oncely-test")) as session,
        locked(on_postgres, "LOCK TABLE notes IN ACCESS EXCLUSIVE MODE") as pid,
        pytest.raises(Contention, match=rf"process {pid}, application nightly report, role \S+\n"),
    ):
        session.query(f"SELECT * FROM {on_postgres.schema}.notes")


def test_a_look_at_a_lent_transaction_is_bounded(postgres: Postgres) -> None:
    """As behind a pooler, where it waits for a free session."""
    name = f"d{uuid.uuid4().hex[:12]}"
    url = postgres.create_database(name)
    with psycopg.connect(url) as other:
        other.execute(f"ALTER DATABASE {name} SET search_path = public, pg_catalog")
        other.execute(
            "CREATE TABLE public.pg_stat_activity AS SELECT * FROM pg_catalog.pg_stat_activity"
        )
    with (
        ThreadPoolExecutor(1) as thread,
        closing(dialect_for(url, 1.0).connect("oncely-test")) as session,
        psycopg.connect(url) as other,
    ):
        other.execute("LOCK TABLE public.pg_stat_activity IN ACCESS EXCLUSIVE MODE")

        def waiting() -> None:
            session.begin()
            with session.lend(0.5) as tx:
                tx.execute("SELECT pg_sleep(60)")

        with pytest.raises(Contention, match="a lock of another session"):
            thread.submit(waiting).result(120)
