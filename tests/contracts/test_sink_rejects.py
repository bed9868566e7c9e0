"""Records that the database refuses: set aside in the same transaction, never guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from oncely.core.batch import Reject
from oncely.errors import Stopped, TooManyRejects
from oncely.stores.sql.connection import brief_session, close_all
from tests.contracts.looking import create, ids, rejected
from tests.sinktools import (
    T0,
    T1,
    Place,
    Rec,
    at_t0,
    chunk,
    commit_all,
    numbered,
    offsets,
    ready,
    rec,
    sink_to,
    through,
    with_faults,
)


def test_what_a_reject_keeps(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    bad = Rec(
        1,
        ({"id": 1, "name": "a\x00b"},),
        key=b"\x00\xff",
        value=b'{"name": "a\\u0000b"}',
        headers=[("trace", b"\x01\x00"), ("trace", None), ("", b"")],
    )
    worse = Rec(2, bad="not JSON", key=None, value=None)
    commit_all(sink, at_t0(0, [rec(0, id=0), bad, worse]), fence)
    with brief_session(place.dialect, "test", sink.connect) as session:
        kept = sink.ledger.dead_letters.read(session, ("", -1, -1), 10)
        assert sink.ledger.dead_letters.count(session) == 2
        assert [r.offset for r in sink.ledger.dead_letters.read(session, ("t", 0, 1), 10)] == [2]
        assert [r.offset for r in sink.ledger.dead_letters.read(session, ("", -1, -1), 1)] == [1]
    refused, undecoded = kept
    assert (refused.partition, refused.offset, refused.stage) == (T0, 1, "write")
    assert refused.key == b"\x00\xff"
    assert refused.value == b'{"name": "a\\u0000b"}'
    assert list(refused.headers) == [("trace", b"\x01\x00"), ("trace", None), ("", b"")]
    assert refused.timestamp_ms == 1_700_000_000_000
    assert refused.reason
    assert undecoded == Reject(T0, 2, 1_700_000_000_000, None, None, [], "decode", "not JSON")
    assert place.sql("SELECT epoch FROM oncely_rejects") == [(fence.epoch,)] * 2


def test_a_reason_of_any_bytes_is_kept(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    reason = "lone \ud800 and NUL \x00 and long " + "x" * 5000
    commit_all(sink, at_t0(0, [Rec(0, bad=reason)]), fence)
    kept = rejected(place)[0][1]
    assert len(kept) == 1000
    assert kept.startswith("lone \\ud800 and NUL \\x00")


def test_a_dead_letter_that_another_attempt_stores_meanwhile(on_postgres: Place) -> None:
    """The unique index refuses it; the next attempt replaces it."""
    sink, fence = ready(sink_to(on_postgres))
    stored: list[str] = []
    other = (
        'INSERT INTO oncely_rejects (pipeline, topic, "partition", "offset", headers, stage,'
        " reason, epoch) SELECT pipeline, 't', 0, 1, '[]', 'decode', 'older', 1"
        " FROM oncely_pipelines"
    )

    def meanwhile(name: str, go: Callable[[], Any]) -> Any:
        if name == "copy" and not stored:
            stored.append(name)
            on_postgres.sql(other)
        return go()

    close_all()
    records = [Rec(0, bad="no JSON"), Rec(1, bad="newer"), Rec(2, bad="no JSON")]
    outcomes = commit_all(with_faults(sink, meanwhile), at_t0(0, records), fence)
    assert stored
    assert [one.replayed for one in outcomes] == [False]
    assert rejected(on_postgres) == [(0, "no JSON"), (1, "newer"), (2, "no JSON")]


NOTHING = "CHECK (1 = 1)"


@pytest.mark.parametrize(
    ("columns", "bad", "reason"),
    [
        (f"id bigint, name text, {NOTHING}", {"id": 5, "name": "a\x00b"}, "0x00|NUL"),
        ("id bigint NOT NULL, name text", {"id": None, "name": "x"}, "(?i)null"),
        ("id bigint, name text NOT NULL", {"id": 5, "name": None}, "(?i)null"),
        ("id bigint, name text, CHECK (id <> 999)", {"id": 999, "name": "x"}, "(?i)check"),
        ("id bigint UNIQUE, name text", {"id": -1, "name": "x"}, "(?i)unique"),
        ("id bigint PRIMARY KEY, name text", {"id": 3, "name": "x"}, "(?i)unique"),
    ],
    ids=["nul", "null key", "null text", "check", "unique before", "unique inside"],
)
def test_one_bad_row_in_the_middle(
    place: Place, columns: str, bad: dict[str, object], reason: str
) -> None:
    create(place, columns)
    place.sql("INSERT INTO rows (id, name) VALUES (-1, 'was here')")
    sink, fence = ready(sink_to(place))
    good = numbered(0, 300)
    records = [*good[:150], Rec(150, (bad,)), *numbered(151, 300)]
    outcomes = commit_all(sink, at_t0(0, records), fence)
    assert ids(place) == [-1, *range(150), *range(151, 300)]
    assert [offset for offset, _ in rejected(place)] == [150]
    import re

    assert re.search(reason, rejected(place)[0][1])
    assert outcomes[0].counts.rejects == 1
    assert outcomes[0].counts.rows == 299


def test_many_bad_rows_among_many(place: Place) -> None:
    create(place, "id bigint, name text, CHECK (id % 97 <> 5)")
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 3000)), fence)
    wanted = [n for n in range(3000) if n % 97 == 5]
    assert [offset for offset, _ in rejected(place)] == wanted
    assert ids(place) == [n for n in range(3000) if n % 97 != 5]


def test_a_chunk_of_bad_rows_only(place: Place) -> None:
    create(place, "id bigint, name text, CHECK (id < 0)")
    sink, fence = ready(sink_to(place))
    outcomes = commit_all(sink, at_t0(0, numbered(0, 50)), fence)
    assert ids(place) == []
    assert [offset for offset, _ in rejected(place)] == list(range(50))
    assert outcomes[0].counts.rejects == 50
    assert place.sql('SELECT "position" FROM oncely_positions') == [(50,)]
    commit_all(sink, at_t0(50, [Rec(50, bad="x"), Rec(51, bad="y")]), fence)
    assert place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(52,)]


def test_rows_keep_their_order_round_a_bad_one(place: Place) -> None:
    create(place, "id bigint, name text, CHECK (id <> 40)")
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 100)), fence)
    order = "ctid" if place.is_postgres else "rowid"
    found = offsets(place.sql(f"SELECT id FROM rows ORDER BY {order}"))
    assert found == [n for n in range(100) if n != 40]


def test_a_deferred_unique_constraint(on_postgres: Place) -> None:
    """COPY passes, COMMIT would fail for ever."""
    on_postgres.sql("CREATE TABLE rows (id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED, name text)")
    on_postgres.sql("INSERT INTO rows VALUES (7, 'was here')")
    sink, fence = ready(sink_to(on_postgres))
    commit_all(sink, at_t0(0, numbered(0, 20)), fence)
    assert ids(on_postgres) == list(range(20))
    assert [offset for offset, _ in rejected(on_postgres)] == [7]
    assert on_postgres.sql("SELECT name FROM rows WHERE id = 7") == [("was here",)]


def test_a_deferred_foreign_key(on_postgres: Place) -> None:
    on_postgres.sql("CREATE TABLE known (id bigint PRIMARY KEY)")
    on_postgres.sql("INSERT INTO known SELECT generate_series(0, 9)")
    on_postgres.sql(
        "CREATE TABLE rows (id bigint REFERENCES known DEFERRABLE INITIALLY DEFERRED, name text)"
    )
    sink, fence = ready(sink_to(on_postgres), {T0: 5})
    commit_all(sink, at_t0(5, numbered(5, 15)), fence)
    assert ids(on_postgres) == [5, 6, 7, 8, 9]
    assert [offset for offset, _ in rejected(on_postgres)] == [10, 11, 12, 13, 14]


def test_a_foreign_key(place: Place) -> None:
    create(place, "id bigint PRIMARY KEY", "known")
    place.sql("INSERT INTO known VALUES (0), (1), (3)")
    create(place, "id bigint REFERENCES known, name text")
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    assert ids(place) == [0, 1, 3]
    assert [offset for offset, _ in rejected(place)] == [2, 4]


def test_a_deferred_foreign_key_of_sqlite_stops(on_sqlite: Place) -> None:
    """SQLite can't say which record it was: nothing is written, and a person must decide."""
    on_sqlite.sql("CREATE TABLE known (id INT PRIMARY KEY) STRICT")
    on_sqlite.sql(
        "CREATE TABLE rows (id INT REFERENCES known DEFERRABLE INITIALLY DEFERRED, name TEXT)"
        " STRICT"
    )
    sink, fence = ready(sink_to(on_sqlite))
    with pytest.raises(Stopped, match="FOREIGN KEY") as caught:
        commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    assert "without DEFERRED" in caught.value.way_out
    assert ids(on_sqlite) == []
    assert on_sqlite.sql('SELECT "position" FROM oncely_positions') == [(0,)]


