"""A takeover ends the sessions of its own pipeline, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from oncely.clients.sql.connection import Connection
from oncely.clients.sql.session import application_name
from tests.sinktools import Place, open_sink, postgres_place, sink_to


@contextmanager
def working(place: Place, epoch: int = 1) -> Iterator[Connection]:
    """A session of a run of the pipeline, with a commit under way."""
    with closing(place.dialect.connect(application_name("p", epoch))) as session:
        session.begin()
        session.execute(f'UPDATE "{place.schema}".oncely_positions SET "position" = 1')
        yield session


def is_alive(session: Connection) -> bool:
    try:
        session.query("SELECT 1")
    except Exception:
        return False
    return True


@pytest.mark.parametrize("elsewhere", ["schema", "database"])
def test_a_pipeline_of_the_same_name_elsewhere_is_left_alone(
    on_postgres: Place, database: str, elsewhere: str
) -> None:
    other = postgres_place(on_postgres.url if elsewhere == "schema" else database)
    open_sink(sink_to(other))
    open_sink(sink_to(on_postgres))
    with working(other) as theirs, working(on_postgres) as ours:
        open_sink(sink_to(on_postgres))
        assert is_alive(theirs)
        assert not is_alive(ours)


def test_a_session_that_holds_nothing_is_ended_where_there_is_one_ledger(
    database: str,
) -> None:
    """One that is paused before its first statement would go on to hold what it holds then."""
    place = postgres_place(database)
    open_sink(sink_to(place))
    with closing(place.dialect.connect(application_name("p", 1))) as ours:
        open_sink(sink_to(place))
        assert not is_alive(ours)


def test_a_session_is_ended_that_has_the_number_of_the_new_epoch(on_postgres: Place) -> None:
    """A failover takes epochs back. What still runs by a later one does not hold the opener up."""
    open_sink(sink_to(on_postgres))
    with working(on_postgres, epoch=2) as ours:
        assert open_sink(sink_to(on_postgres)).fence.epoch == 2
        assert not is_alive(ours)
