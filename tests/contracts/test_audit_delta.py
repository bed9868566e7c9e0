"""The audit of Delta tables: a clean one is clean, and damage is named with the commit that did it.

The table is that of the sink; other writers are delta-rs. The source's records are written down.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Field, write_deltalake
from deltalake.schema import ArrayType

from oncely.audit.delta import DeltaGroups, DeltaOffsets, open_delta
from oncely.audit.engine import ByOffset
from oncely.audit.of_pipeline import evidence_of
from oncely.audit.report import Report
from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.config import PipelineSettings, parse
from oncely.core.claim import Fence, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import SourceMismatch, WrongInput
from oncely.kinds.delta.change import DeltaReplay
from oncely.kinds.delta.settings import DeltaSinkSettings
from tests import sinktools
from tests.deltatools import Committing, DeltaPlace, make_place
from tests.groupedtools import Compared, Topic, compare
from tests.replaytools import judging
from tests.sinktools import SCHEMA, T0, T1, Rec, chunk, commit_all, ready, rec

COMMITS, EACH, BAD, HOLE = 3, 8, 2, 5
SOURCE = pa.schema(
    [*SCHEMA, ("kafka_topic", pa.string()), ("kafka_partition", pa.int32()),
     ("kafka_offset", pa.int64())]
)  # fmt: skip


@dataclass
class World:
    """A table with three commits, of two partitions each."""

    place: DeltaPlace
    made: Any
    topic: Topic

    @cached_property
    def _run(self) -> tuple[Any, Fence]:
        return ready(Committing(self.made), {T0: 0, T1: 0})

    @property
    def sink(self) -> Any:
        """Opened by the first use: a copy of the table that nobody writes to has no other run."""
        return self._run[0]

    @cached_property
    def fence(self) -> Fence:
        return self._run[1]

    def records(self, tp: TopicPartition, commit: int) -> list[Rec]:
        found = []
        for n in range(commit * EACH, (commit + 1) * EACH):
            row = rec(n, id=100 * tp.partition + n, name=f"g{n % 2}")
            found.append(Rec(n, bad="no JSON") if (tp, n % EACH) == (T0, BAD) else row)
        return [one for one in found if (tp, one.offset % EACH) != (T1, HOLE)]

    def commit(self, number: int) -> None:
        what = {tp: (number * EACH, self.records(tp, number)) for tp in (T0, T1)}
        commit_all(self.sink, chunk(what), self.fence)

    @property
    def table(self) -> DeltaTable:
        return self.place.table  # type: ignore[no-any-return]

    def settings(self, **more: Any) -> PipelineSettings:
        decode: dict[str, Any] = {"format": "json", "schema": "id BIGINT, name STRING"}
        if more:
            decode["key"] = {"format": "json", "schema": "id BIGINT"}
        return parse(
            {
                "name": self.place.name,
                "source": {"brokers": "none:9092", "topics": ["t"]},
                "decode": decode,
                "sink": {"kind": "delta", "url": self.place.root.as_uri(), **more},
            }
        )

    def evidence(self, *, download: bool = False, **more: Any) -> DeltaGroups | DeltaOffsets:
        settings = self.settings(**more)
        assert isinstance(settings.sink, DeltaSinkSettings)
        return open_delta(settings, download=download)

    def audit(self, *, download: bool = False, **more: Any) -> Compared:
        found = self.evidence(download=download)
        assert isinstance(found, DeltaGroups)
        return compare(found, self.topic, **more)

    def by_offset(self) -> Report:
        found = self.evidence()
        assert isinstance(found, DeltaOffsets)
        return ByOffset("p", found, self.topic, self.topic, 50).run(None)

    def offsets_of(self, *ids: int) -> list[tuple[TopicPartition, int]]:
        return [((T0, T1)[one // 100], one % 100) for one in ids]


def a_world(folder: Path, *, keep_source: bool = False, **form: Any) -> World:
    """A new table below a folder, with its commits."""
    world = _world(make_place(folder), keep_source=keep_source, **form)
    for number in range(COMMITS):
        world.commit(number)
    return world


def _world(place: DeltaPlace, *, keep_source: bool, **form: Any) -> World:
    made = place.sink(SOURCE if keep_source else SCHEMA, **form)
    made = replace(made, form=replace(made.form, keep_source=keep_source))
    world = World(place, made, Topic({}, recipe=str(made.form.recipe)))
    world.topic.records = {
        tp: list(itertools.chain(*(world.records(tp, n) for n in range(COMMITS))))
        for tp in (T0, T1)
    }
    return world


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    return cache(partial(a_world, tmp_path_factory.mktemp("built")))


Copied = Callable[..., World]


@pytest.fixture
def copied(built: Callable[..., World], tmp_path: Path) -> Copied:
    """``copied(keep_source=False)``: the table with its commits, in a folder of the test's own."""

    def copy(*, keep_source: bool = False, **form: Any) -> World:
        place = make_place(tmp_path)
        shutil.copytree(built(keep_source=keep_source, **form).place.root, place.root)
        return _world(place, keep_source=keep_source, **form)

    return copy


