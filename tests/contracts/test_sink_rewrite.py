"""Repairs and backfills: rows of committed records are replaced, beside a running pipeline."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import pyarrow as pa
import pytest

from oncely.commit.change import RecordsToRepair, repair, replay, rewrite
from oncely.core.claim import Counts, Fence, Takeover
from oncely.core.digest import digest_sum, row_digests
from oncely.core.ranges import OffsetRange
from oncely.errors import Stopped, WrongInput
from oncely.kinds.sql.change import SqlReplay, SqlRewrites
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql_ledger import discard_letters
from oncely.stores.sql.connection import close_all
from tests.contracts.looking import wait_for_a_lock
from tests.replaytools import judging
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Place,
    Rec,
    at_t0,
    chunk,
    commit_all,
    impatient,
    ready,
    rec,
    sink_to,
    through,
    trigger,
)

RECORDS, END = 10, 12
"""Offsets 0 to 9 are committed, 10 and 11 are not."""
BAD = 5
_WAIT = 30.0


def made(offset: int) -> Rec:
    """What is made of the record today, which is what was committed."""
    return Rec(offset, bad="no JSON") if offset == BAD else rec(offset, id=offset, name="n")


def records(offsets: Sequence[int]) -> list[Rec]:
    return [made(one) for one in offsets]


@pytest.fixture
def sink(place: Place) -> SqlSink:
    """Ten records of which one is a reject."""
    bound, fence = ready(sink_to(place, keep_source=True))
    commit_all(bound, at_t0(0, records(range(RECORDS))), fence)
    return bound


def fence_of(sink: SqlSink) -> Fence:
    entry = sink.ledger.entries()[T0]
    return Fence(sink.pipeline, entry.epoch, entry.run)


def seen(place: Place) -> Counter[int]:
    """How often each record is a row or a reject."""
    rows = place.sql("SELECT kafka_offset FROM rows WHERE kafka_partition = 0")
    letters = place.sql('SELECT "offset" FROM oncely_rejects WHERE "partition" = 0')
    return Counter(int(one) for (one,) in [*rows, *letters])


def once(end: int = RECORDS) -> Counter[int]:
    return Counter(range(end))


def content(place: Place) -> list[tuple[Any, ...]]:
    return sorted(place.sql("SELECT kafka_offset, id, name FROM rows"))


def damage(
    *offsets: int, surplus: Sequence[int] = (), found: Sequence[int] | None = None
) -> RecordsToRepair:
    """Of partition 0; ``found`` are the records that the topic has."""
    there = [one for one in offsets if one < END] if found is None else found
    chunk = at_t0(0, records(there)) if there else at_t0(0, [Rec(0)])
    return RecordsToRepair(T0, sorted(offsets), set(surplus), chunk)


def repaired(sink: SqlSink, what: RecordsToRepair) -> Any:
    return repair(SqlRewrites(sink), what, impatient())


@pytest.mark.parametrize("changed", ["name = 'x'", "doc = '{}'"])
def test_a_repair_that_can_change_nothing_says_why(on_postgres: Place, changed: str) -> None:
    """The next audit would find the same rows."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("doc", pa.string())])
    on_postgres.sql(
        "CREATE TABLE rows (id bigint, name text, doc jsonb, kafka_topic text,"
        " kafka_partition int, kafka_offset bigint)"
    )
    bound, fence = ready(sink_to(on_postgres, schema, keep_source=True))
    right = at_t0(0, [rec(n, id=n, name="n", doc='{"b": 1.0}') for n in range(4)], schema)
    commit_all(bound, right, fence)
    before = on_postgres.sql("SELECT * FROM rows ORDER BY id")
    on_postgres.sql(f"UPDATE rows SET {changed} WHERE id = 2")
    trigger(
        on_postgres, f"IF NEW.id = 2 THEN NEW.{changed.replace('=', ':=')}; END IF; RETURN NEW;"
    )
    left = on_postgres.sql("SELECT * FROM rows ORDER BY id")
    on_postgres.sql("DELETE FROM rows WHERE id = 1")
    done = repaired(bound, RecordsToRepair(T0, [1, 2], set(), right))
    assert "trigger" in done.refused[T0, 2]
    assert list(done.refused) == [(T0, 2)]
    assert on_postgres.sql("SELECT * FROM rows ORDER BY id") == left, "the lost one is repaired"
    on_postgres.sql("DROP TRIGGER {} ON rows".format(*on_postgres.sql(
        "SELECT tgname FROM pg_trigger WHERE tgrelid = 'rows'::regclass")[0]))  # fmt: skip
    assert repaired(bound, RecordsToRepair(T0, [2], set(), right)).refused == {}
    assert on_postgres.sql("SELECT * FROM rows ORDER BY id") == before


