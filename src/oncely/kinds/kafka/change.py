"""Changes of topics: the messages of replays, repairs and backfills.

Repairs: a message can't be removed from a topic or replaced in it, so only what is missing can be
repaired, and a repair that is repeated must send nothing twice. Each transaction takes the id of
replays (docs/decisions/0043): its ``init`` ends an earlier repair and a replay, and a reset takes
the same id before it puts a position back. What is read after ``init`` thus holds until the commit:

1. The ledger: the records are below the position, no run has taken that since the decision, and no
   reset is about to put it back.
2. The output, up to its high watermark: records whose source it names are there.
3. The dead letters that wait: their records are not lost.

What is left is sent with its source's header, or as a dead letter if it is refused today. The
position does not move, and the ledger topic gets an entry of the repair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka.admin import OffsetSpec

from oncely.core.batch import Rejection
from oncely.core.change import Reprocessed, Rewrite, Rewritten, replayed
from oncely.core.claim import NO_RECORDS, Entry, Fence, PositionMoved
from oncely.core.ranges import OffsetRange, Position, TopicPartition, normalize
from oncely.errors import ConfigError, InvariantViolation, Stopped, WrongInput
from oncely.kafka import topics
from oncely.kafka.reader import RecordReader
from oncely.kafka.transaction import Message
from oncely.kinds.kafka.form import digested, encode
from oncely.kinds.kafka.format import SOURCE_HEADER
from oncely.kinds.kafka.sink import KafkaSink
from oncely.kinds.rows import LETTERS_STAY, row_refused
from oncely.kinds.topic_publishing import (
    DeadLetterReader,
    DeadLetterTopic,
    ReplayOutput,
    TopicReplay,
    dead_letters,
    replaying,
)
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.compare_and_set import compare_and_set
from oncely.stores.topic.records import RewriteRecord, View
from oncely.stores.topic.records import encode as ledger_value
from oncely.stores.topic.takeover import same_outputs


def replay_into_topics(sink: KafkaSink) -> TopicReplay:
    """A replay of a bound sink; the pipeline may run at the same time."""
    replayer, write = sink.pipeline_topics.keys.replayer, partial(_encoded, sink)
    return TopicReplay(sink.ledger, sink.rejects_topic, replayer, write, sink.close)


def _encoded(sink: KafkaSink, judged: Reprocessed) -> ReplayOutput:
    """Reprocessed rows as messages."""

    def limits(names: Sequence[str]) -> dict[str, topics.TopicLimits]:
        """The limits of existing topics that may receive old records."""
        there = topics.described(sink.cluster.admin, names)
        refuse_compacted(sink, there)
        return topics.topic_limits(sink.cluster.admin, there)

    chunk = judged.chunk
    refused: Sequence[Rejection] = chunk.rejections
    if not judged.traceable:  # its rows belong to no record, and none is skipped for a reject
        chunk = replace(chunk, rejections=())
    formed = digested(encode(chunk, sink.form, limits), chunk, sink.form.recipe)
    if judged.traceable:
        refused = formed.rejections
    elif formed.rejections:
        raise row_refused(formed.rejections[0].reason, LETTERS_STAY)
    found = formed.rows.all
    failed = {one.record for one in refused}
    own = judged.own(formed.row_record, failed)
    changes = partial(replayed, chunk, own, failed, formed.digests)
    return ReplayOutput(list(found), refused, lambda: found, changes=changes)


def refuse_compacted(sink: KafkaSink, names: Mapping[str, object] | Sequence[str]) -> None:
    """Refuse to write old records to compacted topics, which keep only the last record of a key.

    Raises:
        ConfigError: the error names the topic.
    """
    if found := topics.compacted(sink.cluster.admin, names):
        raise ConfigError(
            "sink.topic" if sink.form.topic else "sink.topic_column",
            f"topic {found[0]!r} is compacted: a replayed record is old, written last it would"
            " replace newer records of its key",
            way_out="send corrected records to the source's topic;"
            " `oncely rejects list --json` has them. If old records are harmless, set the"
            " topic's cleanup.policy to delete for the replay",
        )


LACKS: Mapping[str, str] = {
    "duplicated": "a surplus copy can't be removed from a topic: let its readers keep one record of"
    " each oncely.source, or write all of it into a new topic after `oncely offsets reset`",
    "altered": "a record can't be replaced in a topic: send a corrected one from the source, or"
    " write all of it into a new topic after `oncely offsets reset`",
    "unexpected": "a record can't be removed from a topic: let its readers skip it, or write all of"
    " it into a new topic after `oncely offsets reset`",
}
"""The kinds of damage that can't be repaired in a topic, with the reason."""
_PAGE = 1 << 16  # offsets