@pytest.fixture
def world(copied: Copied) -> World:
    return copied()


RECORDS, HOLES = COMMITS * (2 * EACH - 1), COMMITS


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("form", [{}, {"partition_by": ("name",)}], ids=["plain", "partitioned"])
def test_a_table_without_damage_is_clean(
    copied: Copied, download: bool, form: dict[str, Any]
) -> None:
    world = copied(**form)
    found = world.audit(download=download)
    assert found.is_clean, (found.findings, found.reasons)
    assert (found.records, found.holes, len(found.results)) == (RECORDS, HOLES, COMMITS)


def test_counts_are_compared_without_reading_a_row(world: World) -> None:
    assert world.audit().is_clean
    assert world.topic.asked == []


def test_what_maintenance_rewrites_is_clean(world: World) -> None:
    world.table.optimize.compact()
    world.commit(COMMITS)
    world.topic.records = {
        tp: [*own, *world.records(tp, COMMITS)] for tp, own in world.topic.records.items()
    }
    world.table.create_checkpoint()
    world.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    for download in (False, True):
        found = world.audit(download=download)
        assert found.is_clean, (found.findings, found.reasons)
        assert len(found.results) == 2
        assert download or world.topic.asked == []


def test_rows_of_other_writers_are_no_damage(world: World) -> None:
    other = pa.table({"id": pa.array([900, 901]), "name": pa.array(["x", "y"])})
    write_deltalake(world.table, other, mode="append")
    assert world.audit(download=True).is_clean
    world.table.optimize.compact()  # theirs and ours in one file
    found = world.audit()
    assert found.is_clean, (found.findings, found.reasons)


def test_a_foreign_delete_is_named_with_its_records(world: World) -> None:
    properties = CommitProperties(custom_metadata={"userName": "mallory"})
    world.table.delete("id in (3, 109)", commit_properties=properties)
    found = world.audit()
    assert found.findings == [("lost", tp, at) for tp, at in world.offsets_of(3, 109)]
    version = world.table.version()
    assert f"version {version}, DELETE of 20" in found.details
    assert "userName 'mallory'" in found.details


def test_without_a_recomputation_a_foreign_delete_is_named_with_its_number(world: World) -> None:
    world.table.delete("id in (3, 4)")
    found = world.audit(expected=False)
    assert found.numbers == {"lost": 2}
    assert f"version {world.table.version()}, DELETE" in found.details


def test_a_foreign_update_is_named_with_its_records(world: World) -> None:
    world.table.update(updates={"name": "'x'"}, predicate="id = 104")
    found = world.audit()
    assert found.findings == [("altered", T1, 4)]
    assert "UPDATE" in found.details


def test_a_foreign_overwrite_takes_everything_and_is_named(world: World) -> None:
    write_deltalake(world.table, pa.table({"id": [1], "name": ["a"]}), mode="overwrite")
    found = world.audit(expected=False)
    assert found.numbers == {"lost": RECORDS - COMMITS - 1}
    assert f"version {world.table.version()}, WRITE" in found.details


def test_a_restore_loses_what_was_committed_after_it(world: World) -> None:
    version = world.table.version()
    world.table.restore(version - 1)
    found = world.audit()
    wanted = [("lost", tp, one.offset) for tp in (T0, T1)
              for one in world.records(tp, COMMITS - 1) if not one.bad]  # fmt: skip
    assert found.findings == wanted
    assert "RESTORE" in found.details


def test_a_file_that_is_missing_is_named(world: World) -> None:
    victim = next(world.place.root.glob("t-0-*-b2-*.parquet"), None)
    victim = victim or sorted(world.place.root.glob("*.parquet"))[0]
    lost = [row["id"] for row in pa.parquet.read_table(victim).to_pylist()]
    victim.unlink()
    found = world.audit()
    assert found.findings == [("lost", tp, at) for tp, at in sorted(world.offsets_of(*lost))]
    assert f"{victim.name}: it is missing, and the table still names it" in found.details


