"""The sink for an existing streaming DataFrame.

The query has its own plan and its own checkpoint, so a batch's rows are published by batch commit
and keyed twice: by the checkpoint's id, Spark's batch id and a digest of its plan, and by the Kafka
offsets that the batch read. The first key also covers batches without new data (a watermark that
has moved sends rows with an empty range); the second keeps history and lag tools correct, and shows
if a batch that was planned again has new records.

The checkpoint is on any file system that Spark reaches. The formats of its files are Spark's own:
``OffsetSeqLog`` for ``offsets/N`` and ``KafkaSourceInitialOffsetWriter`` for ``sources/0/0``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.commit.run import Housekeeping
from oncely.core.batch import Batch
from oncely.core.claim import NO_RECORDS, Claim, Entry, Fence, QueryBatch
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import InvariantViolation, OncelyError, WrongInput
from oncely.kinds.base import PacksRows
from oncely.runtimes.spark.batch_commit import HeldRows, arrow_schema
from oncely.runtimes.spark.jobs import is_java, without_stack
from oncely.stores.sql.ledger import SqlLedger
from oncely.stores.sql.statements import Registered
from oncely.stores.sql.takeover import require_held

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_VERSION = "v1"
_NOTHING_YET = "-"


class BatchRanges(NamedTuple):
    """The input of a micro-batch.

    Attributes:
        known: ranges of Kafka's topic-partitions.
        complete: False if there was input that these ranges do not describe: another kind of
            source, or a topic that two sources of the query read, which offsets cannot distinguish.
            Such a query is keyed by checkpoint and batch only.
    """

    known: Mapping[TopicPartition, OffsetRange]
    complete: bool


@dataclass(frozen=True)
class Checkpoint:
    """Reads a streaming query's checkpoint through Hadoop's file system API."""

    session: Any
    location: str

    def query_id(self) -> str:
        """The id of the checkpoint, constant for its lifetime.

        Raises:
            InvariantViolation: Spark has not written it, although a batch runs.
        """
        return str(json.loads(self._read("metadata"))["id"])

    def ranges(self, batch_id: int) -> BatchRanges:
        """The ranges of Kafka offsets that the micro-batch has read; empty ranges are kept."""
        ends = self._sources(batch_id)
        starts = self._sources(batch_id - 1) if batch_id > 0 else [{} for _ in ends]
        ranges: dict[TopicPartition, OffsetRange] = {}
        twice: set[str] = set()
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end is None:
                continue
            twice |= {tp.topic for tp in end} & {tp.topic for tp in ranges}
            before = start or {}
            first = self._initial(number) if end.keys() - before.keys() else {}
            for tp, at in end.items():
                ranges[tp] = OffsetRange(before.get(tp, first.get(tp, 0)), at)
        known = {tp: range_ for tp, range_ in ranges.items() if tp.topic not in twice}
        return BatchRanges(known, complete=not twice and None not in ends)

    def plan(self, batch_id: int) -> str:
        """A digest of the micro-batch's entry in the offset log.

        Spark repeats a batch according to the existing entry. An entry that was lost and written
        again has another time of planning, and so another digest.
        """
        return hashlib.sha256(self._read(f"offsets/{batch_id}").encode()).hexdigest()[:32]

    def _sources(self, batch_id: int) -> list[dict[TopicPartition, Position] | None]:
        """The ends of each source, None for a source that is not Kafka."""
        return parse_offset_log(self._read(f"offsets/{batch_id}"))

    def _initial(self, source: int) -> dict[TopicPartition, Position]:
        return parse_initial_offsets(self._read(f"sources/{source}/0"))

    def _read(self, name: str) -> str:
        jvm = self.session._jvm
        path = jvm.org.apache.hadoop.fs.Path(f"{self.location.rstrip('/')}/{name}")
        files = path.getFileSystem(self.session._jsc.hadoopConfiguration())
        if not files.exists(path):
            raise InvariantViolation(f"the checkpoint {self.location} has no {name}")
        stream = files.open(path)
        try:
            content = jvm.org.apache.commons.io.IOUtils.toByteArray(stream)
        finally:
            stream.close()
        return bytes(content).decode()


def format_offsets(positions: Mapping[TopicPartition, Position]) -> str:
    """Spark's JSON for offsets: ``{"topic": {"0": 23}}``."""
    nested: dict[str, dict[str, int]] = {}
    for tp in sorted(positions):
        nested.setdefault(tp.topic, {})[str(tp.partition)] = positions[tp]
    return json.dumps(nested)


