"""Commits to a Delta table: with others beside it, by key, with dead letters, and replayed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.core.batch import Batch, Reject, StagedRowsGone
from oncely.core.change import Judge
from oncely.core.claim import Claim, Counts, Fence, PositionMoved, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import ConfigError, InvariantViolation, Stopped, Unavailable
from oncely.kinds.delta.change import DeltaReplay
from oncely.stores.delta import Change, DeltaTables
from tests.deltatools import Committing, DeltaPlace, make_place
from tests.replaytools import bad, judging
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Rec,
    at_t0,
    chunk,
    commit_all,
    commit_on,
    gone,
    numbered,
    open_sink,
    ready,
    rec,
)

KEYED = pa.schema([("id", pa.int64()), ("name", pa.string()), ("v", pa.int64())])


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    return make_place(tmp_path)


def started(place: DeltaPlace, *schema: pa.Schema, **more: Any) -> tuple[Any, Fence]:
    return ready(Committing(place.sink(*schema, **more)), {T0: 0, T1: 0})


# -- beside others -------------------------------------------------------------------------


Foreign = Callable[[DeltaTable], object]
FOREIGN: Mapping[str, Foreign] = {
    "optimize": lambda table: table.optimize.compact(),
    "vacuum": lambda table: table.vacuum(
        retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True
    ),
    "update": lambda table: table.update(updates={"name": "'x'"}, predicate="id = 1"),
    "append": lambda table: table.create_write_transaction([], "append", table.schema()),
    "checkpoint": lambda table: table.create_checkpoint(),
}


class Interrupted(DeltaTables):
    """Something happens between the decision and the commit."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def commit(self, table: Any, change: Any) -> None:
        what, type(self).meanwhile = type(self).meanwhile, staticmethod(lambda: None)
        what()
        super().commit(table, change)


@pytest.mark.parametrize("keys", [(), ("id",)])
@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_foreign_commits_between_decision_and_commit(
    place: DeltaPlace, foreign: Foreign, keys: Sequence[str]
) -> None:
    """All but a full VACUUM without retention, which removes what is staged, are no matter."""

    class Meanwhile(Interrupted):
        pass

    sink, fence = started(place, keys=keys, delta=Meanwhile)
    for at in range(3):
        commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)
    if foreign is FOREIGN["vacuum"]:
        foreign(place.table)
    else:
        Meanwhile.meanwhile = staticmethod(lambda: foreign(place.table))
    (outcome,) = commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert outcome.counts == Counts(2, 2, 0, 0)
    assert place.ids() == [*range(5)]
    assert sink.ledger.positions(fence)[T0].position == 5


@pytest.mark.parametrize("keys", [(), ("id",)])
def test_a_table_that_a_restore_has_taken_back_is_refused(
    place: DeltaPlace, keys: Sequence[str]
) -> None:
    """Its positions are behind rows that it lacks; a repair or a reset decides."""
    sink, fence = started(place, keys=keys)
    for at in range(3):
        commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)
    place.table.restore(place.table.version() - 1)
    place.table.optimize.compact()
    for commits in (
        lambda: commit_all(sink, at_t0(3, numbered(3, 5)), fence),
        lambda: open_sink(sink),
        lambda: sink.inner.ledger.add_partitions(fence, {TopicPartition("t", 9): 0}, SOURCE),
    ):
        with pytest.raises(Stopped, match="is a RESTORE to a version before") as refused:
            commits()
        assert "oncely repair" in refused.value.way_out
    assert place.ids() == [0, 1]
    again = Takeover(SOURCE, dict, {}, reset=lambda at: {T0: at[T0]})
    fence = sink.open(again).fence
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert place.ids() == [0, 1, 3, 4]


def test_a_restore_that_takes_no_rows_back_is_no_matter(place: DeltaPlace) -> None:
    sink, fence = started(place)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    version = place.table.version()
    place.table.delete("id = 1")
    place.table.restore(version)
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert place.ids() == [*range(5)]