@pytest.mark.parametrize("keep_source", [False, True], ids=["by value", "by offset"])
@pytest.mark.parametrize("how", ["cut", "other bytes"])
def test_a_damaged_file_is_named_with_its_records(
    copied: Copied, how: str, keep_source: bool
) -> None:
    world = copied(keep_source=keep_source)
    victim = sorted(world.place.root.glob("*.parquet"))[0]
    lost = [row["id"] for row in pa.parquet.read_table(victim).to_pylist()]
    data = victim.read_bytes()
    victim.write_bytes(data[:-20] if how == "cut" else bytes(len(data)))
    wanted = [("lost", tp, at) for tp, at in sorted(world.offsets_of(*lost))]
    if keep_source:
        report = world.by_offset()
        assert [(one.kind, one.partition, one.offset) for one in report.findings] == wanted
        (told,) = report.limits
        assert told.startswith(f"{victim.name}: ")
        return
    found = world.audit(download=True)
    assert found.findings == wanted
    assert how != "cut" or f"{victim.name}: it has" in found.details


@pytest.mark.parametrize("form", [{}, {"partition_by": ("name",)}], ids=["plain", "partitioned"])
@pytest.mark.parametrize("keep_source", [False, True], ids=["by value", "by offset"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_file_that_was_rewritten_in_place_is_read_with_its_own_size(
    copied: Copied, compression: str, keep_source: bool, form: dict[str, Any]
) -> None:
    world = copied(keep_source=keep_source, **form)
    files = sorted(world.place.root.rglob("*.parquet"))
    victim = next(one for one in files if "_oncely" not in one.parts)
    rows = pa.parquet.ParquetFile(victim).read()
    first = rows.column("id")[0].as_py()

    def rewrite(change: int) -> list[tuple[str, TopicPartition | None, int | None]]:
        ids = [one + change if one == first else one for one in rows.column("id").to_pylist()]
        given = [pa.array(ids, pa.int64()), *rows.drop(["id"]).columns]
        now = pa.table(given, names=["id", *rows.drop(["id"]).column_names])
        pa.parquet.write_table(now, victim, compression=compression, write_page_index=True)
        if keep_source:
            report = world.by_offset()
            assert any(victim.name in one for one in report.limits)
            return [(one.kind, one.partition, one.offset) for one in report.findings]
        found = world.audit(download=True)
        assert victim.name in found.details or any(victim.name in one for one in found.notes)
        return found.findings

    assert rewrite(0) == []
    assert rewrite(5_000) == [("altered", *world.offsets_of(first)[0])]


def test_rows_of_another_writer_in_our_files_may_be_its_own(world: World) -> None:
    again = [row for row in world.place.rows() if row["id"] in (0, 1)]
    write_deltalake(world.table, pa.Table.from_pylist(again, schema=SCHEMA), mode="append")
    world.table.optimize.compact()
    found = world.audit(download=True)
    assert (found.findings, found.is_clean) == ([], False)


def test_a_replayed_dead_letter_has_its_row(world: World) -> None:
    sink = world.sink.inner
    replay(DeltaReplay(sink), judging(lambda one: one.offset == BAD), Backoff(0.01, 0.1, 10), 100)
    world.topic.records = {
        **world.topic.records,
        T0: [Rec(BAD, ({"id": BAD, "name": "again"},)) if one.offset == BAD else one
             for one in world.topic.records[T0]],
    }  # fmt: skip
    for download in (False, True):
        found = world.audit(download=download)
        assert found.is_clean, (found.findings, found.reasons)


def test_commits_that_the_log_has_lost_are_undecided(world: World) -> None:
    world.table.create_checkpoint()
    for one in (world.place.root / "_delta_log").glob("*.json"):
        if int(one.stem) <= 2:
            one.unlink()
    found = world.audit()
    assert found.findings == []
    assert "no longer contains the commits" in found.reasons


def test_a_commit_meanwhile_changes_nothing(world: World) -> None:
    evidence = world.evidence()
    assert isinstance(evidence, DeltaGroups)
    world.commit(COMMITS)
    found = compare(evidence, world.topic)
    assert (found.is_clean, found.records) == (True, RECORDS)


def test_upserts_without_offsets_are_refused(world: World) -> None:
    with pytest.raises(WrongInput, match="the rows of an upsert can't be told apart"):
        evidence_of(world.settings(mode="upsert", keys=["id"]))


def test_a_table_in_which_the_pipeline_never_ran_is_refused(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    write_deltalake(place.root, pa.table({"id": [1], "name": ["a"]}))
    world = World(place, None, Topic({}))
    with pytest.raises(SourceMismatch, match="nothing of pipeline 'p'"):
        world.evidence()


# -- rows with their offsets -----------------------------------------------------------------


def test_with_offsets_a_table_without_damage_is_clean(copied: Copied) -> None:
    report = copied(keep_source=True).by_offset()
    assert report.verdict == "clean", report.as_json()
    assert (report.proof, report.records, report.holes) == ("offsets", RECORDS, HOLES)


def test_with_offsets_a_replayed_dead_letter_has_its_row(copied: Copied) -> None:
    world = copied(keep_source=True)
    judge = judging(lambda one: one.offset == BAD)
    replay(DeltaReplay(world.sink.inner), judge, Backoff(0.01, 0.1, 10), 100)
    report = world.by_offset()
    assert report.verdict == "clean", report.as_json()


def test_with_offsets_an_altered_row_is_named(copied: Copied) -> None:
    world = copied(keep_source=True)
    world.table.update(updates={"name": "'x'"}, predicate="id = 104")
    (found,) = world.by_offset().findings
    assert (found.kind, found.partition, found.offset) == ("altered", T1, 4)


def test_with_offsets_a_dead_letter_that_differs_from_its_record_is_named(copied: Copied) -> None:
    world = copied(keep_source=True)
    world.topic.change(T0, BAD, value=b"other", headers=[("h", b"1")])
    (found,) = world.by_offset().findings
    assert (found.kind, found.partition, found.offset) == ("altered", T0, BAD)
    assert found.detail == "its dead letter has another value and headers"


def test_with_offsets_values_that_no_digest_covers_are_unknown_after_other_writers(
    copied: Copied,
) -> None:
    world = copied(keep_source=True)
    world.table.alter.add_columns([Field("tags", ArrayType("string", contains_null=True))])
    report = world.by_offset()
    assert (report.verdict, report.limits[-1]) == ("clean", "no digest covers tags")
    world.table.update(updates={"tags": "make_array('x')"}, predicate="id = 104")
    report = world.by_offset()
    assert (report.verdict, report.found) == ("unknown", {})
    assert "no digest covers tags" in report.undecided[0].reason


def test_with_offsets_each_damage_is_named_without_a_recomputation(copied: Copied) -> None:
    world = copied(keep_source=True)
    again = [row for row in world.place.rows() if row["id"] == 101]
    world.table.delete("id = 3")
    beyond = {**again[0], "kafka_offset": COMMITS * EACH + 4}
    rows = pa.Table.from_pylist([*again, beyond], schema=SOURCE)
    write_deltalake(world.table, rows, mode="append")
    found = [(one.kind, one.partition, one.offset) for one in world.by_offset().findings]
    assert sorted(found) == [
        ("duplicated", T1, 1), ("lost", T0, 3), ("unexpected", T1, COMMITS * EACH + 4)]  # fmt: skip


@pytest.mark.parametrize("totals", [True, False])
def test_with_offsets_rows_of_commits_that_the_log_has_lost_are_no_damage(
    copied: Copied, totals: bool
) -> None:
    world = copied(keep_source=True)
    world.table.create_checkpoint()
    for one in (world.place.root / "_delta_log").glob("*.json"):
        if int(one.stem) <= 2:
            one.unlink()
    if not totals:  # as after a reset: they begin anew
        (path,) = (world.place.root / "_oncely" / "ledger-p").glob(
            f"{world.table.transaction_version('oncely/p')}.json"
        )
        path.write_text(json.dumps({**json.loads(path.read_text()), "totals": {}}))
    report = world.by_offset()
    assert (report.verdict, report.found) == ("clean" if totals else "unknown", {})
    assert report.records == (RECORDS if totals else RECORDS - 2 * EACH + 1)
    assert len(report.undecided) == (0 if totals else 2)
    world.table.delete("id = 1")
    assert world.by_offset().found == ({"lost": 1} if totals else {})


@pytest.mark.parametrize("keep_source", [False, True])
def test_records_that_a_reset_passed_over_are_not_lost(copied: Copied, keep_source: bool) -> None:
    world = copied(keep_source=keep_source)
    to = (COMMITS + 1) * EACH
    world.sink.inner.open(Takeover(sinktools.SOURCE, dict, {}, reset=lambda _: {T0: to}))
    world.fence = world.sink.inner.open(Takeover(sinktools.SOURCE, dict, {})).fence
    more = [*world.records(T0, COMMITS), *world.records(T0, COMMITS + 1)]
    world.topic.records = {**world.topic.records, T0: [*world.topic.records[T0], *more]}
    commit_all(world.sink, chunk({T0: (to, world.records(T0, COMMITS + 1))}), world.fence)
    if keep_source:
        report = world.by_offset()
        assert (report.verdict, report.found) == ("clean", {}), report.as_json()
        assert any("[24, 32) was passed over by a reset" in one for one in report.limits)
    else:
        assert world.audit().is_clean
