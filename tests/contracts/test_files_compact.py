"""Compaction: the same rows in fewer files, by one transaction, whatever happens in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.commit.backoff import Backoff
from oncely.errors import Stopped, Unavailable
from oncely.kafka.client import make
from oncely.kinds.data_file import SourceRange, decoded
from oncely.kinds.files.compact import compact
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.table import rows
from oncely.kinds.files.verify import verify
from oncely.testing.servers.kafka import Broker
from tests.laketools import COLUMNS, T0, Lake, events, lake

Hook = Callable[[Any], None]


class Hooked:
    """A producer; a hook may stand before or after each of its calls."""

    def __init__(self, producer: Any, hooks: Mapping[str, Hook]) -> None:
        self._producer, self._hooks = producer, hooks

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._producer, name)
        before, after = self._hooks.get(f"before {name}"), self._hooks.get(f"after {name}")
        if before is None and after is None:
            return inner

        def call(*given: Any, **named: Any) -> Any:
            if before is not None:
                before(self._producer)
            found = inner(*given, **named)
            if after is not None:
                after(self._producer)
            return found

        return call


def hooked(own: Lake, **hooks: Hook) -> Lake:
    """The lake with hooks, as ``before_commit_transaction=...``, in a compaction's producers."""
    named = {key.replace("_", " ", 1): hook for key, hook in hooks.items()}

    def connect(kind: Any, brokers: str, kafka: Any, error_state: Any, **config: Any) -> Any:
        made = make(kind, brokers, kafka, error_state, **config)
        return Hooked(made, named) if "transactional.id" in config else made

    return own.with_(pipeline_topics=replace(own.table.pipeline_topics, connect=connect))


class Once:
    """Does it the first time only."""

    def __init__(self, what: Hook) -> None:
        self.what, self.times = what, 0

    def __call__(self, producer: Any) -> None:
        self.times += 1
        if self.times == 1:
            self.what(producer)


def lost(_: Any) -> None:
    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


@pytest.fixture
def own(broker: Broker, tmp_path: Path) -> Lake:
    return lake(broker, tmp_path)


@pytest.fixture
def small(own: Lake) -> Lake:
    return five_batches(own)


def five_batches(own: Lake) -> Lake:
    """Five batches of two users, and some rows without one."""
    for i in range(5):
        own.batch_of(events("ann", i * 10, 3), events("bob", i * 10 + 3, 2))
    own.batch_of(events(None, 90, 1))
    return own


def named(own: Lake) -> Contents:
    with own.topics.reader() as reader:
        return reader.settled()


def as_published(own: Lake) -> None:
    """The same rows as before, in order within a user, and nothing wrong with the files."""
    named(own)
    _, parts = rows(own.table)
    found = [row for part in parts for row in part.to_pylist()]
    for user in {row["user"] for row in own.rows}:
        assert [r for r in found if r["user"] == user] == [r for r in own.rows if r["user"] == user]
    assert len(found) == len(own.rows)
    assert verify(own.table).problems == ()


@pytest.mark.parametrize("form", ["avro", "parquet"])
def test_small_files_become_one(small: Lake, form: str) -> None:
    before = named(small).files
    would = compact(small.table, dry_run=True)
    assert (would.inputs, would.outputs, would.rows, would.files) == (10, 2, 25, 3)
    assert named(small).files == before

    seen: list[tuple[int, int]] = []
    done = compact(small.with_(format=form).table, progress=lambda *at: seen.append(at))
    assert done.as_json() | {"bytes_before": 0, "bytes_after": 0} == {
        "dry_run": False, "inputs": 10, "outputs": 2, "rows": 25, "bytes_before": 0,
        "bytes_after": 0, "dropped": 0, "files": 3, "kept": 0,
    }  # fmt: skip
    assert seen == [(10, 10)]
    after = named(small)
    assert len(after.files) == 3
    assert set(after.removed) >= {p for p in before if p not in after.files}
    made = {f.partition["user"]: f for f in after.files.values() if f.replaces}
    assert made["ann"].ranges == [SourceRange("events", 0, i * 5, i * 5 + 3) for i in range(5)]
    assert (
        made["ann"].event_time
        == before[made["ann"].replaces[0]].event_time[:1]
        + (before[made["ann"].replaces[-1]].event_time[1:])
    )
    assert made["ann"].path.endswith(form)
    assert set(before) <= small.paths()  # for readers that are under way
    as_published(small)
    assert compact(small.table).outputs == 0


def test_a_compaction_of_compactions(small: Lake) -> None:
    compact(small.table)
    small.batch_of(events("ann", 100, 2))
    done = compact(small.table)
    assert (done.inputs, done.outputs) == (2, 1)
    as_published(small)


def test_files_take_the_published_columns(own: Lake) -> None:
    wide = pa.schema([*COLUMNS, ("more", pa.float64())])
    own.batch_of(events("ann", 0, 1))
    own.publish([own.file([{**events("ann", 1, 1)[0], "more": 1.5}], wide)], [wide])
    assert compact(own.table).outputs == 1
    named(own)
    _, parts = rows(own.table)
    assert [row["more"] for part in parts for row in part.to_pylist()] == [None, 1.5]
    assert verify(own.table).problems == ()


def test_large_files_stay_and_outputs_are_bounded(small: Lake) -> None:
    size = max(file.bytes for file in named(small).files.values())
    assert compact(small.with_(target_file_size=size).table, dry_run=True).inputs == 0
    done = compact(small.with_(target_file_size=size * 2 + 10).table)
    assert (done.inputs, done.outputs) == (8, 4)
    as_published(small)


