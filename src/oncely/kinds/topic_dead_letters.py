"""Dead letters in a topic: their messages, and reading those that are pending.

Key, value and headers are those of the record. Oncely's data are in additional headers at the end,
whose names begin with ``oncely.``, and ``oncely.pipeline`` is the first of these: a record that was
a dead letter before may contain such headers of its own. Behind them are the headers by which other
tools show dead letters, and send them to their topic again; Oncely does not read them.

A message cannot be removed from a topic. Replayed dead letters are recorded by a position in each
of the topic's partitions, stored like the pipeline's own positions (docs/decisions/0013): in the
ledger topic, and as an offset of a separate group, which is the fast copy and may expire. The dead
letters from the positions on are waiting, except those of records that a reset has made the
pipeline read again.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from confluent_kafka.admin import OffsetSpec

from oncely.core.batch import Reject
from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.kafka import topics
from oncely.kafka.reader import RecordReader
from oncely.kafka.records import KafkaRecord, each
from oncely.kafka.sender import batch_size
from oncely.kafka.transaction import Message
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.records import View, replay_group
from oncely.stores.topic.takeover import refuse_foreign

_FIRST = "oncely.pipeline"
_LONGEST = 2000  # characters of a reason


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter that was read from the topic.

    Attributes:
        reject: the record and the reason.
        epoch: the epoch of the run that read the record.
        left_out: the parts that were omitted because of their size; None: the dead letter is
            complete.
    """

    reject: Reject
    epoch: int
    left_out: str | None = None

    @property
    def origin(self) -> tuple[TopicPartition, int]:
        """Topic-partition and offset of the record."""
        return self.reject.partition, self.reject.offset

    @property
    def shown(self) -> Reject:
        """The reject for display: its reason mentions omitted parts."""
        if self.left_out is None:
            return self.reject
        return replace(self.reject, reason=f"{self.reject.reason} ({self.left_out})")


def dead_letter(reject: Reject, limit: int, fence: Fence) -> Message:
    """The message for the rejects' topic.

    For a record that is too large even for that topic the headers for other tools are left out; if
    that is not sufficient the reason is shortened; then it is stored without its value, then
    without its key and headers: its offset identifies it, and the omitted parts are noted.

    Args:
        reject: the record.
        limit: the topic's ``max.message.bytes``.
        fence: the pipeline and the epoch of the run that read it.
    """
    headers = [*reject.headers, *_about(reject, fence)]
    told = Message(reject.value, reject.key, [*headers, *_for_tools(reject)])
    if batch_size(told) <= limit:
        return told
    whole = Message(reject.value, reject.key, headers)
    over = batch_size(whole) - limit
    if over <= 0:
        return whole
    if 0 < over < len(reject.reason[:_LONGEST].encode()):
        short = reject.reason[:_LONGEST].encode()[:-over].decode(errors="ignore")
        about = _about(replace(reject, reason=short), fence)
        return Message(reject.value, reject.key, [*reject.headers, *about])
    return _without(reject, limit, fence, _lengths(reject))


def again(of: DeadLetter, limit: int, pipeline: str) -> Message:
    """The dead letter of a record that a replay could not write either."""
    fence = Fence(pipeline, of.epoch)
    if of.left_out is None:
        return dead_letter(of.reject, limit, fence)
    return _without(of.reject, limit, fence, of.left_out)


def dead_letters(rejects: Sequence[Reject], limit: int, fence: Fence) -> list[Message]:
    """The dead letters of all rejects, in order."""
    return [dead_letter(one, limit, fence) for one in rejects]


def opened(record: KafkaRecord, pipeline: str) -> DeadLetter | None:
    """A record of the rejects' topic as a dead letter of this pipeline; None if it is not."""
    headers = list(record.headers)
    at = next((i for i in reversed(range(len(headers))) if headers[i][0] == _FIRST), None)
    if at is None or headers[at][1] != pipeline.encode():
        return None
    own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[at:]}
    try:
        partition = TopicPartition(own["oncely.topic"], int(own["oncely.partition"]))
        when = own["oncely.timestamp_ms"]
        reject = Reject(
            partition,
            int(own["oncely.offset"]),
            int(when) if when else None,
            record.key,
            record.value,
            headers[:at],
            own["oncely.stage"],
            own["oncely.reason"],
        )
        return DeadLetter(reject, int(own["oncely.epoch"]), own.get("oncely.left_out"))
    except (KeyError, ValueError):  # written by another program
        return None


def _about(reject: Reject, fence: Fence) -> list[tuple[str, bytes]]:
    about = [
        (_FIRST, fence.pipeline),
        ("oncely.epoch", str(fence.epoch)),
        ("oncely.topic", reject.partition.topic),
        ("oncely.partition", str(reject.partition.partition)),
        ("oncely.offset", str(reject.offset)),
        ("oncely.timestamp_ms", "" if reject.timestamp_ms is None else str(reject.timestamp_ms)),
        ("oncely.stage", reject.stage),
        ("oncely.reason", reject.reason[:_LONGEST]),
    ]
    if reject.value is None:
        about.append(("oncely.tombstone", "true"))
    return [(name, text.encode()) for name, text in about]


def _for_tools(reject: Reject) -> list[tuple[str, bytes]]:
    """The headers of Karafka's dead letters, and of those of Spring Cloud Stream."""
    about = [
        ("source_topic", reject.partition.topic),
        ("source_partition", str(reject.partition.partition)),
        ("source_offset", str(reject.offset)),
        ("x-original-topic", reject.partition.topic),
        ("x-exception-message", reject.reason[:_LONGEST]),
    ]
    return [(name, text.encode()) for name, text in about]