# -- each kind of damage -------------------------------------------------------------------------


def test_lost_rows_are_written(sink: SqlSink, place: Place) -> None:
    before = content(place)
    place.sql("DELETE FROM rows WHERE kafka_offset IN (2, 7)")
    done = repaired(sink, damage(2, 7))
    assert (done.removed_rows, done.counts.rows) == (0, 2)
    assert content(place) == before
    assert seen(place) == once()


def test_a_lost_dead_letter_is_written(sink: SqlSink, place: Place) -> None:
    place.sql("DELETE FROM oncely_rejects")
    done = repaired(sink, damage(BAD))
    assert (done.counts.rows, done.counts.rejects) == (0, 1)
    assert place.sql('SELECT "offset", reason FROM oncely_rejects') == [(BAD, "no JSON")]
    assert seen(place) == once()


def test_of_duplicated_rows_one_stays(sink: SqlSink, place: Place) -> None:
    before = content(place)
    place.sql("INSERT INTO rows SELECT * FROM rows WHERE kafka_offset IN (3, 4)")
    place.sql("INSERT INTO rows SELECT * FROM rows WHERE kafka_offset = 4")
    done = repaired(sink, damage(3, 4))
    assert done.removed_rows == 6
    assert content(place) == before


def test_a_record_with_row_and_dead_letter_is_what_it_is_today(sink: SqlSink, place: Place) -> None:
    place.sql(
        "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
        " VALUES (5, 'x', 't', 0, 5)"
    )
    repaired(sink, damage(BAD))
    assert seen(place) == once()
    assert place.sql("SELECT id FROM rows WHERE kafka_offset = 5") == []


def test_altered_rows_are_replaced(sink: SqlSink, place: Place) -> None:
    before = content(place)
    place.sql("UPDATE rows SET name = 'other' WHERE kafka_offset = 6")
    repaired(sink, damage(6))
    assert content(place) == before


def test_rows_of_records_beyond_the_position_are_removed(sink: SqlSink, place: Place) -> None:
    for offset in (10, 11):
        place.sql(
            "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
            " VALUES (0, 'x', 't', 0, ?)", offset,
        )  # fmt: skip
    done = repaired(sink, damage(10, 11, surplus=(10, 11)))
    assert done.removed_rows == 2
    assert seen(place) == once()


def test_a_row_in_a_hole_is_removed(place: Place) -> None:
    bound, fence = ready(sink_to(place, keep_source=True))
    commit_all(bound, at_t0(0, records([0, 1, 3])), fence)
    place.sql(
        "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
        " VALUES (0, 'x', 't', 0, 2)"
    )
    repaired(bound, damage(2, surplus=(2,), found=()))
    assert seen(place) == Counter([0, 1, 3])


def test_a_row_before_the_start_is_removed_though_the_topic_has_its_record(place: Place) -> None:
    bound, fence = ready(sink_to(place, keep_source=True), {T0: 4})
    commit_all(bound, at_t0(4, records([4, 6])), fence)
    place.sql(
        "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
        " VALUES (0, 'x', 't', 0, 1)"
    )
    repaired(bound, damage(1, surplus=(1,)))
    assert seen(place) == Counter([4, 6])
    with pytest.raises(WrongInput, match="offset 1 was never read by this pipeline"):
        repaired(bound, damage(1))


def test_rows_of_others_are_left_alone(sink: SqlSink, place: Place) -> None:
    for topic, partition in (("t", 1), ("u", 0)):
        place.sql(
            "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
            " VALUES (0, 'x', ?, ?, 2)", topic, partition,
        )  # fmt: skip
    repaired(sink, damage(2))
    assert len(place.sql("SELECT 1 FROM rows WHERE kafka_offset = 2")) == 3


def test_a_repair_is_repeated_without_effect(sink: SqlSink, place: Place) -> None:
    place.sql("DELETE FROM rows WHERE kafka_offset = 2")
    for _ in range(3):
        repaired(sink, damage(2))
        assert seen(place) == once()