class Sources:
    """The sources that an output topic names, one bit for each.

    Args:
        pipeline_topics: the cluster.
        topic: the output.
    """

    def __init__(self, pipeline_topics: PipelineTopics, topic: str) -> None:
        self._pipeline_topics, self._topic = pipeline_topics, topic
        self._next: dict[TopicPartition, Position] = {}
        self._pages: dict[tuple[TopicPartition, int], bytearray] = {}
        self._decode = msgspec.json.Decoder(tuple[str, int, int]).decode

    def __contains__(self, of: tuple[TopicPartition, int]) -> bool:
        tp, offset = of
        page = self._pages.get((tp, offset // _PAGE))
        return page is not None and bool(page[offset % _PAGE >> 3] & 1 << (offset & 7))

    def read(self, ends: Mapping[TopicPartition, Position]) -> None:
        """Read on to these ends.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        ranges = {tp: OffsetRange(min(self._next.get(tp, 0), end), end) for tp, end in ends.items()}
        of = self._pipeline_topics
        with closing(RecordReader(of.brokers, of.kafka)) as reader:
            needs = frozenset({"headers"})
            for records in reader.tables(ranges, needs, lost="skip", silence=of.timeout):
                for headers in records["headers"].chunks:
                    self._take(headers)
        self._next.update(ends)

    def _take(self, headers: pa.ListArray) -> None:
        names, values = pc.list_flatten(headers).flatten()
        ours = pc.equal(names, SOURCE_HEADER)
        record = pc.list_parent_indices(headers).filter(ours).to_pylist()
        last = dict(zip(record, values.filter(ours).to_pylist(), strict=True))
        for value in last.values():
            with suppress(msgspec.MsgspecError):  # another program's
                topic, partition, offset = self._decode(value or b"")
                at = TopicPartition(topic, partition), offset // _PAGE
                page = self._pages.setdefault(at, bytearray(_PAGE >> 3))
                page[offset % _PAGE >> 3] |= 1 << (offset & 7)


@dataclass
class KafkaRewrites:
    """Sends lost records of an output topic whose records name their sources.

    Attributes:
        sink: bound to its topic.
    """

    sink: KafkaSink
    _cluster: Cluster = field(init=False)
    _sources: Sources = field(init=False)

    def __post_init__(self) -> None:
        self._cluster = Cluster(replaying(self.sink.pipeline_topics))
        self._sources = Sources(self.sink.pipeline_topics, self._topic)

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()
        self.sink.close()

    def check(self) -> None:
        """Refuse a topic that does not have all records, or that keeps the last one of a key."""
        topic, ours, admin = self._topic, self.sink.pipeline_topics, self._cluster.admin
        refuse_compacted(self.sink, topics.described(admin, [topic]))
        there = topics.described(admin, [ours.ledger_topic])
        if there and (known := self._cluster.look().pipeline):
            same_outputs(known, topics.ids(admin, [topic]), ours.pipeline)
        first = self._offsets(topic, OffsetSpec.earliest())
        if gone := [str(tp) for tp, at in sorted(first.items()) if at]:
            raise WrongInput(
                f"{', '.join(gone)}: the first records were deleted: whether a record was among"
                " them, or is lost, can't be told",
                way_out="a topic without retention can be repaired",
            )

    def entries(self) -> dict[TopicPartition, Entry]:
        """The present positions."""
        return self.sink.cluster.committed()

    def committed(self, partition: TopicPartition, within: OffsetRange) -> list[OffsetRange]:
        """All below the position: a ledger topic has no history."""
        entry = self.entries().get(partition)
        end = min(within.end, entry.position) if entry is not None else within.start
        return [OffsetRange(within.start, end)] if end > within.start else []

    def present(self, partition: TopicPartition, offsets: Sequence[OffsetRange]) -> tuple[int, int]:
        """Nothing that could be removed."""
        del partition, offsets
        return 0, 0

    def rewrite(self, work: Rewrite) -> Rewritten:
        """Send the records that are lost still."""
        if work.kind != "repair":
            raise InvariantViolation("a backfill of a topic")
        names = [self._topic, self.sink.rejects_topic]
        sizes = self.sink.largest(names)
        identity = self._cluster.keys.replayer

        def compare() -> tuple[View, list[int]]:
            view = self._cluster.settled()
            self._refuse_moved(view, work)
            return view, self._lost(work)

        with compare_and_set(self._cluster, identity, compare, sizes.values()) as (writer, now):
            view, lost = now
            if not lost:
                return Rewritten(0, 0, NO_RECORDS)
            ranges = normalize(OffsetRange(at, at + 1) for at in lost)
            chunk = work.chunk.keep({work.partition: ranges})
            formed = encode(chunk, self.sink.form, self.sink.limits)
            entry = work.expected
            fence = Fence(self.sink.pipeline_topics.pipeline, entry.epoch, entry.run)
            letters = dead_letters(
                chunk.letters(formed.rejections), sizes[self.sink.rejects_topic], fence
            )
            writer.begin()
            for topic, messages in formed.rows.all.items():
                writer.send(topic, messages)
            writer.send(self.sink.rejects_topic, letters)
            writer.send(
                self._cluster.pipeline_topics.ledger_topic, [self._amendment(view, work, lost)]
            )
            writer.commit()
        counts = formed.counts(chunk)
        return Rewritten(0, 0, counts.get(work.partition, NO_RECORDS))

    def remove_beyond(
        self, partition: TopicPartition, offsets: Sequence[OffsetRange], expected: Entry
    ) -> NoReturn:
        """Never asked for."""
        raise InvariantViolation(f"{partition} {offsets} {expected}: {LACKS['unexpected']}")

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _topic(self) -> str:
        if self.sink.form.topic is None:
            raise InvariantViolation("a repair of unknown topics")
        return self.sink.form.topic

    def _refuse_moved(self, view: View, work: Rewrite) -> None:
        tp, now = work.partition, view.positions.get(work.partition)
        if now is None or now.epoch != work.expected.epoch or now.position < work.upto:
            raise PositionMoved(str(tp))
        if view.begins[tp] < work.upto:
            raise Stopped(
                f"{tp}: a reset is under way that puts the position back to {view.begins[tp]}",
                way_out="the next run completes it, and reads these records again; then audit",
            )

    def _lost(self, work: Rewrite) -> list[int]:
        """The offsets that have neither a record in the output nor a dead letter that waits."""
        tp, letters = work.partition, DeadLetterTopic(self._cluster, self.sink.rejects_topic)
        self._sources.read(self._offsets(self._topic, OffsetSpec.latest()))
        wanted = [at for one in work.offsets for at in range(one.start, one.end)]
        wanted = [at for at in wanted if (tp, at) not in self._sources]
        position = letters.position(certain=True)
        if position is None or not wanted:
            return wanted
        ends = self._offsets(self.sink.rejects_topic, OffsetSpec.latest())
        with closing(
            DeadLetterReader(self._cluster.pipeline_topics, position, ends).letters()
        ) as waiting:
            kept = {one.origin for one in waiting}
        return [at for at in wanted if (tp, at) not in kept]

    def _amendment(self, view: View, work: Rewrite, lost: Sequence[int]) -> Message:
        before = view.rewritten.get(work.partition)
        record = RewriteRecord(
            work.kind, lost[0], lost[-1] + 1, work.expected.epoch,
            [] if before is None else before.backfilled,
        )  # fmt: skip
        return Message(ledger_value(record), self._cluster.keys.rewritten_key(work.partition))

    def _offsets(self, topic: str, spec: Any) -> dict[TopicPartition, Position]:
        """An offset of each partition; the latest one is the high watermark."""
        known = topics.identified(self._cluster.admin, topic)
        here = [TopicPartition(topic, number) for number in range(known[1] if known else 0)]
        wanted, doing = dict.fromkeys(here, spec), f"read the ends of {topic!r}"
        return topics.offsets(self._cluster.admin, doing, wanted, committed=False)
