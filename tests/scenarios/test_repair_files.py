"""`oncely repair` and `oncely backfill` of files: each kind of damage, rivals, and kills.

Records are committed by the pipeline's sink, as its tasks do, without Spark.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from oncely.audit import Report, audit
from oncely.audit.stored.manifest import rows_of
from oncely.config import parse
from oncely.core.ranges import OffsetRange
from oncely.errors import WrongInput
from oncely.kafka.reset import Verb
from oncely.kinds.data_file import read_receipt
from oncely.kinds.files.compact import compact
from oncely.kinds.files.manifest import Contents, Replacing
from oncely.kinds.files.table import table_of
from oncely.kinds.files.verify import verify
from oncely.pipeline import Pipeline
from oncely.pipeline.repair import LOST_FOR_GOOD, Repaired
from oncely.stores.objects.store import Store
from oncely.testing.servers.kafka import Broker
from tests.scenarios import repair_jobs
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.test_audit_sinks import SinkWorld, world_of
from tests.scenarios.zygote import Zygote
from tests.sinktools import Rec, chunk

__all__ = ["world_of"]

SAME_FILES = "the topic no longer has all records whose rows are in the same files"
IDS = sorted([*range(20), *range(100, 110)])


@pytest.fixture
def world(world_of: Callable[[str], SinkWorld]) -> SinkWorld:
    """Four commits: two of partition 0, the second one with a reject, and two of partition 1."""
    return world_of("files")


def store_of(world: SinkWorld) -> Store:
    return world.pipeline.settings.sink.store  # type: ignore[union-attr]


def contents(world: SinkWorld) -> Contents:
    with table_of(world.pipeline).manifest() as manifest:
        return manifest.settled()


def ids(world: SinkWorld) -> list[int]:
    """What the named files contain."""
    store = store_of(world)
    every = [rows_of(store.read(one.path), one.format) for one in contents(world).files.values()]
    return sorted(n for rows in every for n in rows["id"].to_pylist())


def named(world: SinkWorld, partition: int) -> list[str]:
    return sorted(
        path for path in contents(world).files if path.startswith(f"{world.topic}-{partition}-")
    )


def say(world: SinkWorld, path: str, value: Any) -> None:
    """Write to the manifest, as another program."""
    producer = Producer({"bootstrap.servers": world.brokers, "log_level": 0})
    data = None if value is None else msgspec.json.encode(value)
    producer.produce(f"{world.name}.manifest", data, path, partition=0)
    assert producer.flush(20) == 0


def copied(world: SinkWorld, path: str, name: str, **changes: Any) -> None:
    """A file under another name, with an entry of its own."""
    store, entry = store_of(world), msgspec.to_builtins(contents(world).files[path])
    store.write(name, store.read(path))
    say(world, name, {**entry, "kind": "file", "path": name, **changes})


def repair(world: SinkWorld, report: Report, *, execute: bool = True) -> Repaired:
    return world.pipeline.repair(report.findings, execute=execute)


def assert_whole(world: SinkWorld) -> None:
    report = world.audit(download=True)
    assert report.verdict == "clean", report.as_json()
    assert ids(world) == IDS
    checked = verify(table_of(world.pipeline))
    assert checked.problems == ()


def damage(world: SinkWorld) -> Counter[str]:
    """A file of partition 1 is deleted; of partition 0 one is truncated, and one named twice; and
    a file beyond the position."""
    store, (first, second) = store_of(world), named(world, 0)
    deleted = named(world, 1)[0]
    store.delete([deleted])
    copied(world, first, "copy.avro")
    beyond = [[world.topic, 0, 900, 909]]
    copied(world, first, "beyond.avro", ranges=beyond)
    half = store.read(second)[:-20]
    store.delete([second])
    store.write(second, half)
    return Counter(lost=5 + 10, duplicated=10, unexpected=1)


def test_files_are_repaired_to_clean_beside_a_run(world: SinkWorld) -> None:
    whole = named(world, 1)[1]
    wanted = damage(world)
    report = world.audit(download=True)
    assert Counter(one.kind for one in report.findings) == wanted
    plan = repair(world, report, execute=False)
    assert (plan.offsets, plan.files, plan.executed) == (dict(wanted), 5, False)
    assert world.audit(download=True).found == report.found  # a dry run writes nothing
    shown = oncely_json("repair", world.file(), "--execute", expect=0)
    assert shown["audit"]["verdict"] == "clean"
    assert (shown["files"], shown["impossible"]) == (5, [])
    assert_whole(world)
    assert repair(world, report).impossible == ()  # the same findings again
    assert_whole(world)
    assert whole in contents(world).files
    world.publish(range(300, 301))
    world.run()  # with the fence that it had
    assert ids(world) == [*IDS, 300]
    assert world.audit().verdict == "clean"


def test_rows_of_no_record_and_dropped_entries(world: SinkWorld) -> None:
    first, second = named(world, 1)
    rows = chunk({world.tp(1): (0, [Rec(n, ({"id": 900 + n, "name": "x"},)) for n in range(5)])})
    task = world.sink.staging(world.fence, 99, 0)
    task.add(rows)
    (made,) = read_receipt(str(task.finish().name)).files
    entry = msgspec.to_builtins(contents(world).files[first])
    changed = {"path": made.path, "bytes": made.bytes, "sha256": made.sha256, "rows": made.rows}
    say(world, made.path, {**entry, "kind": "file", **changed})  # rows of no record
    say(world, second, None)
    report = world.audit(download=True)
    assert Counter(one.kind for one in report.findings) == {"duplicated": 1, "lost": 5}
    assert repair(world, report).impossible == ()
    assert_whole(world)


def test_a_lost_dead_letter_is_written_again_once(world: SinkWorld, broker: Broker) -> None:
    broker.delete_records(f"{world.name}.rejects", dict.fromkeys(range(1), 1))
    report = world.audit()
    assert Counter(one.kind for one in report.findings) == {"lost": 1}
    for _ in range(2):
        assert repair(world, report).impossible == ()
        assert_whole(world)
        assert len(world.pipeline.rejects(10).listed) == 1


def test_what_the_topic_no_longer_has_is_told(world: SinkWorld, broker: Broker) -> None:
    store_of(world).delete(named(world, 0)[:1])
    broker.delete_records(world.topic, {0: 3})
    before, report = contents(world).files, world.audit()
    done = repair(world, report)
    assert {one.reason for one in done.impossible} <= {
        LOST_FOR_GOOD, f"{world.tp(0)}: {SAME_FILES}"
    }  # fmt: skip
    assert done.impossible
    assert contents(world).files == before


# -- races ----------------------------------------------------------------------------------------


@contextmanager
def at_the_comparison(monkeypatch: pytest.MonkeyPatch, rival: Callable[[], None]) -> Iterator[None]:
    """The rival acts when the new files are written, and nothing is compared yet."""
    compared, acted = Replacing.compared, []

    def late(self: Replacing, *args: Any) -> Any:
        if args and not acted:  # the transaction that names them contains dead letters, too
            acted.append(True)
            rival()
        return compared(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Replacing, "compared", late)
        yield
    assert acted


def _again(world: SinkWorld) -> None:
    again = SinkWorld(world.brokers, world.topic, world.given, world.folder, world.name)
    repair(again, again.audit())


def _reset(world: SinkWorld) -> None:
    """All is read again; the files from before are void."""
    world.pipeline.reset(Verb("to-earliest", 0), execute=True)
    del world.fence
    del world.sink
    world.run()


RIVALS = {
    "a compaction": lambda world: compact(table_of(world.pipeline)),
    "another repair": _again,
    "a reset": _reset,
}


def test_a_file_beyond_the_position_whose_rows_are_those_of_its_records(world: SinkWorld) -> None:
    """As if the ledger had lost its last commit; beside it a file with rows of other records."""
    first, second = named(world, 1)
    world.publish(range(100, 105), partition=1)
    world.publish(range(200, 205), partition=1)
    copied(world, first, "right.avro", ranges=[[world.topic, 1, 10, 15]])
    copied(world, second, "wrong.avro", ranges=[[world.topic, 1, 15, 20]])
    report = world.audit()
    assert [(one.kind, one.file) for one in report.findings] == [("unexpected", "wrong.avro")]
    (left,) = report.undecided
    assert (left.partition, left.range) == (world.tp(1), OffsetRange(10, 15))
    assert "the ledger was changed" in left.reason.lower()
    oncely_json("repair", world.file(), "--execute", expect=4)
    assert "right.avro" in contents(world).files
    assert "wrong.avro" not in contents(world).files


def test_a_file_of_another_pipeline_stays_in_the_manifest(world: SinkWorld) -> None:
    first = named(world, 1)[0]
    copied(world, first, "theirs.avro", pipeline="other")
    copied(world, first, "beyond.avro", pipeline="other", ranges=[[world.topic, 0, 900, 909]])
    copied(world, first, "ours.avro", ranges=[[world.topic, 0, 900, 909]])
    before, report = {*contents(world).files}, world.audit()
    found = {one.file: one.detail for one in report.findings}
    assert found.keys() == {"theirs.avro", "beyond.avro", "ours.avro"}
    assert "pipeline 'other'" in found["theirs.avro"]
    plan = repair(world, report, execute=False)
    assert (plan.files, plan.offsets, plan.removes) == (1, {"unexpected": 1}, {"rows": 5})
    shown = oncely_json("repair", world.file(), "--execute", expect=1)
    assert {one["reason"] for one in shown["impossible"]} == {
        f"{name}.avro is a file of pipeline 'other': a repair leaves it"
        for name in ("theirs", "beyond")
    }
    assert {*contents(world).files} == before - {"ours.avro"}


def test_more_rows_than_allowed_stay_in_the_manifest(world: SinkWorld) -> None:
    copied(world, named(world, 1)[0], "beyond.avro", ranges=[[world.topic, 0, 900, 909]])
    refused = oncely("repair", world.file(), "--execute", "--max-removed", 4, expect=2)
    assert "it removes 5 rows" in refused.stderr
    assert "beyond.avro" in contents(world).files


@pytest.mark.parametrize(
    "rival",
    ["a compaction", *(pytest.param(r, marks=pytest.mark.long) for r in list(RIVALS)[1:])],
)
def test_beside_a_rival(world: SinkWorld, rival: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = named(world, 1)
    say(world, second, None)
    copied(world, first, "copy.avro")
    report = world.audit()
    with at_the_comparison(monkeypatch, lambda: RIVALS[rival](world)):
        repair(world, report)
    if rival == "a reset":  # what was written before is void, and stays as it was
        assert world.audit().verdict == "clean"
        assert ids(world) == sorted([*IDS, *range(20), *range(100, 105), *range(100, 105)])
        return
    assert_whole(world)


# -- kills ----------------------------------------------------------------------------------------

# The transaction that removes the file beyond the position comes first.
STEPS = {"write": 1, "init_transactions": 2, "produce": 4, "flush": 2, "commit_transaction": 2}
FAST = ("commit_transaction", "before")


@pytest.mark.parametrize(
    ("call", "when"),
    [
        pytest.param(call, when, marks=() if (call, when) == FAST else pytest.mark.long)
        for call in STEPS
        for when in ("before", "after")
    ],
)
def test_killed_and_repeated(world: SinkWorld, zygote: Zygote, call: str, when: str) -> None:
    damage(world)
    report = world.audit()
    found = report.findings
    told = [(one.partition, one.offset, one.kind, one.within, one.file) for one in found]
    ended = zygote.run(repair_jobs.repair_files, world.settings, told, STEPS[call], call, when)
    assert ended.signal == signal.SIGKILL, ended.error
    again = repair(world, report)
    assert again.impossible == ()
    assert_whole(world)


# -- backfill -------------------------------------------------------------------------------------


def test_a_backfill_replaces_whole_files(world: SinkWorld) -> None:
    sql = {"sql": "SELECT id + 1000 AS id, name FROM input WHERE id % 2 = 0"}
    today = Pipeline(parse({**world.settings, "transform": sql}))
    wanted = {world.tp(0): OffsetRange(0, 3)}
    plan = today.backfill(wanted)
    (whole,) = plan.ranges.values()
    assert (whole.start, whole.end, plan.files) == (0, whole.end, 1)
    assert ids(world) == IDS
    today.backfill(wanted, execute=True)
    inside = [n for n in range(20) if n < 10]
    now = sorted([*(n + 1000 for n in inside if n % 2 == 0), *(n for n in IDS if n not in inside)])
    assert ids(world) == now
    assert audit(today).found == {}
    with pytest.raises(WrongInput, match="no such partition"):
        today.backfill({world.tp(7): OffsetRange(0, 3)})