def test_a_record_that_is_not_committed_is_not_written(sink: SqlSink, place: Place) -> None:
    with pytest.raises(WrongInput, match="reset since the audit"):
        repaired(sink, damage(10))
    assert seen(place) == once()


def test_a_backfill_replaces_a_range(sink: SqlSink, place: Place) -> None:
    today = at_t0(2, [rec(n, id=n, name="today") for n in range(2, 8)])
    done = rewrite(
        SqlRewrites(sink), "backfill", T0, [OffsetRange(2, 8)], today, impatient()
    )  # fmt: skip
    assert (done.removed_rows, done.removed_rejects) == (5, 1)
    assert (done.counts.rows, done.counts.rejects) == (6, 0)
    assert seen(place) == once()
    names = {offset: name for offset, _, name in content(place)}
    assert names == {n: "today" if 2 <= n < 8 else "n" for n in range(RECORDS)}


def amendments(place: Place) -> list[tuple[Any, ...]]:
    return place.sql(
        "SELECT kind, range_start, range_end, records, written, rejected, filtered, recipe"
        " FROM oncely_amendments ORDER BY committed_at, range_start"
    )


def test_the_amendment_of_a_repair_changes_no_count(sink: SqlSink, place: Place) -> None:
    commit_all(sink, at_t0(RECORDS, records([10, 11])), fence_of(sink))
    place.sql("DELETE FROM rows WHERE kafka_offset IN (2, 4, 10)")
    repaired(sink, damage(2, 4, 10))
    assert sorted(amendments(place)) == [
        ("repair", 2, 5, 0, 0, 0, 0, None),
        ("repair", 10, 11, 0, 0, 0, 0, None),
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_a_backfill_amends_counts_and_digest(sink: SqlSink, place: Place, whole: bool) -> None:
    """Of a whole committed range by its entry, of a part by what the table contained: the history
    says what the table contains now."""
    range_ = OffsetRange(0, RECORDS) if whole else OffsetRange(2, 8)
    for name, without in (("today", 3), ("later", 4)):
        today = [rec(n, id=n, name=name) for n in range(range_.start, range_.end) if n != without]
        what = at_t0(range_.start, sorted([*today, Rec(without)], key=lambda one: one.offset))
        rewrite(SqlRewrites(sink), "backfill", T0, [range_], what, impatient())
    assert [one[:3] for one in amendments(place)] == [("backfill", range_.start, range_.end)] * 2
    with sink.ledger.looking() as look:
        told = sink.ledger.history.content(look, T0, OffsetRange(0, RECORDS))
    assert told == Counts(10, 9, 0, 1)
    known = whole or place.is_postgres
    assert told is not None
    assert told.digest == (digest_of(sink, place) if known else None)


def digest_of(sink: SqlSink, place: Place) -> int:
    """The digest of the rows that the table contains."""
    found = content(place)
    assert sink.target is not None
    recipe = sink.target.recipe(keep_source=True)
    assert recipe is not None
    rows = pa.table({"id": [i for _, i, _ in found], "name": [name for *_, name in found]})
    return digest_sum(row_digests(rows, np.array([o for o, _, _ in found]), recipe))


def test_a_backfill_beyond_the_position_is_refused(sink: SqlSink) -> None:
    with pytest.raises(Stopped, match="position went back"):
        rewrite(
            SqlRewrites(sink), "backfill", T0, [OffsetRange(2, 11)], at_t0(2, [made(2)]),
            impatient(),
        )  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------


def test_an_upsert_writes_where_the_table_has_nothing_newer(place: Place) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.int64())])
    bound, fence = ready(
        sink_to(place, schema, keys=["id"], version="v", keep_source=True)
    )  # fmt: skip
    topic = [rec(n, id=n, v=n) for n in range(7)]
    commit_all(bound, chunk({T0: (0, topic)}, schema, keys=["id"]), fence)
    place.sql("DELETE FROM rows WHERE id = 1")
    place.sql("UPDATE rows SET v = 0 WHERE id = 2")
    place.sql("UPDATE rows SET v = 9, kafka_offset = 9 WHERE id = 3")
    place.sql("UPDATE rows SET v = 9 WHERE id = 4")
    place.sql("UPDATE rows SET id = 50 WHERE id = 5")
    damaged = chunk({T0: (0, topic[1:])}, schema, keys=["id"])
    for _ in range(2):
        repaired(bound, RecordsToRepair(T0, [*range(1, 7)], set(), damaged))
        rows = sorted(place.sql("SELECT id, v FROM rows"))
        assert rows == [(0, 0), (1, 1), (2, 2), (3, 9), (4, 4), (5, 5), (6, 6)]


