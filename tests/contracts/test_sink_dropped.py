"""A trigger that drops rows without a word stops the pipeline: no record may vanish uncounted."""

from __future__ import annotations

import pyarrow as pa
import pytest

from oncely.core.batch import Batch
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange
from oncely.errors import Unavailable
from oncely.stores.sql.connection import RowsDropped
from tests.sinktools import (
    SCHEMA,
    T0,
    Place,
    at_t0,
    commit_all,
    numbered,
    publish_on,
    ready,
    rec,
    sink_to,
    trigger,
    with_rows,
)


def drop_odd_ids(place: Place) -> None:
    if place.is_postgres:
        trigger(place, "IF NEW.id % 2 = 1 THEN RETURN NULL; END IF; RETURN NEW;")
    else:
        place.sql(
            "CREATE TRIGGER drop_odd BEFORE INSERT ON rows WHEN NEW.id % 2 = 1"
            " BEGIN SELECT RAISE(IGNORE); END"
        )


def nothing_was_written(place: Place) -> bool:
    counts = [place.sql(f"SELECT COUNT(*) FROM {t}") for t in ("rows", "oncely_ranges")]
    return counts == [[(0,)], [(0,)]]


def test_rows_that_a_trigger_drops_stop_the_commit(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    drop_odd_ids(place)
    with pytest.raises(RowsDropped, match="given 10 rows and has taken 5") as caught:
        commit_all(sink, at_t0(0, numbered(0, 10)), fence)
    assert "trigger" in caught.value.way_out
    assert nothing_was_written(place)
    commit_all(sink, at_t0(0, [rec(0, id=0, name="even"), rec(1, id=2, name="even")]), fence)
    assert place.sql("SELECT id FROM rows ORDER BY id") == [(0,), (2,)]


def test_also_where_the_server_casts(on_postgres: Place) -> None:
    on_postgres.sql("CREATE TABLE rows (id bigint, name jsonb)")
    sink, fence = ready(sink_to(on_postgres))
    assert sink.target is not None
    assert not sink.target.direct
    drop_odd_ids(on_postgres)
    records = [rec(n, id=n, name="{}") for n in range(10)]
    with pytest.raises(RowsDropped, match="given 10 rows and has taken 5"):
        commit_all(sink, at_t0(0, records), fence)
    assert nothing_was_written(on_postgres)


def test_also_in_a_batch_commit(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    drop_odd_ids(place)
    rows = pa.table({"id": range(10), "name": ["x"] * 10}, schema=SCHEMA)
    what = with_rows(Batch({T0: OffsetRange(0, 10)}, {T0: Counts(10, 0, 0, 0)}), sink, rows)
    with pytest.raises(RowsDropped, match="given 10 rows and has taken 5"):
        publish_on(sink, what, sink.ledger.positions(fence), fence)
    assert nothing_was_written(place)


def test_a_commit_that_the_server_answers_by_rollback(on_postgres: Place) -> None:
    """COMMIT of a failed transaction raises no error; its answer says ROLLBACK."""
    session = on_postgres.dialect.connect("test")
    session.begin()
    with pytest.raises(Exception, match="division by zero"):
        session.query("SELECT 1 / 0")
    with pytest.raises(Unavailable, match="answered COMMIT with ROLLBACK"):
        session.commit()
    session.close()
