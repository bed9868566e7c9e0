"""The dead letters that wait: read back from the rejects' topic.

A letter can't be taken out of a topic. What has been replayed is a position in each of the
topic's partitions, kept as the pipeline's own positions are (docs/decisions/0013): in the
ledger topic, and as an offset of a group of its own, which is the fast copy and may expire. The
letters at and behind the positions wait, but for those of records that a reset has made the
pipeline read again.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import OffsetSpec

from oncely.clients.kafka import topics
from oncely.clients.kafka.client import ErrorState
from oncely.clients.kafka.polling import polled
from oncely.core.batch import Reject
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.ledgers.topic.cluster import READER, Cluster, PipelineTopics
from oncely.ledgers.topic.foreign import refuse_foreign
from oncely.ledgers.topic.records import OffsetMetadata, View, replay_group
from oncely.sinks.kafka.letters import DeadLetter, opened


def replaying(place: PipelineTopics) -> PipelineTopics:
    """The place with the group that keeps the positions of replays."""
    return replace(place, group=replay_group(place.group))


@dataclass(frozen=True)
class ReplayPosition:
    """How far the letters have been replayed.

    Attributes:
        topic_id: of the rejects' topic; in another topic by its name no position means anything.
        positions: the next letter, for every partition of the rejects' topic.
        view: the ledger.
    """

    topic_id: str
    positions: Mapping[TopicPartition, Position]
    view: View

    @property
    def compared(self) -> object:
        """What must not have changed between reading letters and the commit of their replay."""
        return self.topic_id, self.positions, self.view.resets

    def waits(self, letter: DeadLetter) -> bool:
        """Whether no reset has made the pipeline read the letter's record again."""
        tp, offset = letter.origin
        resets = self.view.resets.get(tp, {})
        return not any(epoch > letter.epoch and at <= offset for epoch, at in resets.items())


class DeadLetters:
    """The letters of one pipeline.

    Args:
        cluster: open clients, of the group of replays.
        topic: the rejects' topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster, self.topic = cluster, topic

    def count(self) -> int:
        """How many wait. Raises as :meth:`survey` does."""
        return sum(1 for _ in self._waiting())

    def survey(self, limit: int) -> tuple[list[Reject], int]:
        """The first letters by topic, partition and offset of their records, and how many wait.

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
        """What an open transaction hides is not seen, nor what a replay moves meanwhile."""
        ends = self.ends()
        standing = self.stand(certain=False)
        if standing is not None:
            yield from Reading(self._cluster.place, standing, ends).letters()

    def ends(self) -> dict[TopicPartition, Position]:
        """The last stable offset of each partition; empty: there is no such topic."""
        known = topics.identified(self._cluster.asker, self.topic)
        if known is None:
            return {}
        here = [ck.TopicPartition(self.topic, number) for number in range(known[1])]
        answer = self._cluster.asker.one(
            "look at the rejects' topic",
            lambda client, wait: client.list_offsets(
                {one: OffsetSpec.latest() for one in here},
                isolation_level=ck.IsolationLevel.READ_COMMITTED,
                request_timeout=wait,
            ),
        )
        return {
            TopicPartition(one.topic, one.partition): found.offset for one, found in answer.items()
        }

    def stand(self, *, certain: bool) -> ReplayPosition | None:
        """Where replays have come; None: there are no letters, or the pipeline never ran.

        Args:
            certain: wait for open transactions that may hide it. Asked after ``init`` of the
                replayer's id, it can't change any more before that instance commits. Otherwise
                what the ledger topic shows now: it may have moved on since.

        Raises:
            ConfigError: the group is another pipeline's.
            Unavailable: a transaction stayed open, or no answer.
        """
        cluster = self._cluster
        known = topics.identified(cluster.asker, self.topic)
        if known is None or topics.missing(cluster.asker, [cluster.place.ledger_topic]):
            return None
        topic_id, number = known
        wanted = [TopicPartition(self.topic, one) for one in range(number)]
        found: dict[TopicPartition, Position] = {}
        stamps: dict[TopicPartition, OffsetMetadata] = {}
        if certain:
            stamps = cluster.stamped_offsets(wanted)
            stamps = {tp: one for tp, one in stamps.items() if one.topic_id == topic_id}
            owns, group = cluster.place.words.owns, cluster.place.group
            found = {tp: one.position for tp, one in stamps.items() if owns(one, group)}
        # A reset that another's open transaction hides in the ledger topic has voided letters.
        view = cluster.settled() if certain else cluster.look()
        if view.pipeline is None:
            return None
        noted = {tp: one.position for tp, one in view.replayed.items() if one.topic_id == topic_id}
        refuse_foreign(stamps, noted, cluster.place)
        positions = {tp: max(found.get(tp, 0), noted.get(tp, 0)) for tp in wanted}
        return ReplayPosition(topic_id, positions, view)


class Reading:
    """Goes once through the letters from where replays stand to some ends.

    Attributes:
        positions: behind what has been read, for every partition; grows while letters are taken.
    """

    def __init__(
        self,
        place: PipelineTopics,
        standing: ReplayPosition,
        ends: Mapping[TopicPartition, Position],
    ) -> None:
        self._place, self._standing = place, standing
        self._ranges = {
            tp: OffsetRange(at, ends[tp])
            for tp, at in standing.positions.items()
            if at < ends.get(tp, 0)
        }
        self.positions: dict[TopicPartition, Position] = dict(standing.positions)

    def letters(self) -> Generator[DeadLetter, None, None]:
        """The pipeline's letters that wait; those of others are passed over.

        Raises:
            Unavailable: the broker is silent.
        """
        if not self._ranges:
            return
        place, trouble = self._place, ErrorState(self._place.brokers)
        with closing(
            place.connect(
                ck.Consumer,
                place.brokers,
                place.kafka,
                trouble,
                **{**READER, "group.id": place.group},
            )
        ) as consumer:
            consumer.assign([ck.TopicPartition(*tp, own.start) for tp, own in self._ranges.items()])
            for message in self._messages(consumer, trouble):
                letter = opened(message, place.pipeline)
                if letter is not None and self._standing.waits(letter):
                    yield letter

    def _messages(self, consumer: Any, trouble: ErrorState) -> Iterator[Any]:
        place, left = self._place, set(self._ranges)
        for message in polled(
            consumer, "read the dead letters", place.brokers, place.timeout, trouble
        ):
            tp = TopicPartition(message.topic(), message.partition())
            if tp not in left:
                continue
            end = self._ranges[tp].end
            inside = message.error() is None and message.offset() < end
            # At the end of a partition the event's offset is the one that comes next.
            self.positions[tp] = min(message.offset() + inside, end)
            if self.positions[tp] == end:
                left.discard(tp)
            if inside:
                yield message
            if not left:
                return
