"""Output topics as evidence: every committed record of the output, read once.

With ``sink.keep_source`` each record names its source in a header, and the output is compared by
offset. A record without the header, or of a topic that the pipeline does not read, is another
writer's. Without headers the output is one group: its records are compared by number and digest,
and if they differ by what decode and transform give today. That needs a moment in which the
pipeline commits nothing: a record does not show whether it is below the positions.

What is read is kept in a file that has no name, as one line a record.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from oncely.audit.content import Group, Rows
from oncely.audit.evidence import OfLedger, Span
from oncely.audit.files import stated_of
from oncely.audit.report import Finding, Proof
from oncely.audit.stored.log import Ends, Topics
from oncely.audit.stored.topic_ledger import TopicLedger, read_ledger
from oncely.audit.tally import Scanned, ScannedRows
from oncely.audit.topic_snapshot import TopicSnapshot, take
from oncely.config import PipelineSettings
from oncely.core.claim import SKIPPED
from oncely.core.digest import Kind, Recipe, row_digests
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.kafka.records import headers_of

SOURCE_HEADER = "oncely.source"
_AT_ONCE = 20_000  # records
_decoder = msgspec.json.Decoder(tuple[str, int, int])
_COLUMNS = {"key": Kind("raw"), "value": Kind("raw")}
_SPOOLED = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()),
     ("digest", pa.uint64()), ("at_partition", pa.int32()), ("at_offset", pa.int64())]
)  # fmt: skip


class Output(NamedTuple):
    """The records of an output topic.

    Attributes:
        spool: the file of the records that are the pipeline's.
        number: their number.
        foreign: the number of other records.
        removed: why earlier records may be gone; empty if none is.
    """

    spool: Any
    number: int
    foreign: int
    removed: str

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The records, in the form of the spool."""
        self.spool.seek(0)
        with pa.ipc.open_stream(self.spool) as stream:
            yield from stream


@dataclass
class _Kept(OfLedger):
    """What the evidence of an output topic has in common.

    Attributes:
        topic: the output topic.
        snapshot: ledger, dead letters and output.
    """

    topic: str
    snapshot: TopicSnapshot[Output]
    limits: list[str] = field(default_factory=list, init=False)
    started: Mapping[TopicPartition, Position] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.started = self.snapshot.started(self._known())

    def _known(self) -> Iterable[tuple[TopicPartition, Position]]:
        return ()

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        """The dead letters that wait."""
        return self.snapshot.waiting(spans)

    def close(self) -> None:
        """Remove the spool."""
        self.snapshot.content.spool.close()


class KafkaOffsets(ScannedRows, _Kept):
    """An output whose records name their sources: :class:`oncely.audit.evidence.Evidence`."""

    proof: Proof = "offsets"

    def _known(self) -> Iterable[tuple[TopicPartition, Position]]:
        for one in self.scan(""):
            yield one.partition, int(one.offsets.min())

    def unable(self, recipe: str) -> str:
        """Another recipe than that of records with a source."""
        same = recipe == str(recipe_of(keep_source=True))
        return "" if same else "the records were committed without their sources"

    def outside(self, whole: Mapping[TopicPartition, OffsetRange]) -> Iterator[pa.RecordBatch]:
        """Records and dead letters beyond the positions that were reached meanwhile."""
        del whole
        reached = self.snapshot.reached
        for one in self.scan(""):
            yield from one.only(one.offsets >= reached.get(one.partition, 0))
        for letter in self.snapshot.beyond():
            yield from Scanned(letter.of, np.array([letter.offset])).only(np.ones(1, np.bool_))

    def letters(self) -> Iterator[tuple[TopicPartition, int]]:
        """The dead letters that wait."""
        return ((one.of, one.offset) for one in self.snapshot.letters if one.waits)

    def scan(self, recipe: str) -> Iterator[Scanned]:
        """The records of each source partition, with the digests of their only recipe."""
        del recipe
        for batch in self.snapshot.content.batches():
            for topic in batch.column("topic").unique().to_pylist():
                own = batch.filter(pa.compute.equal(batch.column("topic"), topic))
                for number in own.column("partition").unique().to_pylist():
                    some = own.filter(pa.compute.equal(own.column("partition"), number))
                    columns = (some.column(name).to_numpy() for name in ("offset", "digest"))
                    yield Scanned(TopicPartition(topic, number), *columns)


class KafkaGroup(_Kept):
    """An output whose records do not name their sources, as one group:
    :class:`oncely.audit.content.GroupedEvidence`."""

    reads = True
    proof: Proof = "content"

    @property
    def groups(self) -> Sequence[Group]:
        """All offsets from the start to the positions."""
        spans = self.read(self.started)
        if not spans:
            return []
        entries = [one for one in self.snapshot.committed if one.kind != SKIPPED]
        amended = any(one.amended for one in entries)
        return [
            Group(
                self.topic,
                spans,
                self.snapshot.content.number,
                stated_of(spans, entries),
                replayed=0 if amended else self.snapshot.replayed(spans),
                shared=True,
                doubt=self.snapshot.content.removed,
            )
        ]

    @property
    def unexpected(self) -> Sequence[Finding]:
        """Dead letters of records beyond the positions."""
        return [
            Finding(one.of, one.offset, "unexpected", f"a dead letter at {one.at[0]} {one.at[1]}")
            for one in self.snapshot.beyond()
        ]

    def recipe(self, group: Group) -> str:
        """The ledger's recipe, or key and value."""
        del group
        return str(recipe_of(keep_source=False))

    def contents(self, group: Group, recipe: str) -> Iterator[Rows]:
        """All records of the output."""
        del group, recipe
        for batch in self.snapshot.content.batches():
            yield Rows(batch.column("digest").to_numpy(), _places(batch, self.topic))