def _without(reject: Reject, limit: int, fence: Fence, left_out: str) -> Message:
    own = [*_about(reject, fence), ("oncely.left_out", left_out.encode())]
    without = Message(None, reject.key, [*reject.headers, *own])
    return without if batch_size(without) <= limit else Message(None, None, own)


def _lengths(reject: Reject) -> str:
    return (
        f"too large for this topic: key {len(reject.key or b'')} bytes,"
        f" value {len(reject.value or b'')} bytes, {len(reject.headers)} headers"
    )


def replaying(pipeline_topics: PipelineTopics) -> PipelineTopics:
    """The pipeline's topics with the group that has the positions of replays."""
    return replace(pipeline_topics, group=replay_group(pipeline_topics.group))


@dataclass(frozen=True)
class ReplayPosition:
    """The position of replays.

    Attributes:
        topic_id: the id of the rejects' topic; positions are void in another topic of its name.
        positions: the next dead letter, for every partition of the rejects' topic.
        view: the ledger.
    """

    topic_id: str
    positions: Mapping[TopicPartition, Position]
    view: View

    @property
    def compared(self) -> object:
        """The state that must not change between reading dead letters and the commit of their
        replay."""
        return self.topic_id, self.positions, self.view.resets

    def waits(self, letter: DeadLetter) -> bool:
        """True if no reset has made the pipeline read the dead letter's record again."""
        tp, offset = letter.origin
        resets = self.view.resets.get(tp, {})
        return not any(epoch > letter.epoch and at <= offset for epoch, at in resets.items())


class DeadLetterTopic:
    """The dead letters of one pipeline.

    Args:
        cluster: open clients, with the group of replays.
        topic: the rejects' topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster, self.topic = cluster, topic

    def count(self) -> int:
        """The number of waiting dead letters. Raises the errors of :meth:`survey`."""
        return sum(1 for _ in self._waiting())

    def survey(self, limit: int) -> tuple[list[Reject], int]:
        """The first dead letters by topic, partition and offset of their records, and their total
        number.

        Raises:
            Unavailable: no answer.
        """
        total = 0

        def counted() -> Iterator[DeadLetter]:
            nonlocal total
            for one in self._waiting():
                total += 1
                yield one

        first = heapq.nsmallest(limit, counted(), key=lambda one: one.origin)
        return [one.shown for one in first], total

    def _waiting(self) -> Iterator[DeadLetter]:
        """The visible dead letters: an open transaction may hide some, and a replay may move
        meanwhile."""
        ends = self.ends()
        position = self.position(certain=False)
        if position is not None:
            yield from DeadLetterReader(self._cluster.pipeline_topics, position, ends).letters()

    def ends(self) -> dict[TopicPartition, Position]:
        """The last stable offset of each partition; empty: there is no such topic."""
        known = topics.identified(self._cluster.admin, self.topic)
        if known is None:
            return {}
        wanted = {TopicPartition(self.topic, n): OffsetSpec.latest() for n in range(known[1])}
        return topics.offsets(self._cluster.admin, "describe the rejects' topic", wanted)

    def position(self, *, certain: bool) -> ReplayPosition | None:
        """The position of replays; None: there are no dead letters, or the pipeline never ran.

        Args:
            certain: wait for open transactions that may hide it. Read after ``init`` of the
                replayer's id, it cannot change any more before that instance commits. Otherwise the
                visible position, which may have moved since.

        Raises:
            ConfigError: the group belongs to another pipeline.
            Unavailable: a transaction stayed open, or no answer.
        """
        cluster = self._cluster
        known = topics.identified(cluster.admin, self.topic)
        if known is None or topics.missing(cluster.admin, [cluster.pipeline_topics.ledger_topic]):
            return None
        topic_id, number = known
        wanted = [TopicPartition(self.topic, one) for one in range(number)]
        stamps = cluster.stamped_offsets(wanted) if certain else {}
        stamps = {tp: one for tp, one in stamps.items() if one.topic_id == topic_id}
        # A reset that another pipeline's open transaction hides in the ledger topic has voided dead
        # letters.
        view = cluster.settled() if certain else cluster.look()
        if view.pipeline is None:
            return None
        noted = {tp: one.position for tp, one in view.replayed.items() if one.topic_id == topic_id}
        refuse_foreign(stamps, cluster.pipeline_topics)
        found = {tp: one.position for tp, one in stamps.items()}
        positions = {tp: max(found.get(tp, 0), noted.get(tp, 0)) for tp in wanted}
        return ReplayPosition(topic_id, positions, view)


class DeadLetterReader:
    """Reads the dead letters once, from the position of replays to some ends.

    Attributes:
        positions: the next offset of every partition; grows during the iteration.
    """

    def __init__(
        self,
        pipeline_topics: PipelineTopics,
        position: ReplayPosition,
        ends: Mapping[TopicPartition, Position],
    ) -> None:
        self._pipeline_topics, self._position = pipeline_topics, position
        self._ranges = {
            tp: OffsetRange(at, ends[tp])
            for tp, at in position.positions.items()
            if at < ends.get(tp, 0)
        }
        self.positions: dict[TopicPartition, Position] = dict(position.positions)

    def letters(self) -> Generator[DeadLetter, None, None]:
        """The pipeline's waiting dead letters; those of other pipelines are skipped.

        Where an open transaction hides some of them, its end is awaited.

        Raises:
            Unavailable: a transaction stayed open, or the broker does not respond.
        """
        topics = self._pipeline_topics
        with closing(RecordReader(topics.brokers, topics.kafka)) as reader:
            for piece in reader.read(self._ranges, lost="skip", silence=topics.timeout):
                for tp, offset, record in each(piece.records):
                    self.positions[tp] = offset + 1
                    letter = opened(record, topics.pipeline)
                    if letter is not None and self._position.waits(letter):
                        yield letter
                self.positions[piece.partition] = piece.next
