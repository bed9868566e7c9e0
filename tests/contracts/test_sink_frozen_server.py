"""A PostgreSQL whose processes are stopped: every wait ends, and a commit goes on exactly once."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest

from oncely.commit import backoff, path
from oncely.commit.backoff import Backoff
from oncely.errors import Unavailable
from oncely.stores.sql import postgres_session
from oncely.stores.sql.connection import close_all
from oncely.stores.sql.dialects import dialect_for
from oncely.testing.processes import send_all, stop_all
from oncely.testing.servers.postgres import Postgres
from oncely.testing.servers.process import HOST
from tests.sinktools import (
    Place,
    Rec,
    at_t0,
    commit_all,
    postgres_place,
    ready,
    rec,
    sink_to,
    with_faults,
)

_NOT_ENDING = 120.0  # a wait that is to end after seconds, on a busy machine


@pytest.fixture(scope="module")
def own_server() -> Iterator[Postgres]:
    with Postgres() as running:
        yield running


@pytest.fixture
def place(own_server: Postgres, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(postgres_session, "SILENCE_SECONDS", 0.5)
    close_all()  # a kept session would not go through a test's own way to connect
    made = postgres_place(own_server.url())
    return Place(made.url, made.schema, connect_timeout=2.0)


@contextmanager
def frozen(server: Postgres) -> Iterator[None]:
    """All of its processes are stopped, first the one that starts the others."""
    stopped = [first := psutil.Process(server.pid)]
    try:
        stop_all(stopped)  # it might start another one
        stopped += first.children(recursive=True)
        stop_all(stopped)
        yield
    finally:
        send_all(stopped, signal.SIGCONT)


class FreezeAt:
    """The server is frozen during the first call of this name."""

    def __init__(self, server: Postgres, name: str) -> None:
        self._server, self._name = server, name
        self.errors: list[Unavailable] = []

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        if name != self._name or self.errors:
            return call()
        with ThreadPoolExecutor(1) as thread, frozen(self._server):
            try:
                return thread.submit(call).result(_NOT_ENDING)
            except Unavailable as error:
                self.errors.append(error)
                raise


@pytest.mark.parametrize("call", ["copy", "commit"])
def test_a_commit_fails_while_the_server_is_frozen_and_goes_on_exactly_once(
    own_server: Postgres,
    place: Place,
    call: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(path, "tell", backoff.RateLimitedLog().tell)
    # More bytes than the buffers of both sockets hold: the COPY waits for room, not for an answer.
    records: list[Rec] = [rec(n, id=n, name="x" * 40_000) for n in range(400)]
    freeze = FreezeAt(own_server, call)
    sink, fence = ready(sink_to(place))
    patient = Backoff(first=0.05, longest=0.5, total=60)
    commit_all(with_faults(sink, freeze), at_t0(0, records), fence, patience=patient)
    assert ["accepts no other connection" in str(error) for error in freeze.errors] == [True]
    (line,) = [one for one in caplog.messages if "accepts no other connection" in one]
    assert line.endswith("; it is tried again")
    assert place.sql(f'SELECT count(*), count(DISTINCT id) FROM "{place.schema}".rows') == [
        (400, 400)
    ]
    assert place.sql(f'SELECT "position" FROM "{place.schema}".oncely_positions') == [(400,)]


def test_another_host_of_the_url_does_not_answer_for_a_frozen_server(
    own_server: Postgres, place: Place, postgres: Postgres
) -> None:
    hosts = f"{HOST}:{own_server.port},{HOST}:{postgres.port}"
    url = place.url.replace(f"{HOST}:{own_server.port}", hosts)
    with closing(dialect_for(url, 2.0).connect("oncely-test")) as session:
        assert session.query("SELECT inet_server_port()") == [(own_server.port,)]
        with pytest.raises(Unavailable, match="accepts no other connection"):
            FreezeAt(own_server, "query")("query", lambda: session.query("SELECT 1"))


def test_connecting_to_a_frozen_server_ends(own_server: Postgres, place: Place) -> None:
    with frozen(own_server), pytest.raises(Unavailable, match="no connection to PostgreSQL"):
        place.dialect.connect("oncely-test")


@pytest.mark.parametrize("accepts", [True, False])
def test_a_long_statement_of_a_server_that_answers_is_waited_for(
    own_server: Postgres, place: Place, accepts: bool
) -> None:
    """Refusing a new connection is an answer, too."""
    database = f"d{uuid.uuid4().hex[:12]}"
    url = own_server.create_database(database)
    with closing(dialect_for(url).connect("oncely-test")) as session:
        place.sql(f"ALTER DATABASE {database} ALLOW_CONNECTIONS {accepts}")
        assert session.query("SELECT 1 FROM pg_sleep(2)") == [(1,)]
