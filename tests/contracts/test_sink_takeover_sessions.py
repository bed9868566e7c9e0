"""A takeover ends the sessions of its own pipeline, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from oncely.core.claim import Opened, Takeover
from oncely.core.ranges import TopicPartition
from oncely.stores.sql import connection as sessions
from oncely.stores.sql.connection import Connection, application_name, close_all
from oncely.testing.processes import await_that
from tests.sinktools import SOURCE, T0, T1, Place, open_sink, postgres_place, sink_to


@contextmanager
def working(place: Place, epoch: int = 1, partition: int = 0) -> Iterator[Connection]:
    """A session of a run of the pipeline, with a commit under way."""
    with closing(place.dialect.connect(application_name("p", epoch))) as session:
        session.begin()
        positions = f'"{place.schema}".oncely_positions'
        session.execute(
            f'UPDATE {positions} SET "position" = 1 WHERE "partition" = %s', (partition,)
        )
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


def test_a_takeover_of_some_partitions_ends_sessions_of_the_epochs_that_lose_one(
    on_postgres: Place,
) -> None:
    """What others have under way goes on, and is committed."""
    take(on_postgres, T0)
    take(on_postgres, T1)
    with working(on_postgres, 1) as losing, working(on_postgres, 2, partition=1) as other:
        assert take(on_postgres, T0).fence.epoch == 3
        assert not is_alive(losing)
        assert is_alive(other)
        other.commit()
    assert on_postgres.sql('SELECT "partition", "position", epoch FROM oncely_positions') == (
        [(1, 1, 2), (0, 0, 3)]
    )


def test_a_session_of_several_partitions_is_ended_with_the_first_of_them(
    on_postgres: Place,
) -> None:
    """Its process repeats, on a session of its own, what it had under way of the others."""
    take(on_postgres, T0, T1)
    with working(on_postgres, 1, partition=1) as losing:
        take(on_postgres, T0)
        assert not is_alive(losing)


def test_an_idle_session_that_was_ended_with_one_of_its_partitions_is_replaced(
    database: str,
) -> None:
    """A run that goes on with its others finds no failure."""
    close_all()
    place = postgres_place(database)
    fence, ledger = take(place, T0, T1).fence, sink_to(place).ledger
    assert ledger.positions(fence).keys() == {T0, T1}
    [[(_, kept)]] = sessions._kept.values()
    assert not kept.is_ended()
    newer = take(place, T0).fence
    await_that(kept.is_ended, "the end of the session", 20)
    found = {tp: one.epoch for tp, one in ledger.positions(fence).items()}
    assert found == {T0: newer.epoch, T1: fence.epoch}
    assert not is_alive(kept)


def take(place: Place, *partitions: TopicPartition) -> Opened:
    start = {T0: 0, T1: 0}
    takeover = Takeover(SOURCE, lambda: start, start, partitions=frozenset(partitions))
    return sink_to(place).open(takeover)


def test_a_session_is_ended_that_has_the_number_of_the_new_epoch(on_postgres: Place) -> None:
    """A failover takes epochs back. What still runs by a later one does not hold the opener up."""
    open_sink(sink_to(on_postgres))
    with working(on_postgres, epoch=2) as ours:
        assert open_sink(sink_to(on_postgres)).fence.epoch == 2
        assert not is_alive(ours)