def test_conflict_clauses_of_the_table_swallow_nothing(on_sqlite: Place) -> None:
    """ON CONFLICT IGNORE would drop a row without a word, ROLLBACK the whole transaction."""
    on_sqlite.sql(
        "CREATE TABLE rows (id INT UNIQUE ON CONFLICT IGNORE,"
        " name TEXT UNIQUE ON CONFLICT ROLLBACK) STRICT"
    )
    on_sqlite.sql("INSERT INTO rows VALUES (3, 'x'), (-4, 'name 4')")
    sink, fence = ready(sink_to(on_sqlite))
    commit_all(sink, at_t0(0, numbered(0, 6)), fence)
    assert ids(on_sqlite) == [-4, 0, 1, 2, 3, 5]
    assert [offset for offset, _ in rejected(on_sqlite)] == [3, 4]


def test_an_expression_that_fails_on_a_value(on_sqlite: Place) -> None:
    """A generated column fails with SQLITE_ERROR, no constraint error: the row's fault still."""
    on_sqlite.sql(
        "CREATE TABLE rows (id INT, name TEXT, inside TEXT AS (json_extract(name, '$.a')) STORED)"
        " STRICT"
    )
    sink, fence = ready(sink_to(on_sqlite))
    records = [rec(0, id=0, name='{"a": 1}'), rec(1, id=1, name="{"), rec(2, id=2, name="{}")]
    commit_all(sink, at_t0(0, records), fence)
    assert ids(on_sqlite) == [0, 2]
    assert [(offset, "JSON" in reason) for offset, reason in rejected(on_sqlite)] == [(1, True)]