def parse_offset_log(text: str) -> list[dict[TopicPartition, Position] | None]:
    """Parse a file of the checkpoint's ``offsets`` folder: the ends of a micro-batch.

    Returns:
        For each source of the query, in order, the end of each topic-partition; an empty dict for a
            source without data; None for one that is not Kafka, and in a file of another version.
    """
    version, metadata, *sources = text.rstrip("\n").split("\n")
    known = version == _VERSION and metadata.startswith("{")
    return [_offsets(line) if known else None for line in sources]


def parse_initial_offsets(text: str) -> dict[TopicPartition, Position]:
    """Parse the checkpoint's ``sources/0/0``: the start of the query's first micro-batch.

    Spark puts a zero byte before the version, for readers of Spark 2.1 (SPARK-19517).

    Raises:
        InvariantViolation: the text is not such a file.
    """
    version, _, line = text.removeprefix("\0").partition("\n")
    found = _offsets(line) if version == _VERSION else None
    if found is None:
        raise InvariantViolation(f"not a file of initial offsets: {text[:200]!r}")
    return found


def _offsets(line: str) -> dict[TopicPartition, Position] | None:
    """``{"topic": {"0": 23}}`` as positions; None if the text is not an offset of Kafka."""
    if line == _NOTHING_YET:
        return {}
    try:
        return {
            TopicPartition(topic, int(partition)): _natural(offset)
            for topic, partitions in json.loads(line).items()
            for partition, offset in partitions.items()
        }
    except (ValueError, TypeError, AttributeError):
        return None


def _natural(offset: object) -> Position:
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError(offset)
    return offset


_STATEFUL = (
    "Aggregate",
    "Deduplicate",
    "Distinct",
    "GroupsWithState",
    "GroupsInPandasWithState",
    "TransformWithState",
    "Limit",
)


def is_stateful(frame: DataFrame) -> bool:
    """True if the streaming plan keeps state between batches, which only its checkpoint
    contains."""
    pending = [frame._jdf.queryExecution().analyzed()]
    while pending:
        node = pending.pop()
        children = node.children()
        below = [children.apply(i) for i in range(children.length())]
        streams = [child.isStreaming() for child in below]
        name = node.nodeName()
        if any(streams) and any(one in name for one in _STATEFUL):
            return True
        if name == "Join" and all(streams):
            return True
        pending += below
    return False


def row_schema(frame: DataFrame) -> pa.Schema:
    """The columns of a DataFrame as columns of the sink's rows."""
    return arrow_schema(frame.schema)


TopicIds = Callable[[Collection[str]], Mapping[str, str]]
"""The present ids of topics; empty if they cannot be requested."""


class QuerySink(PacksRows, Protocol):
    """A sink whose ledger stores the last batch of a query."""

    @property
    def ledger(self) -> SqlLedger:
        """The ledger."""