def test_a_record_of_several_rows(place: Place) -> None:
    bound, fence = ready(sink_to(place, keep_source=True))
    several = [Rec(n, ({"id": n, "name": "a"}, {"id": n, "name": "b"})) for n in range(3)]
    commit_all(bound, at_t0(0, several), fence)
    place.sql("DELETE FROM rows WHERE id = 1 AND name = 'b'")
    repair(SqlRewrites(bound), RecordsToRepair(T0, [1], set(), at_t0(1, several[1:2])), impatient())
    assert content(place) == sorted((n, n, name) for n in range(3) for name in "ab")


def test_a_row_that_the_table_refuses_becomes_a_reject(place: Place) -> None:
    type_, strict = ("bigint", "") if place.is_postgres else ("INTEGER", " STRICT")
    text = "text" if place.is_postgres else "TEXT"
    place.sql(
        f"CREATE TABLE rows (id {type_} CHECK (id <> 2), name {text}, kafka_topic {text},"
        f" kafka_partition {type_}, kafka_offset {type_}){strict}"
    )
    bound, fence = ready(sink_to(place, keep_source=True))
    commit_all(bound, at_t0(0, records(range(5))), fence)
    place.sql("DELETE FROM oncely_rejects")
    done = repair(SqlRewrites(bound), damage(1, 2, 3), impatient())
    assert (done.counts.rows, done.counts.rejects) == (2, 1)
    assert seen(place) == once(5)


def test_rows_that_others_depend_on(place: Place) -> None:
    type_, strict = ("bigint", "") if place.is_postgres else ("INTEGER", " STRICT")
    text = "text" if place.is_postgres else "TEXT"
    place.sql(
        f"CREATE TABLE rows (id {type_} PRIMARY KEY, name {text}, kafka_topic {text},"
        f" kafka_partition {type_}, kafka_offset {type_}){strict}"
    )
    bound, _ = ready(sink_to(place, keep_source=True))
    SqlRewrites(bound).check()
    for number, action in enumerate(("NO ACTION", "CASCADE")):
        place.sql(
            f"CREATE TABLE notes{number}"
            f" (row_id {type_} REFERENCES rows (id) ON DELETE {action}){strict}"
        )
    with pytest.raises(WrongInput, match=r"rows of \S*notes1 refer to"):
        SqlRewrites(bound).check()