def test_a_restore_of_a_commit_without_rows_is_no_matter(place: DeltaPlace) -> None:
    sink, fence = started(place)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    version = place.table.version()
    fence = open_sink(sink).fence
    sink.inner.ledger.add_partitions(fence, {TopicPartition("t", 9): 0}, SOURCE)
    place.table.restore(version)
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert place.ids() == [*range(5)]


Steps = Sequence[tuple[str, int]]
HISTORIES: Mapping[str, tuple[Steps, int | None]] = {
    "undone": ([("to", -1), ("to", 0)], None),
    "undone by way of another one": ([("to", -1), ("to", 0), ("to", -1), ("to", 2)], None),
    "twice": ([("to", -1), ("to", -2)], 2),
    "by way of another one": ([("to", -1), ("to", 0), ("to", 1)], 1),
    "undone and done again": ([("to", -1), ("to", 0), ("to", -2)], 3),
    "undone, with a takeover since": ([("to", -1), ("to", 0), ("open", 0), ("to", 2)], None),
    "before a takeover since": ([("to", -1), ("to", 0), ("open", 0), ("to", 1)], 1),
}


@pytest.mark.parametrize(("steps", "refused"), HISTORIES.values(), ids=HISTORIES)
def test_of_several_restores_the_newest_one_decides(
    place: DeltaPlace, steps: Steps, refused: int | None
) -> None:
    """Each RESTORE is to a version that is counted from the newest one with rows."""
    sink, fence = started(place)
    for at in range(3):
        commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)
    newest = place.table.version()
    for what, to in steps:
        if what == "to":
            place.table.restore(newest + to)
        else:
            fence = open_sink(sink).fence
    lacks = place.ids() != [0, 1, 2]
    assert lacks == (refused is not None)
    if refused is None:
        commit_all(sink, at_t0(3, numbered(3, 5)), fence)
        assert place.ids() == [*range(5)]
        return
    with pytest.raises(Stopped, match=f"version {newest + refused} of the table"):
        commit_all(sink, at_t0(3, numbered(3, 5)), fence)


def test_a_refusal_ends_for_the_restore_for_which_it_was_told(place: DeltaPlace) -> None:
    """A RESTORE during the audit that found nothing lacking is another reason."""
    sink, fence = started(place)
    for at in range(3):
        commit_all(sink, at_t0(at, numbered(at, at + 1)), fence)
    ledger, version = sink.inner.ledger, place.table.version()
    place.table.restore(version - 1)
    told = ledger.taken_back(ledger.read())
    place.table.restore(version - 2)
    newest = place.table.version()
    ledger.end_refusal(told.message)
    assert place.table.version() == newest
    told = ledger.taken_back(ledger.read())
    assert f"version {newest} of" in told.message
    ledger.end_refusal(told.message)
    assert place.told()[0]["kind"] == "repair"
    assert ledger.taken_back(ledger.read()) is None
    ledger.end_refusal(told.message)
    assert place.table.version() == newest + 1
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)


@pytest.mark.parametrize("keys", [(), ("id",)])
def test_a_stale_driver_is_refused_at_its_commit(place: DeltaPlace, keys: Sequence[str]) -> None:
    """It has loaded, compared and staged; another run takes over, and writes the same records."""

    class Meanwhile(Interrupted):
        pass

    sink, fence = started(place, keys=keys, delta=Meanwhile)

    def take_over() -> None:
        newer, later = started(place, keys=keys)
        commit_all(newer, at_t0(0, numbered(0, 5)), later)

    Meanwhile.meanwhile = staticmethod(take_over)
    entries = sink.ledger.positions(fence)
    with pytest.raises(PositionMoved):
        commit_on(sink, at_t0(0, numbered(0, 5)), entries, fence)
    assert place.ids() == [*range(5)]


