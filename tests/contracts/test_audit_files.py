"""The audit of files: a clean table is clean, and each kind of damage is found and named.

The manifest, the ledger and the files are those of the sink; the source's records are written down.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from confluent_kafka import Producer

from oncely.audit.files import FilesEvidence, open_files
from oncely.config import parse
from oncely.core.batch import Batch, Reject
from oncely.core.claim import Counts, Fence, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kinds.files.compact import compact
from oncely.kinds.files.settings import FilesSinkSettings
from oncely.kinds.files.sink import FilesSink
from oncely.testing.servers.kafka import Broker
from tests import filestools
from tests.filestools import FilesPlace
from tests.groupedtools import Compared, Topic, compare
from tests.kafkatools import SHARED_LEDGER
from tests.sinktools import SOURCE, T0, T1, Rec, chunk

BATCHES, EACH, GROUPS = 2, 12, 2
BAD = 5  # the record of each batch of t-0 that can't be decoded
HOLE = 7  # an offset of each batch of t-1 without a record


def _records(tp: Any, batch: int) -> list[Rec]:
    start = batch * EACH
    every = [
        Rec(n, ({"id": 1000 * tp.partition + n, "name": f"g{n % GROUPS}"},))
        for n in range(start, start + EACH)
    ]
    if tp == T0:
        every[BAD] = Rec(start + BAD, bad="no JSON")
    else:
        del every[HOLE]
    return every


@dataclass
class World:
    """A table with two batches."""

    place: FilesPlace
    sink: FilesSink
    fence: Fence
    topic: Topic

    def publish(self, batch: int) -> None:
        self.sink.begin_batch()
        start, staged = batch * EACH, []
        ranges = {tp: OffsetRange(start, start + EACH) for tp in (T0, T1)}
        for attempt, tp in enumerate(ranges):
            task = self.sink.staging(self.fence, batch, attempt)
            task.add(chunk({tp: (start, _records(tp, batch))}))
            staged.append(task.finish())
        counts = {T0: Counts(EACH, EACH - 1, 1, 0), T1: Counts(EACH - 1, EACH - 1, 0, 0)}
        bad = Reject(T0, start + BAD, None, b"k", b"{", [], "decode", "no JSON")
        filestools.publish_all(self.sink, Batch(ranges, counts, [bad], staged), self.fence)

    def evidence(self, *, download: bool = False) -> FilesEvidence:
        settings = parse(
            {
                "name": self.place.name,
                "source": {"brokers": self.place.bootstrap, "topics": ["t", "u"]},
                "decode": {"format": "json", "schema": "id BIGINT, name STRING"},
                "sink": {
                    "kind": "files",
                    "url": self.place.root.as_uri(),
                    "partition_by": ["name"],
                    "manifest_topic": f"{self.place.name}.manifest",
                    "ledger_topic": SHARED_LEDGER,
                },
            }
        )
        assert isinstance(settings.sink, FilesSinkSettings)
        return open_files(settings, download=download)

    def audit(self, *, download: bool = False, **more: Any) -> Compared:
        return compare(self.evidence(download=download), self.topic, **more)

    def files(self, batch: int = 1) -> list[Path]:
        return sorted(self.place.root.rglob(f"*-b{batch}-*.avro"))

    def say(self, key: str, value: Any) -> None:
        """Write to the manifest, as another program."""
        producer = Producer({"bootstrap.servers": self.place.bootstrap, "log_level": 0})
        data = None if value is None else msgspec.json.encode(value)
        producer.produce(f"{self.place.name}.manifest", data, key, partition=0)
        assert producer.flush(120) == 0

    def entry(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.place.root))
        found = self.sink.manifest.settled().files[name]
        return msgspec.to_builtins(found)  # type: ignore[no-any-return]


@contextmanager
def _world(broker: Broker, folder: Path) -> Iterator[World]:
    place = filestools.make_place(broker, folder, SHARED_LEDGER)
    sink = place.sink()
    fence = filestools.open_sink(sink).fence
    found = World(place, sink, fence, Topic(_records_of(range(BATCHES))))
    for batch in range(BATCHES):
        found.publish(batch)
    yield found
    sink.close()


def _records_of(batches: range) -> dict[TopicPartition, list[Rec]]:
    return {tp: [r for b in batches for r in _records(tp, b)] for tp in (T0, T1)}


@pytest.fixture(scope="module")
def built(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with _world(broker, tmp_path_factory.mktemp("built")) as found:
        yield found


@pytest.fixture
def world(built: World, tmp_path: Path) -> Iterator[World]:
    """The test may change its files, which are put back, and the records of its source."""
    root, kept = built.place.root, tmp_path / "kept"
    shutil.copytree(root, kept)
    yield replace(built, topic=Topic(_records_of(range(BATCHES))))
    shutil.rmtree(root)
    shutil.move(kept, root)


@pytest.fixture
def alone(broker: Broker, tmp_path: Path) -> Iterator[World]:
    """The same, whose topics the test may change, too."""
    with _world(broker, tmp_path) as found:
        yield found


@pytest.mark.parametrize("download", [False, True])
def test_a_table_without_damage_is_clean(world: World, download: bool) -> None:
    found = world.audit(download=download)
    assert found.is_clean, (found.findings, found.reasons)
    assert (found.records, found.holes) == (BATCHES * (2 * EACH - 1), BATCHES)
    assert len(found.results) == 2 * BATCHES


def test_counts_are_compared_without_reading_a_record(world: World) -> None:
    assert world.audit().is_clean
    assert world.topic.asked == []


def _lost(path: Path, world: World) -> list[Any]:
    """What a file contains: all records of one partition and one group of a batch."""
    entry = world.entry(path)
    ((_, number, start, end),) = entry["ranges"]
    tp = T0 if number == 0 else T1
    return [
        ("lost", tp, one.offset)
        for one in world.topic.records[tp]
        if one.rows
        and start <= one.offset < end
        and one.rows[0]["name"] == entry["partition"]["name"]
    ]


def test_a_deleted_file_is_named_with_its_records(world: World) -> None:
    victim = world.files()[0]
    wanted = _lost(victim, world)
    victim.unlink()
    found = world.audit()
    assert found.findings == wanted != []
    assert f"{victim.relative_to(world.place.root)}: it is missing" in found.details


def test_without_a_recomputation_a_deleted_file_is_named_with_its_number_of_rows(
    world: World,
) -> None:
    victim = world.files()[0]
    wanted = _lost(victim, world)
    victim.unlink()
    found = world.audit(expected=False)
    assert found.numbers == {"lost": len(wanted)}
    assert str(victim.relative_to(world.place.root)) in found.details


def test_a_truncated_file_is_named_with_its_records(world: World) -> None:
    victim = world.files()[1]
    wanted = _lost(victim, world)
    victim.write_bytes(victim.read_bytes()[:-20])
    found = world.audit()
    assert found.findings == wanted != []
    assert "bytes" in found.details


def test_a_file_of_other_content_is_found_by_reading_it(world: World) -> None:
    victim = world.files()[0]
    wanted = [(offset, tp) for _, tp, offset in _lost(victim, world)]
    data = victim.read_bytes()
    other = world.sink.staging(world.fence, 99, 0)
    tp = wanted[0][1]
    changed = [
        Rec(r.offset, ({**r.rows[0], "id": r.rows[0]["id"] + 20},))  # type: ignore[operator]
        for r in world.topic.records[tp] if (r.offset, tp) in wanted
    ]  # fmt: skip
    other.add(chunk({tp: (changed[0].offset, changed)}))
    other.finish()
    (written,) = world.files(99)
    assert len(written.read_bytes()) == len(data)
    victim.write_bytes(written.read_bytes())
    assert world.audit().is_clean  # by counts
    found = world.audit(download=True)
    assert "SHA-256" in found.details
    assert found.findings == [("altered", tp, at) for at, tp in wanted]


def test_a_file_of_other_bytes_and_the_same_rows_is_told_and_is_no_damage(world: World) -> None:
    victim = world.files()[0]
    pl.read_avro(victim).write_avro(victim)  # another marker of blocks
    found = world.audit(download=True)
    assert found.is_clean, (found.findings, found.reasons)
    (note,) = found.notes
    name = str(victim.relative_to(world.place.root))
    assert note.startswith(f"{name}: it")
    assert note.endswith("no record is affected: the rows are those of its records")


def test_a_dropped_entry_is_found_and_its_records_are_named(alone: World) -> None:
    victim = alone.files()[2]
    wanted = _lost(victim, alone)
    alone.say(str(victim.relative_to(alone.place.root)), None)
    assert alone.audit().findings == wanted != []


def test_a_file_whose_rows_are_named_twice_is_found(alone: World) -> None:
    victim = alone.files()[0]
    entry = alone.entry(victim)
    copy = victim.with_name(victim.name.replace("000001.", "000009."))
    copy.write_bytes(victim.read_bytes())
    name = str(copy.relative_to(alone.place.root))
    wanted = [("duplicated", tp, at) for _, tp, at in _lost(victim, alone)]
    alone.say(name, {**entry, "path": name, "kind": "file"})
    found = alone.audit()
    assert found.findings == wanted != []
    assert "2 rows of 1 records" in found.details


def test_a_file_that_nobody_names_is_no_damage(world: World) -> None:
    orphan = world.files()[0]
    orphan.with_name(orphan.name.replace("000001.", "000009.")).write_bytes(orphan.read_bytes())
    (world.place.root / "readme.txt").write_text("of another program")
    assert world.audit(download=True).is_clean


def test_a_file_of_another_pipeline_is_unexpected_if_it_is_below_the_root(alone: World) -> None:
    victim = alone.files()[0]
    entry = alone.entry(victim)
    alone.say("elsewhere.avro", {**entry, "path": "elsewhere.avro", "kind": "file",
                                 "pipeline": "other"})  # fmt: skip
    assert alone.audit().is_clean
    name = "here.avro"
    (alone.place.root / name).write_bytes(victim.read_bytes())
    alone.say(name, {**entry, "path": name, "kind": "file", "pipeline": "other"})
    found = alone.audit()
    assert [kind for kind, *_ in found.findings] == ["unexpected"]
    assert "rows of pipeline 'other', in here.avro" in found.details


def test_a_file_beyond_the_position_is_unexpected(alone: World) -> None:
    victim = alone.files()[0]
    entry = alone.entry(victim)
    name, end = "beyond.avro", BATCHES * EACH
    (alone.place.root / name).write_bytes(victim.read_bytes())
    alone.say(name, {**entry, "path": name, "kind": "file", "ranges": [["t", 0, end, end + 9]]})
    assert alone.audit().findings == [("unexpected", T0, end)]


def test_a_lost_dead_letter_is_a_lost_record(alone: World, broker: Broker) -> None:
    broker.delete_records(f"{alone.place.name}.rejects", {0: 1})
    letters = alone.evidence().snapshot.letters
    found = alone.audit()
    gone = BATCHES - len(letters)
    assert gone > 0
    assert found.findings == [("lost", T0, BAD + EACH * n) for n in range(gone)]


def test_records_that_retention_has_deleted_are_proved_by_the_ledger(world: World) -> None:
    world.topic.first = {T0: EACH + 3, T1: EACH + 3}
    assert world.audit().is_clean
    world.files(0)[0].unlink()
    found = world.audit()
    assert found.numbers == {"lost": 6}
    assert "the topic no longer holds these offsets" in found.reasons


def test_a_record_that_the_pipeline_passed_over_is_lost(world: World) -> None:
    tp, at = T1, EACH + HOLE
    records = sorted(
        [*world.topic.records[tp], Rec(at, ({"id": 7, "name": "g0"},))], key=lambda r: r.offset
    )
    world.topic.records = {**world.topic.records, tp: records}
    assert world.audit().findings == [("lost", T1, at)]


def test_a_compacted_table_is_clean(alone: World) -> None:
    alone.sink.manifest.settled()  # the markers of the last commit are there
    compact(alone.place.table())
    found = alone.audit(download=True)
    assert found.is_clean, (found.findings, found.reasons)
    assert len(found.results) == 1


def test_a_batch_that_commits_meanwhile_changes_nothing(alone: World) -> None:
    evidence = alone.evidence()
    alone.publish(BATCHES)
    found = compare(evidence, alone.topic)
    assert found.is_clean
    assert found.records == BATCHES * (2 * EACH - 1)


def test_records_that_a_reset_passed_over_are_not_lost(alone: World) -> None:
    to = (BATCHES + 1) * EACH
    alone.sink.open(Takeover(SOURCE, dict, {}, reset=lambda _: {T0: to, T1: to}))
    alone.fence = alone.sink.open(Takeover(SOURCE, dict, {})).fence
    alone.topic.records = _records_of(range(BATCHES + 2))
    alone.publish(BATCHES + 1)
    found = alone.audit()
    assert found.is_clean, (found.findings, found.reasons)