@pytest.fixture
def loader(on_postgres: Place) -> Iterator[Place]:
    """The same place, as a user who may not DELETE rows."""
    name = f"loader_{uuid.uuid4().hex[:8]}"
    bound, fence = ready(sink_to(on_postgres, keep_source=True))
    commit_all(bound, at_t0(0, records(range(RECORDS))), fence)
    on_postgres.sql(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    on_postgres.sql(f"GRANT USAGE ON SCHEMA {on_postgres.schema} TO {name}")
    on_postgres.sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {on_postgres.schema} TO {name}")
    parts = urlsplit(on_postgres.url)
    at = parts.netloc.rpartition("@")[2]
    yield replace(on_postgres, url=urlunsplit(parts._replace(netloc=f"{name}:x@{at}")))
    on_postgres.sql(f"DROP OWNED BY {name}")
    on_postgres.sql(f"DROP ROLE {name}")


def test_without_the_privilege_to_delete(on_postgres: Place, loader: Place) -> None:
    user = urlsplit(loader.url).username
    on_postgres.sql(f"REVOKE DELETE ON rows FROM {user}")
    on_postgres.sql("DELETE FROM rows WHERE kafka_offset = 2")
    with pytest.raises(WrongInput, match="permission denied for table rows") as refused:
        repaired(sink_to(loader, keep_source=True, create=False).bind(), damage(2))
    assert "grant it" in refused.value.way_out


def test_rows_that_a_policy_may_hide(on_postgres: Place, loader: Place) -> None:
    user = urlsplit(loader.url).username
    on_postgres.sql("ALTER TABLE rows ENABLE ROW LEVEL SECURITY")
    on_postgres.sql(f"CREATE POLICY own ON rows TO {user} USING (id > 3)")
    with pytest.raises(WrongInput, match=r"row-level security of .*rows may hide rows"):
        SqlRewrites(sink_to(loader, keep_source=True, create=False).bind()).check()


# -- killed, and answers lost --------------------------------------------------------------------


class _Died(BaseException):
    pass


class _Dying:
    """A connect whose sessions die before or after a call."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at, self.after, self.calls = at, after, list[str]()

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        if name == "close":
            return call()
        self.calls.append(name)
        dies = len(self.calls) == self.at
        if dies and not self.after:
            raise _Died
        answer = call()
        if dies:
            raise _Died
        return answer


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_dead_at_every_statement(sink: SqlSink, place: Place, after: bool) -> None:
    """Whatever had taken effect, a second repair brings the table to what it was."""
    before = content(place)
    for at in itertools.count(1):
        place.sql("DELETE FROM rows WHERE kafka_offset = 2")
        place.sql("INSERT INTO rows SELECT * FROM rows WHERE kafka_offset = 3")
        place.sql("DELETE FROM oncely_rejects")
        place.sql("UPDATE rows SET name = 'x' WHERE kafka_offset = 7")
        place.sql(
            "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
            " VALUES (0, 'x', 't', 0, 11)"
        )
        what, dying = damage(2, 3, BAD, 7, 11, surplus=(11,)), _Dying(at, after=after)
        close_all()
        try:
            repaired(replace(sink, connect=through(dying.around)), what)
        except _Died:
            close_all()
            assert all(number <= 2 for number in seen(place).values())
            whole = content(place) == before  # the two transactions, or nothing of one
            assert not whole or dying.calls.count("commit") == 2
            repaired(sink, what)
            assert content(place) == before
            assert seen(place) == once()
            continue
        assert dying.calls.count("commit") == 2
        assert at > 10
        assert content(place) == before
        return


# -- races -----------------------------------------------------------------------------------------


class _Waiting:
    """A connect whose first session waits before a call, in the middle of a transaction."""

    def __init__(self, name: str, number: int = 1) -> None:
        self.name, self.left = name, number
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        if name == self.name:
            self.left -= 1
            if self.left == 0:
                self.arrived.set()
                assert self.go_on.wait(_WAIT)
        return call()


class _Beside:
    """A repair in a thread that waits at a call; ``done`` is its result or its error."""

    def __init__(
        self, sink: SqlSink, what: RecordsToRepair, name: str, *, ended: bool = True
    ) -> None:
        self.waiting = _Waiting(name)
        self.done: list[Any] = []
        waits = through(self.waiting.around)
        # Takeovers end sessions by their names.
        slow = replace(
            sink, connect=lambda dialect, name: waits(dialect, name if ended else "another")
        )

        def work() -> None:
            try:
                self.done.append(repaired(slow, what))
            except BaseException as error:
                self.done.append(error)

        close_all()  # a kept session would be used instead
        self.thread = threading.Thread(target=work)
        self.thread.start()
        assert self.waiting.arrived.wait(_WAIT), self.done

    def finish(self) -> Any:
        self.waiting.go_on.set()
        self.thread.join(_WAIT)
        (done,) = self.done
        return done


def put_back(place: Place, to: int) -> tuple[SqlSink, Fence]:
    """A reset, after which the user deletes the rows that are read again; and the next run."""
    reset = sink_to(place, keep_source=True)
    reset.open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=lambda _: {T0: to}))
    place.sql("DELETE FROM rows WHERE kafka_offset >= ?", to)
    return ready(sink_to(place, keep_source=True))


def test_of_two_repairs_of_a_lost_record_the_second_replaces_the_first(
    on_postgres: Place,
) -> None:
    place = on_postgres
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, records(range(RECORDS))), fence)
    place.sql("DELETE FROM rows WHERE kafka_offset = 2")
    first = _Beside(sink, damage(2), "commit")
    second: list[Any] = []
    other = threading.Thread(target=lambda: second.append(repaired(sink, damage(2))))
    other.start()
    wait_for_a_lock(place)
    first.finish()
    other.join(_WAIT)
    assert second[0].removed_rows == 1
    assert seen(place) == once()


@pytest.mark.parametrize(("at", "ended"), [("copy", True), ("commit", True), ("copy", False)])
def test_a_reset_and_the_second_reading_beside_a_repair(
    on_postgres: Place, at: str, ended: bool
) -> None:
    """The repair has decided, and deleted, before the reset: it decides again after it.

    Also if the database user of the reset may not end its session.
    """
    place = on_postgres
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, records(range(RECORDS))), fence)
    place.sql("DELETE FROM rows WHERE kafka_offset = 7")
    beside = _Beside(sink, damage(7), at, ended=ended)
    again, fence = put_back(place, 4)
    commit_all(again, at_t0(4, records(range(4, RECORDS))), fence)
    beside.finish()
    assert seen(place) == once()


def test_a_reset_voids_a_repair(on_postgres: Place) -> None:
    """Nothing is written that the pipeline will read again."""
    place = on_postgres
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, records(range(RECORDS))), fence)
    place.sql("DELETE FROM rows WHERE kafka_offset = 7")
    beside = _Beside(sink, damage(7), "copy")
    again, fence = put_back(place, 4)
    done = beside.finish()
    assert isinstance(done, WrongInput)
    assert "reset since the audit" in str(done)
    assert seen(place) == once(4)
    commit_all(again, at_t0(4, records(range(4, RECORDS))), fence)
    assert seen(place) == once()


def test_a_takeover_beside_a_repair_delays_neither(on_postgres: Place) -> None:
    place = on_postgres
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, records(range(RECORDS))), fence)
    place.sql("DELETE FROM rows WHERE kafka_offset = 7")
    beside = _Beside(sink, damage(7), "commit")
    again, fence = ready(sink_to(place, keep_source=True))  # ends the session of the repair
    commit_all(again, at_t0(RECORDS, records([10])), fence)
    beside.finish()
    assert seen(place) == once(11)


def test_a_replay_beside_a_repair(on_postgres: Place) -> None:
    """The replay has made a row of the dead letter, and has not committed yet."""
    place = on_postgres
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, records(range(RECORDS))), fence)
    waiting = _Waiting("commit")
    replays = SqlReplay(replace(sink, connect=through(waiting.around)))
    moved: list[Any] = []
    thread = threading.Thread(
        target=lambda: moved.append(replay(replays, judging(), impatient(), 10))
    )
    thread.start()
    assert waiting.arrived.wait(_WAIT)
    done: list[Any] = []
    repairs = threading.Thread(target=lambda: done.append(repaired(sink, damage(BAD))))
    repairs.start()
    wait_for_a_lock(place)
    waiting.go_on.set()
    thread.join(_WAIT)
    repairs.join(_WAIT)
    assert moved == [(1, 0)]
    assert done[0].removed_rows == 1
    assert seen(place) == once()


def test_a_discarded_dead_letter_that_is_repaired_is_pending_again(
    sink: SqlSink, place: Place
) -> None:
    before = place.sql('SELECT "key", "value", headers, stage, reason FROM oncely_rejects')
    assert discard_letters(sink.ledger, lambda _: True, True).total() == 1
    assert repaired(sink, damage(BAD)).removed_rejects == 1
    assert place.sql('SELECT "key", "value", headers, stage, reason FROM oncely_rejects') == before
    assert seen(place) == once()


def test_a_run_commits_beside_a_repair(on_postgres: Place) -> None:
    """The repair has sent its rows; until it compares the ledger no commit waits for it."""
    place = on_postgres
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, records(range(RECORDS))), fence)
    place.sql("DELETE FROM rows WHERE kafka_offset = 7")
    beside = _Beside(sink, damage(7), "copy")
    commit_all(sink, at_t0(RECORDS, records([10])), fence)
    beside.finish()
    assert seen(place) == once(11)


def test_a_record_beyond_the_position_that_is_committed_meanwhile(on_postgres: Place) -> None:
    """Its row was surplus when the audit ended, and is one of two when the repair removes it."""
    place = on_postgres
    sink, fence = ready(sink_to(place, keep_source=True))
    commit_all(sink, at_t0(0, records(range(RECORDS))), fence)
    place.sql(
        "INSERT INTO rows (id, name, kafka_topic, kafka_partition, kafka_offset)"
        " VALUES (0, 'x', 't', 0, 10)"
    )
    # It has read the position; the transaction has not begun.
    beside = _Beside(sink, damage(10, surplus=(10,)), "begin")
    commit_all(sink, at_t0(RECORDS, records([10])), fence)
    assert seen(place)[10] == 2
    beside.finish()
    assert seen(place) == once(11)


def test_partitions_are_apart(sink: SqlSink, place: Place) -> None:
    with pytest.raises(WrongInput, match="t-1 has no position"):
        repaired(sink, replace(damage(2), partition=T1))