def test_a_merge_that_changes_nothing_moves_the_position(place: DeltaPlace) -> None:
    """delta-rs commits no such merge; the compare-and-set holds all the same."""

    class Meanwhile(Interrupted):
        pass

    sink, fence = started(place, KEYED, keys=["id"], version="v", delta=Meanwhile)
    gone = at_t0(0, [Rec(0, deletes={"id": 7})], KEYED, keys=["id"])
    commit_all(sink, gone, fence)
    assert sink.ledger.positions(fence)[T0].position == 1
    entries = sink.ledger.positions(fence)
    Meanwhile.meanwhile = staticmethod(lambda: started(place, KEYED, keys=["id"], version="v"))
    with pytest.raises(PositionMoved):
        commit_on(sink, at_t0(1, [Rec(1, deletes={"id": 7})], KEYED, keys=["id"]), entries, fence)


def test_files_that_may_have_been_vacuumed_are_not_named(place: DeltaPlace) -> None:
    sink, fence = started(place)
    inner = sink.inner
    inner.begin_batch()
    task = inner.staging(fence, 0, 0)
    what = at_t0(0, numbered(0, 3))
    task.add(what)
    staged = [task.finish()]
    inner._began -= 3_601  # the machine was asleep
    batch = Batch(what.ranges, {T0: Counts(3, 3, 0, 0)}, (), staged)
    with pytest.raises(StagedRowsGone, match="may have been vacuumed"):
        inner.publish(batch, fence, Claim(fence, what.ranges, inner.ledger.positions(fence)))
    assert place.ids() == []


def test_files_that_are_not_all_there_are_a_defect(place: DeltaPlace) -> None:
    sink, fence = started(place)
    batch = Batch({T0: OffsetRange(0, 3)}, {T0: Counts(3, 3, 0, 0)}, (), [])
    lost = Batch(batch.ranges, batch.counts, (), [sink.inner.staging(fence, 0, 0).finish()])
    sink.inner.publish(lost, fence, Claim(fence, {}, {}))  # no rows, none named
    task = sink.inner.staging(fence, 0, 1)
    task.add(at_t0(0, numbered(0, 3)))
    staged = task.finish()
    with pytest.raises(InvariantViolation, match="3 rows are named, 2 were staged"):
        sink.inner.load([type(staged)(staged.name, 2)])


def test_what_a_commit_tells_of_itself(place: DeltaPlace) -> None:
    sink, fence = started(place)
    commit_all(sink, at_t0(0, [*numbered(0, 3), *bad(3)]), fence)
    told = place.told()[0]
    assert told["kind"] == "data"
    assert told["ranges"] == {"t": {"0": [0, 4]}}
    assert told["positions"] == {"t": {"0": 4, "1": 0}}
    assert told["epoch"] == fence.epoch
    (letters,) = told["rejects"]
    assert (place.root / "_oncely" / letters).exists()
    assert place.letters() == [("t", 0, 3)]


# -- rows ----------------------------------------------------------------------------------