# -- several rows of one record ------------------------------------------------------------


def test_a_record_is_rows_or_a_reject_never_both(place: Place) -> None:
    create(place, "id bigint, name text, CHECK (id <> 66)")
    sink, fence = ready(sink_to(place))
    records = [
        Rec(0, ({"id": 0}, {"id": 1})),
        Rec(1, ({"id": 10}, {"id": 66}, {"id": 11})),
        Rec(2, ({"id": 20},)),
        Rec(3),
        Rec(4, ({"id": 66}, {"id": 66})),
        Rec(5, ({"id": 30}, {"id": 31})),
    ]
    outcomes = commit_all(sink, at_t0(0, records), fence)
    assert ids(place) == [0, 1, 20, 30, 31]
    assert [offset for offset, _ in rejected(place)] == [1, 4]
    written = outcomes[0].counts
    assert (written.records, written.rows, written.rejects, written.filtered) == (6, 5, 2, 1)


def test_a_row_that_can_t_be_cast_takes_its_record_along(place: Place) -> None:
    schema = pa.schema([("id", pa.uint64())])
    create(place, "id bigint")
    sink, fence = ready(sink_to(place, schema))
    records = [Rec(0, ({"id": 1}, {"id": 2**63})), Rec(1, ({"id": 2}, {"id": 3}))]
    commit_all(sink, at_t0(0, records, schema), fence)
    assert ids(place) == [2, 3]
    assert [offset for offset, _ in rejected(place)] == [0]