def open_kafka(settings: PipelineSettings) -> KafkaOffsets | KafkaGroup:
    """A snapshot of an output topic.

    Raises:
        SourceMismatch: the pipeline never ran.
        Unavailable: no answer; or without headers, the pipeline commits all the time.
    """
    sink: Any = settings.sink
    source, topic = settings.source, sink.topic
    topics = Topics(source.brokers, source.kafka_properties())
    reader = _Reader(topics, topic, sink.ledger_topic, settings.name, keep_source=sink.keep_source)
    with closing(topics):
        taken = take(topics, sink.ledger_topic, sink.rejects, settings.name, reader.read)
    by_offset = sink.keep_source and not taken.content.removed
    found = KafkaOffsets(topic, taken) if by_offset else KafkaGroup(topic, taken)
    if taken.content.foreign:
        found.limits.append(
            f"{taken.content.foreign:,} records of {topic} name no source that this pipeline reads:"
            " not compared"
        )
    return found


@dataclass
class _Reader:
    """Reads the output once."""

    topics: Topics
    topic: str
    ledger_topic: str
    pipeline: str
    keep_source: bool

    def read(self, ledger: TopicLedger) -> Output | None:
        """The output; None if the pipeline was committing and records do not name their sources."""
        ends = self.topics.ends(self.topic)
        if not self.keep_source and not self._is_still(ledger, ends):
            return None
        sources = set(ledger.source.topic_ids)
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the evidence
        count = foreign = 0
        with pa.ipc.new_stream(spool, _SPOOLED) as stream:
            for batch in self._batches(ends):
                some = batch
                origins = list(map(_origin, batch)) if self.keep_source else None
                if origins is not None and any(one[0] not in sources for one in origins):
                    ours = [one[0] in sources for one in origins]
                    foreign += len(some) - sum(ours)
                    some, origins = list(compress(some, ours)), list(compress(origins, ours))
                count += len(some)
                if some:
                    stream.write_batch(_spooled(some, origins))
        return Output(spool, count, foreign, self._removed(ledger, ends))

    def _is_still(self, ledger: TopicLedger, ends: Mapping[TopicPartition, Ends]) -> bool:
        """True if the output up to its ends has exactly what the ledger has committed."""
        now = read_ledger(self.topics, self.ledger_topic, self.pipeline)
        same = {tp: one.position for tp, one in now.positions.items()} == {
            tp: one.position for tp, one in ledger.positions.items()
        }
        return same and all(one.stable == one.high for one in ends.values())

    def _batches(self, ends: Mapping[TopicPartition, Ends]) -> Iterator[list[Any]]:
        """The messages of the output, enough at a time for digests of columns."""
        some: list[Any] = []
        for batch in self.topics.batches({tp: one.high for tp, one in ends.items()}):
            some += batch
            if len(some) >= _AT_ONCE:
                yield some
                some = []
        if some:
            yield some

    def _removed(self, ledger: TopicLedger, ends: Mapping[TopicPartition, Ends]) -> str:
        """Why records of the output may be gone, looked up after it was read."""
        known = ledger.pipeline.outputs.get(self.topic) if ledger.pipeline else None
        found = self.topics.topic_id(self.topic)
        if found is None:
            return f"topic {self.topic!r} does not exist"
        if known not in (None, found):
            return f"topic {self.topic!r} was made again: it had id {known}, and has {found}"
        if "compact" in self.topics.settings(self.topic)["cleanup.policy"]:
            return f"topic {self.topic!r} is compacted: it keeps the last record of a key only"
        now = self.topics.ends(self.topic)
        gone = [tp for tp in ends if tp not in now or now[tp].first > 0]
        if gone:
            names = ", ".join(map(str, sorted(gone)))
            return f"retention, or a user, has deleted the first records of {names}"
        return ""


def recipe_of(*, keep_source: bool) -> Recipe:
    """The recipe of an output's records."""
    return Recipe.of(_COLUMNS, offset=keep_source)


def _origin(message: Any) -> tuple[Any, ...]:
    """Topic, partition and offset of the source's record, from the last header of that name."""
    for name, value in reversed(headers_of(message)):
        if name == SOURCE_HEADER:
            try:
                return _decoder.decode(value or b"")
            except msgspec.MsgspecError:
                return ("",)
    return ("",)


def _spooled(messages: Sequence[Any], origins: Sequence[tuple[Any, ...]] | None) -> pa.RecordBatch:
    """Messages in the form of the spool; without origins, those are empty."""
    keys, values = [one.key() for one in messages], [one.value() for one in messages]
    rows = pa.table(
        {"key": pa.array(keys, pa.large_binary()), "value": pa.array(values, pa.large_binary())}
    )
    topics, partitions, offsets = zip(*origins or [("", 0, 0)] * len(messages), strict=True)
    digests = row_digests(
        rows, None if origins is None else np.array(offsets, np.int64),
        recipe_of(keep_source=origins is not None),
    )  # fmt: skip
    at = [one.partition() for one in messages], [one.offset() for one in messages]
    columns = [topics, partitions, offsets, digests, *at]
    return pa.record_batch(columns, schema=_SPOOLED)


def _places(batch: pa.RecordBatch, topic: str) -> Callable[[int], str]:
    def at(index: int) -> str:
        partition, offset = (batch.column(name)[index] for name in ("at_partition", "at_offset"))
        return f"{topic}-{partition} {offset}"

    return at