TYPES = pa.schema(
    [
        ("i", pa.int32()),
        ("n", pa.int64()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("b", pa.bool_()),
        ("s", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("price", pa.decimal128(12, 2)),
        ("tags", pa.list_(pa.string())),
        ("who", pa.struct([("first name", pa.string()), ("n", pa.int64())])),
    ]
)
ROW = {
    "i": -1,
    "n": 1 << 60,
    "f": 0.5,
    "d": 1e300,
    "b": True,
    "s": "ä\x00",
    "raw": b"\xff\x00",
    "day": date(2026, 3, 1),
    "at": datetime(2026, 3, 1, 12, 0, 0, 5, UTC),
    "local": datetime(1969, 1, 1, 0, 0, 1),
    "price": None,
    "tags": ["a", None, ""],
    "who": {"first name": "x", "n": None},
}


@pytest.mark.parametrize("keys", [(), ("n",)])
def test_values_of_every_type_come_back(place: DeltaPlace, keys: Sequence[str]) -> None:
    sink, fence = started(place, TYPES, keys=keys)
    rows = [Rec(0, (ROW,)), Rec(1, ({**dict.fromkeys(ROW), "n": 2},))]
    commit_all(sink, at_t0(0, rows, TYPES, keys=keys), fence)
    found = {row["n"]: row for row in place.rows()}
    assert found[1 << 60] == ROW
    assert found[2] == {**dict.fromkeys(ROW), "n": 2}


def test_partitions_by_values_that_are_no_paths(place: DeltaPlace) -> None:
    """What readers of Delta take for null, or for another text, is a dead letter."""
    sink, fence = started(place, partition_by=["name"])
    names = ["a b", "ä/ö", "%41", "x=y", "..", "資" * 21, "~", None]
    bad = ["__HIVE_DEFAULT_PARTITION__", "", "x" * 300, "ж" * 40, "資" * 25]
    rows = [rec(i, id=i, name=name) for i, name in enumerate([*names, *bad])]
    (outcome,) = commit_all(sink, at_t0(0, rows), fence)
    assert outcome.counts == Counts(13, 8, 5, 0)
    assert [row["name"] for row in place.rows()] == names
    assert place.letters() == [("t", 0, at) for at in range(8, 13)]
    by_polars = pl.read_delta(str(place.root)).sort("id")["name"].to_list()
    assert by_polars == names
    with pytest.raises(ConfigError, match="too long for the names of directories"):
        ready(place.sink(pa.schema([("n" * 150, pa.string())]), partition_by=["n" * 150]))
    assert place.table.metadata().partition_columns == ["name"]
    found = place.table.to_pyarrow_table(filters=[("name", "=", "a b")])
    assert found.column("id").to_pylist() == [0]


# -- upserts -------------------------------------------------------------------------------


def upserted(place: DeltaPlace, records: Sequence[Rec], at: int = 0, **more: Any) -> dict[int, Any]:
    """The table after a chunk, by key."""
    keys = ["id"]
    sink, fence = ready(Committing(place.sink(KEYED, keys=keys, **more)), {T0: at})
    commit_all(sink, at_t0(at, records, KEYED, keys=keys), fence)
    return {row["id"]: (row["name"], row["v"]) for row in place.rows()}


def one(offset: int, id_: int | None, name: str, v: int | None = None) -> Rec:
    return rec(offset, id=id_, name=name, v=v)


def test_the_last_record_of_a_key_wins(place: DeltaPlace) -> None:
    assert upserted(place, [one(0, 1, "a"), one(1, 2, "b"), one(2, 1, "c")]) == {
        1: ("c", None),
        2: ("b", None),
    }
    assert upserted(place, [one(3, 1, "d"), one(4, 3, "e")], 3) == {
        1: ("d", None),
        2: ("b", None),
        3: ("e", None),
    }


def test_tombstones_delete(place: DeltaPlace) -> None:
    upserted(place, [one(0, 1, "a"), one(1, 2, "b"), one(2, 3, "c")])
    done = upserted(place, [gone(3, id=1), gone(4, id=2), one(5, 2, "again"), gone(6, id=9)], 3)
    assert done == {2: ("again", None), 3: ("c", None)}


def test_a_version_keeps_older_rows_out(place: DeltaPlace) -> None:
    more = {"version": "v"}
    rows = [one(0, 1, "new", 5), one(1, 1, "old", 3), one(2, 1, "same", 5)]
    first = upserted(place, rows, **more)
    assert first == {1: ("same", 5)}
    assert upserted(place, [one(3, 1, "older", 4)], 3, **more) == {1: ("same", 5)}
    assert upserted(place, [one(4, 1, "newer", 6)], 4, **more) == {1: ("newer", 6)}
    assert upserted(place, [gone(5, id=1), one(6, 1, "from zero", 1)], 5, **more) == {
        1: ("from zero", 1)
    }, "a tombstone has no version, and what follows it begins anew"


def test_no_key_and_no_version_are_dead_letters(place: DeltaPlace) -> None:
    rows = [one(0, None, "no key", 1), one(1, 1, "no version"), one(2, 2, "fine", 1)]
    assert upserted(place, rows, version="v") == {2: ("fine", 1)}
    assert place.letters() == [("t", 0, 0), ("t", 0, 1)]


def test_an_upsert_by_partition(place: DeltaPlace) -> None:
    more = {"partition_by": ["name"]}
    assert upserted(place, [one(0, 1, "a b"), one(1, 2, "b")], **more)[1] == ("a b", None)
    done = upserted(place, [one(2, 1, "b"), one(3, 3, "")], 2, **more)
    assert done == {1: ("b", None), 2: ("b", None)}, "moved, and no empty text"


@pytest.mark.parametrize(("key", "version"), [("index", "v"), ("id", "index")])
def test_a_key_or_a_version_may_be_called_index(place: DeltaPlace, key: str, version: str) -> None:
    schema = pa.schema([(key, pa.int64()), (version, pa.int64())])
    sink, fence = started(place, schema, keys=[key], version=version)
    records = [rec(at, **{key: 1, version: number}) for at, number in enumerate([5, 7, 6])]
    commit_all(sink, chunk({T0: (0, records)}, schema, [key]), fence)
    assert place.rows() == [{key: 1, version: 7}]


def test_keys_across_tasks_and_names_that_need_quotes(place: DeltaPlace) -> None:
    schema = pa.schema([('K "1"', pa.string()), ("Select", pa.int64()), ("a.b", pa.string())])
    sink, fence = started(place, schema, keys=['K "1"', "a.b"])
    rows = [rec(i, **{'K "1"': f"k{i % 2}", "Select": i, "a.b": "x"}) for i in range(4)]
    parts = {T0: (0, rows), T1: (0, [rec(9, **{'K "1"': "k1", "Select": 9, "a.b": "y"})])}
    commit_all(sink, chunk(parts, schema, ['K "1"', "a.b"]), fence)
    commit_all(sink, chunk({T0: (4, [rec(4, **{'K "1"': "k0", "Select": 5, "a.b": "x"})])}, schema,
                           ['K "1"', "a.b"]), fence)  # fmt: skip
    assert [row["Select"] for row in place.rows()] == [5, 3, 9]


def test_what_was_staged_for_merges_is_removed(place: DeltaPlace) -> None:
    upserted(place, [one(0, 1, "a")])
    staged = place.root / "_oncely" / "staged-p"
    assert len([path for path in staged.rglob("*") if path.is_file()]) == 1
    sink = place.sink(KEYED, keys=["id"])
    sink.sweep(open_sink(sink).fence)
    assert not [path for path in staged.rglob("*") if path.is_file()]


# -- dead letters tried again --------------------------------------------------------------


def replayed(sink: Any, judge: Judge, limit: int = 500) -> tuple[int, int]:
    return replay(DeltaReplay(sink), judge, Backoff(0.01, 0.1, 10), limit)


def with_letters(place: DeltaPlace) -> None:
    """Ten records in two commits, of which six were rejected."""
    sink, fence = started(place)
    commit_all(sink, at_t0(0, [*numbered(0, 2), *bad(2, 3, 4)]), fence)
    commit_all(sink, at_t0(5, [*numbered(5, 7), *bad(7, 8, 9)]), fence)
    assert len(place.letters()) == 6


@pytest.mark.parametrize("limit", [1, 2, 500])
def test_a_replay_writes_what_passes_and_keeps_the_rest(place: DeltaPlace, limit: int) -> None:
    with_letters(place)
    assert replayed(place.sink(), judging(lambda one: one.offset % 2 == 0), limit) == (3, 3)
    assert place.ids() == [0, 1, 2, 4, 5, 6, 8]
    assert place.letters() == [("t", 0, 3), ("t", 0, 7), ("t", 0, 9)]
    assert replayed(place.sink(), judging(), limit) == (3, 0)
    assert place.ids() == [*range(10)]
    assert place.letters() == []
    assert replayed(place.sink(), judging()) == (0, 0)


def test_a_replay_beside_a_run(place: DeltaPlace) -> None:
    with_letters(place)

    class Meanwhile(Interrupted):
        pass

    sink, fence = started(place)
    Meanwhile.meanwhile = staticmethod(
        lambda: commit_all(sink, at_t0(10, [*numbered(10, 12), *bad(12)]), fence)
    )
    assert replayed(place.sink(delta=Meanwhile), judging(), 4) == (6, 0)
    assert place.ids() == [*range(12)]
    assert place.letters() == [("t", 0, 12)], "it came later, and waits for the next replay"


def test_two_replays_at_once(place: DeltaPlace) -> None:
    with_letters(place)

    class Meanwhile(Interrupted):
        pass

    done: list[tuple[int, int]] = []
    Meanwhile.meanwhile = staticmethod(lambda: done.append(replayed(place.sink(), judging(), 2)))
    first = replayed(place.sink(delta=Meanwhile), judging(), 2)
    assert (done, first) == ([(6, 0)], (0, 0))
    assert place.ids() == [*range(10)]


def test_a_replay_whose_answer_was_lost(place: DeltaPlace) -> None:
    with_letters(place)

    class Losing(DeltaTables):
        def commit(self, table: Any, change: Any) -> None:
            super().commit(table, change)
            raise Unavailable("no answer")

    odd = judging(lambda one: one.offset % 2 == 1)
    assert replayed(place.sink(delta=Losing), odd, 2) == (3, 3)
    assert place.ids() == [0, 1, 3, 5, 6, 7, 9]
    assert [offset for *_, offset in place.letters()] == [2, 4, 8]


def test_a_reset_after_letters_were_read_voids_them(place: DeltaPlace) -> None:
    with_letters(place)

    class Meanwhile(Interrupted):
        pass

    def put_back() -> None:
        moved = Takeover(SOURCE, lambda: {}, {T0: 0}, reset=lambda _: {T0: 4})
        fence = place.sink().open(moved).fence
        commit_all(Committing(place.sink()).bind(), at_t0(4, numbered(4, 10)), fence)

    Meanwhile.meanwhile = staticmethod(put_back)
    assert replayed(place.sink(delta=Meanwhile), judging(), 500) == (0, 0)
    assert place.ids() == [0, 1, 4, 5, 5, 6, 6, 7, 8, 9]
    assert place.letters() == [("t", 0, 2), ("t", 0, 3)]
    assert replayed(place.sink(), judging()) == (2, 0)


def test_a_dead_letter_keeps_its_record(place: DeltaPlace) -> None:
    sink, fence = started(place)
    headers = [("h", b"\xff"), ("none", None), ("h", b"")]
    record = Rec(3, bad="no JSON", key=None, value=b"\xff\x00", headers=headers)
    commit_all(sink, at_t0(0, [*numbered(0, 3), record]), fence)
    state = sink.ledger.read()
    ((path, count),) = state.document.rejects
    assert count == 1
    assert sink.ledger.letters(path) == [
        Reject(T0, 3, 1_700_000_000_000, None, b"\xff\x00", headers, "decode", "no JSON")
    ]
    os.stat(place.root / "_oncely" / path)


def test_files_are_removed_whatever_their_partition_is(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    sink = place.sink(partition_by=("name",))
    fence = open_sink(sink, {T0: 0}).fence
    values = ["a b", "ü%/x", "plain", "a%20b", "x=y"]
    records = [rec(n, id=n, name=one) for n, one in enumerate(values)]
    commit_all(Committing(sink), chunk({T0: (0, records)}), fence)
    table = sink.tables.load()
    paths = [one.path for one in table.to_pyarrow_dataset().get_fragments()]
    sink.tables.commit(table, Change("another", 1, {}, gone=paths[1:]))
    assert [one.path for one in place.table.to_pyarrow_dataset().get_fragments()] == paths[:1]
    with pytest.raises(InvariantViolation, match="not in the table"):
        sink.tables.commit(place.table, Change("another", 2, {}, gone=["none.parquet"]))