@dataclass
class PublishedBatches:
    """The ``foreachBatch`` function of a query: each micro-batch takes effect exactly once.

    Attributes:
        sink: opened and bound.
        fence: the epoch of this run.
        checkpoint: the query's checkpoint.
        topic_ids: called before each batch.
        stateful: True if the query keeps state between batches.
        housekeeping: called after batches.
    """

    sink: QuerySink
    fence: Fence
    checkpoint: Checkpoint
    topic_ids: TopicIds
    stateful: bool
    housekeeping: Housekeeping = field(default_factory=Housekeeping)

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Publish the batch's rows, unless they are published already.

        Raises:
            Fenced: the same pipeline was started by another process.
            SourceMismatch: a topic was deleted and recreated.
            WrongInput: the checkpoint is not the one in the ledger.
        """
        try:
            self._take_effect(frame, batch_id)
        except OncelyError:
            raise
        except Exception as error:
            if not is_java(error):
                raise
            raise SparkBatchFailed(without_stack(error)) from None

    def _take_effect(self, frame: DataFrame, batch_id: int) -> None:
        plan = self.checkpoint.plan(batch_id)
        query = QueryBatch(self.checkpoint.query_id(), batch_id, plan)
        ranges = self.checkpoint.ranges(batch_id)

        replayed = False
        for attempt in attempts(Backoff(), stages=True):
            with attempt:
                replayed = self._is_published(query, ranges)
                if not replayed:
                    self._publish(frame, query, ranges.known)
        if not replayed:
            self.housekeeping.do(lambda: self.sink.ledger.tidy(self.fence), len(ranges.known))
        elif self.stateful:
            # Run for its state only: its rows are published, but the watermark that its records
            # move is computed by running the plan. If it were skipped, the windows that it closes
            # would stay open until more records arrive.
            frame.write.format("noop").mode("append").save()

    def _publish(
        self, frame: DataFrame, query: QueryBatch, ranges: Mapping[TopicPartition, OffsetRange]
    ) -> None:
        # A foreign query does not report its input.
        batch = HeldRows.of(self.sink, frame).into(Batch(ranges, dict.fromkeys(ranges, NO_RECORDS)))
        claim = Claim(self.fence, ranges, self._entries(), query=query)
        self.sink.publish(batch, self.fence, claim)

    def _entries(self) -> dict[TopicPartition, Entry]:
        return self.sink.ledger.positions(self.fence)

    def _is_published(self, query: QueryBatch, ranges: BatchRanges) -> bool:
        """Read the ledger. It may be ahead of the checkpoint by the one batch that Spark
        replays."""
        known = self.sink.ledger.registered()
        require_held(known, self.fence)
        ids = self.topic_ids({tp.topic for tp in ranges.known})
        self.sink.ledger.same_topics(ids)
        if known.query_id == query.query_id and known.query_batch is not None:
            if query.batch_id <= known.query_batch:
                self._compare_published(query, known, ranges)
                return True
            if query.batch_id > known.query_batch + 1:
                raise self._other_checkpoint(
                    f"batch {query.batch_id} follows, the ledger has only {known.query_batch}"
                )
        else:
            self._adopt(known, query.batch_id, ranges)
        self._compare_positions(ranges, ids)
        return False

    def _compare_published(self, query: QueryBatch, known: Registered, ranges: BatchRanges) -> None:
        """Check that a batch with the number of a published one has no input beyond it.

        Spark plans a batch again if the checkpoint has lost it: an older copy was restored, or the
        host crashed before the file system had written it. Then it may read further, and if rows
        depend on state, or on more than Kafka's offsets, it may produce other rows.

        Raises:
            WrongInput: the batch is not the published one, or it has records beyond it.
        """
        entries = self._entries()
        for tp, range_ in sorted(ranges.known.items()):
            position = entries[tp].position if tp in entries else 0
            if range_.end > position and not range_.is_empty:
                raise self._other_checkpoint(
                    f"batch {query.batch_id} is published and was planned again, {tp} {range_}"
                    f" goes beyond the ledger's position {position}",
                    ranges,
                )
        if ranges.complete and not self.stateful:
            return
        if query.batch_id < (known.query_batch or 0):
            raise self._other_checkpoint(
                f"batch {query.batch_id} is older than the last published, {known.query_batch}"
            )
        if known.query_plan != query.plan:
            raise self._other_checkpoint(
                f"batch {query.batch_id} is published and was planned again"
            )

    def _adopt(self, known: Registered, batch_id: int, ranges: BatchRanges) -> None:
        """Check a checkpoint that the ledger does not contain: allowed for the first one, or if
        the offsets alone show that no record is read twice or skipped."""
        if known.query_id is None and batch_id == 0:
            return
        if known.query_id is None:
            raise self._other_checkpoint(f"it is at batch {batch_id}, the ledger is empty")
        if self.stateful:
            raise self._other_checkpoint("the query keeps state, and the state is in the old one")
        if not ranges.complete:
            raise self._other_checkpoint("the earlier input has no Kafka offsets")

    def _compare_positions(self, ranges: BatchRanges, topic_ids: Mapping[str, str]) -> None:
        """Check that the batch begins at the ledger's positions.

        Raises:
            WrongInput: it does not.
        """
        entries = self._entries()
        missing = {tp: r.start for tp, r in ranges.known.items() if tp not in entries}
        for tp, range_ in ranges.known.items():
            if tp not in missing and entries[tp].position != range_.start:
                raise self._other_checkpoint(
                    f"{tp} begins at {range_.start}, the ledger is at {entries[tp].position}",
                    ranges,
                )
        if missing:
            named = {tp.topic: topic_ids.get(tp.topic, "") for tp in missing}
            self.sink.ledger.add_partitions(self.fence, missing, SourceIdentity("", named))

    def _other_checkpoint(self, why: str, ranges: BatchRanges | None = None) -> WrongInput:
        """The error for a wrong checkpoint; with ``ranges`` it may include the offsets to
        continue from."""
        way_out = "go back to the old checkpoint, or give the pipeline a new name"
        if ranges is not None and ranges.complete and not self.stateful:
            topics = {tp.topic for tp in ranges.known}
            entries = self._entries()
            positions = {tp: one.position for tp, one in entries.items() if tp.topic in topics}
            way_out += (
                "; or continue with an empty checkpoint and the option startingOffsets"
                f" {format_offsets(positions)}"
            )
        return WrongInput(
            f"pipeline {self.fence.pipeline!r}: this checkpoint does not continue what is in the"
            f" ledger: {why}",
            way_out=way_out,
        )


class SparkBatchFailed(Exception):
    """Spark's own failure of a batch, as a short text for Spark."""
