"""The dead letters that wait for a replay, read from the rejects' topic.

A message cannot be removed from a topic. Replayed dead letters are recorded by a position in each
of the topic's partitions, stored like the pipeline's own positions (docs/decisions/0013): in the
ledger topic, and as an offset of a separate group, which is the fast copy and may expire. The dead
letters from the positions on are waiting, except those of records that a reset has made the
pipeline read again.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from confluent_kafka.admin import OffsetSpec

from oncely.core.batch import Reject
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.kafka import topics
from oncely.kafka.reader import Reader
from oncely.kafka.records import each
from oncely.sinks.kafka.dead_letter_messages import DeadLetter, opened
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.records import View, replay_group
from oncely.stores.topic.takeover import refuse_foreign


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


class DeadLetters:
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
            yield from Reading(self._cluster.pipeline_topics, position, ends).letters()

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


class Reading:
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
        with closing(Reader(topics.brokers, topics.kafka)) as reader:
            for piece in reader.read(self._ranges, lost="skip", silence=topics.timeout):
                for tp, offset, record in each(piece.records):
                    self.positions[tp] = offset + 1
                    letter = opened(record, topics.pipeline)
                    if letter is not None and self._position.waits(letter):
                        yield letter
                self.positions[piece.partition] = piece.next