# -- the budget ----------------------------------------------------------------------------


def test_a_spent_budget_shows_why_and_which_records(place: Place) -> None:
    """Nothing was written, so ``rejects list`` can't show them."""
    create(place, "id bigint, name text, CHECK (id < 10)")
    sink, fence = ready(sink_to(place))
    bad = [Rec(n, bad=f"no JSON at {n}", value=b"broken %d" % n) for n in range(3)]
    with pytest.raises(TooManyRejects) as caught:
        commit_all(sink, at_t0(0, [*bad, *numbered(3, 11)]), fence, max_rejects=3)
    assert rejected(place) == []
    said = str(caught.value)
    assert "3 x no JSON at 0" in said
    assert "1 x" in said
    assert "t-0 offset 0: no JSON at 0; value broken 0" in said
    assert "t-0 offset 10: " in said, "the reject of the write stage"
    assert [one.offset for one in caught.value.refused.records] == [0, 10, 1, 2]


def test_rejects_of_every_stage_count(place: Place) -> None:
    schema = pa.schema([("id", pa.uint64()), ("name", pa.string())])
    create(place, "id bigint, name text, CHECK (id <> 1)")
    sink, fence = ready(sink_to(place, schema))
    records = [Rec(0, bad="decode"), rec(1, id=1), rec(2, id=2**63), rec(3, id=3)]
    with pytest.raises(TooManyRejects):
        commit_all(sink, at_t0(0, records, schema), fence, max_rejects=2)
    assert ids(place) == rejected(place) == []
    commit_all(sink, at_t0(0, records, schema), fence, max_rejects=3)
    assert ids(place) == [3]
    assert [offset for offset, _ in rejected(place)] == [0, 1, 2]


def test_a_budget_of_none_left(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence, max_rejects=0)
    with pytest.raises(TooManyRejects):
        commit_all(sink, at_t0(3, [Rec(3, bad="no")]), fence, max_rejects=0)


def test_rejects_of_several_partitions(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    what = chunk(
        {T0: (0, [*numbered(0, 2), Rec(2, bad="a")]), T1: (0, [Rec(0, bad="b"), rec(1, id=9)])}
    )
    outcomes = commit_all(sink, what, fence)
    found = place.sql(
        'SELECT topic, "partition", "offset", reason FROM oncely_rejects ORDER BY 2, 3'
    )
    assert found == [("t", 0, 2, "a"), ("t", 1, 0, "b")]
    assert {o.partition: o.counts.rejects for o in outcomes} == {T0: 1, T1: 1}


def test_a_reject_met_again_after_a_reset_replaces_its_older_self(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, [Rec(0, bad="first")]), fence)
    place.sql('UPDATE oncely_positions SET "position" = 0')
    place.sql("UPDATE oncely_ranges SET superseded = 1")
    sink, fence = ready(sink)
    commit_all(sink, at_t0(0, [Rec(0, bad="second")]), fence)
    assert place.sql("SELECT reason, epoch FROM oncely_rejects") == [("second", 2)]


def test_taking_a_reject_out(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, [Rec(0, bad="first"), Rec(1, bad="second")]), fence)
    with brief_session(place.dialect, "test", through(lambda _, go: go())) as session:
        assert sink.ledger.dead_letters.remove(session, T0, 0)
        assert not sink.ledger.dead_letters.remove(session, T0, 0)
    assert [offset for offset, _ in rejected(place)] == [1]