def test_what_a_reset_reads_again_stays_apart(own: Lake) -> None:
    own.batch_of(events("ann", 0, 3), start=0)
    own.batch_of(events("ann", 3, 3), start=3)
    own.epoch = 2
    own.register(resets={2: 0})
    own.batch_of(events("ann", 0, 3), start=0)
    own.batch_of(events("ann", 3, 3), start=3)
    done = compact(own.table)
    assert (done.inputs, done.outputs) == (4, 2)
    assert verify(own.table).problems == ()


def test_one_that_was_quicker(small: Lake) -> None:
    """Planned and written before another compaction has published: dropped, and deleted."""
    late = hooked(small, before_init_transactions=Once(lambda _: compact(small.table)))
    done = compact(late.table)
    assert (done.outputs, done.inputs, done.dropped) == (0, 0, 10)
    files = named(small).files
    assert small.paths() - set(files) == {p for f in files.values() for p in f.replaces}
    as_published(small)


def test_a_rival_between_reading_and_commit(small: Lake) -> None:
    """The rival's init fences ours: it publishes, we see that and drop ours."""
    late = hooked(small, before_commit_transaction=Once(lambda _: compact(small.table)))
    done = compact(late.table)
    assert (done.outputs, done.dropped) == (0, 10)
    as_published(small)


def test_a_commit_whose_answer_is_lost(small: Lake) -> None:
    done = compact(hooked(small, after_commit_transaction=Once(lost)).table)
    assert (done.inputs, done.outputs) == (10, 2)
    as_published(small)


def test_an_answer_is_lost_and_the_outputs_are_replaced_meanwhile(small: Lake) -> None:
    """Readers may have found the outputs: they are the vacuum's, as all that was replaced."""

    def replaced_and_lost(producer: Any) -> None:
        small.batch_of(events("ann", 100, 2), events("bob", 110, 2))
        assert compact(small.table).inputs == 4
        lost(producer)

    done = compact(hooked(small, after_commit_transaction=Once(replaced_and_lost)).table)
    assert (done.inputs, done.outputs, done.dropped) == (10, 2, 0)
    assert set(named(small).removed) <= small.paths()
    as_published(small)


def test_a_commit_that_never_arrives(small: Lake) -> None:
    hook = Once(lost)
    done = compact(hooked(small, before_commit_transaction=hook).table)
    assert (done.inputs, done.outputs, hook.times) == (10, 2, 2)
    as_published(small)


def test_it_gives_up(small: Lake) -> None:
    with pytest.raises(Unavailable):
        compact(
            hooked(small, before_commit_transaction=lost).table,
            patience=Backoff(0.01, 0.1, 0.3, clock=lambda: 0.0),
        )
    # The last try left a transaction open; the next compaction ends it.
    assert compact(small.table).outputs == 2
    as_published(small)


def test_what_was_written_too_long_ago_is_not_published(small: Lake) -> None:
    """A vacuum may have taken it."""
    before = named(small).files
    with pytest.raises(Stopped, match="longer than"):
        compact(small.with_(max_staging_age=-1.0).table)
    assert named(small).files == before
    as_published(small)


def test_while_the_pipeline_publishes(small: Lake) -> None:
    """A transaction of the pipeline's is waited for, and keeps its files."""
    ended = threading.Event()
    with small.topics.transaction() as producer:
        rows_ = events("ann", 200, 1)
        small.topics.send(producer, [small.file(rows_)])
        threading.Thread(target=lambda: (compact(small.table), ended.set())).start()
        assert not ended.wait(1)
        producer.commit_transaction(120)
        small.rows += rows_
        assert ended.wait(180)
    assert len(named(small).files) == 4
    as_published(small)


def test_many_files_whose_names_fill_more_than_a_message(broker: Broker, tmp_path: Path) -> None:
    own = lake(broker, tmp_path)
    admin_config = {"max.message.bytes": "3000"}
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    entries = [ConfigEntry(k, v, incremental_operation=AlterConfigOpType.SET)
               for k, v in admin_config.items()]  # fmt: skip
    resource = ConfigResource(ResourceType.TOPIC, own.topics.manifest, incremental_configs=entries)
    admin = broker.admin()
    admin.incremental_alter_configs([resource])[resource].result(120)
    for i in range(30):
        own.batch_of(events("ann", i, 1))
    done = compact(own.table)
    assert 3 <= done.outputs < 10
    as_published(own)


@pytest.mark.parametrize("form", ["avro", "parquet"])
def test_no_number_is_rounded(own: Lake, form: str) -> None:
    """Files from before their column became a DOUBLE, with a number that no DOUBLE equals."""
    long, double = (pa.schema([*COLUMNS, ("n", one)]) for one in (pa.int64(), pa.float64()))

    def row(number: float) -> dict[str, Any]:
        return {"id": 1, "user": "ann", "ts": T0, "n": number}

    own.publish([own.file([row(2**53 + 1)], long, form=form)], [long])
    own.publish([own.file([row(7)], long, form=form)], [long])
    own.publish([own.file([row(1.5)], double, form=form)], [double])
    (kept, *_) = named(own).files
    done = compact(own.table)
    assert (done.inputs, done.outputs, done.kept) == (2, 1, 1)
    after = named(own).files
    assert kept in after
    assert len(after) == 2
    assert pq_or_avro(own, kept)["n"] == [2**53 + 1]
    assert compact(own.table).outputs == 0
    found = verify(own.table)
    assert [problem.path for problem in found.problems] == [kept]
    assert "does not fit DOUBLE" in found.problems[0].text


def pq_or_avro(own: Lake, path: str) -> dict[str, list[Any]]:
    form: Any = path.rpartition(".")[2]
    held: dict[str, list[Any]] = decoded((own.root / path).read_bytes(), form).to_pydict()
    return held
