"""What a destination asks of a ledger that is a topic: positions, dead letters, its fitness."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from oncely.clients.kafka import topics
from oncely.clients.kafka.limits import check_open_files
from oncely.core.batch import Reject
from oncely.core.topics import TopicPartition
from oncely.ledgers.topic.cluster import Cluster, PipelineTopics
from oncely.ledgers.topic.foreign import refuse_foreign
from oncely.ledgers.topic.lost import lost_partitions, refuse_lost
from oncely.ledgers.topic.records import OffsetMetadata, View, from_tree
from oncely.ledgers.topic.takeover import same_outputs, same_target
from oncely.pipeline.destination import Known
from oncely.sinks.kafka.dead_letters import DeadLetters, replaying


@dataclass(frozen=True)
class TopicLedger:
    """The ledger topic of one pipeline, and the topic of its dead letters.

    Attributes:
        place: cluster, pipeline, group and ledger topic.
        rejects_topic: of dead letters.
    """

    place: PipelineTopics
    rejects_topic: str

    def look(self) -> Known:
        """Read the ledger; one that was never created knows nothing."""
        with closing(Cluster(self.place)) as cluster:
            if topics.missing(cluster.asker, [self.place.ledger_topic]):
                return Known()
            view = cluster.look()
        if view.pipeline is None:
            return Known()
        with self._letters() as letters:
            waiting = letters.count()
        return Known(
            view.pipeline.epoch,
            view.pipeline.cluster,
            view.begins,
            view.pipeline.topic_ids,
            waiting,
            from_tree(view.pipeline.leaders),
        )

    def rejects(self, limit: int) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and how many there are."""
        with self._letters() as letters:
            return letters.survey(limit)

    def check(
        self, partitions: Collection[TopicPartition], outputs: Collection[str], *, create: bool
    ) -> None:
        """Refuse a ledger topic that is unfit, or missing though it may not be created.

        Also a limit of open files that is too low for transactions.

        Args:
            partitions: the source's; a group with another pipeline's positions is refused.
            outputs: topics that must be the ones that were written to.
            create: the ledger topic may be created.

        Raises:
            Stopped: a partition was read, and its position is lost.
        """
        with closing(Cluster(self.place)) as cluster:
            check_open_files(cluster.asker)
            name, view = self.place.ledger_topic, View()
            missing = bool(topics.missing(cluster.asker, [name]))
            if not create or not missing:
                topics.require_ledger(cluster.asker, name, create=False)
                view = cluster.look()
            stamps = cluster.stamped_offsets(partitions, stable=False)
            refuse_foreign(stamps, view.positions, self.place)
            if not missing:
                self._refuse_lost(cluster, view, stamps, partitions)
            if view.pipeline is not None:
                ids = topics.ids(cluster.asker, outputs)
                same_outputs(view.pipeline, ids, self.place.pipeline)

    def _refuse_lost(
        self,
        cluster: Cluster,
        view: View,
        stamps: Mapping[TopicPartition, OffsetMetadata],
        partitions: Collection[TopicPartition],
    ) -> None:
        """Refuse partitions that were read and have no position any more.

        A run that opens meanwhile, or another pipeline's open transaction, may have hidden them.
        """
        owns, group = self.place.words.owns, self.place.group
        shown = {tp for tp, one in stamps.items() if owns(one, group)}
        if lost_partitions(cluster, view.pipeline, {*view.positions, *shown}, partitions):
            now = cluster.settled()
            found = {*now.positions, *shown}
            if now.pipeline == view.pipeline:
                refuse_lost(self.place, lost_partitions(cluster, view.pipeline, found, partitions))

    def check_target(self, target: str) -> None:
        """Refuse another destination than the one that the ledger's positions speak of.

        Raises:
            TableMismatch: naming both.
        """
        with closing(Cluster(self.place)) as cluster:
            if topics.missing(cluster.asker, [self.place.ledger_topic]):
                return
            known = cluster.look().pipeline
        if known is not None:
            same_target(known, target, self.place.pipeline)

    def commands(self, absent: Sequence[str], compacted: Sequence[str]) -> list[str]:
        """``kafka-topics`` for whoever may create what is missing."""
        head = f"kafka-topics --bootstrap-server {self.place.brokers} --create --topic"
        segments = "".join(f" --config {key}={value}" for key, value in topics.SEGMENTS.items())
        return [
            f"{head} {name} --partitions 1 --config cleanup.policy=compact{segments}"
            if name in compacted
            else f"{head} {name}"
            for name in absent
        ]

    def acls(self, written: Sequence[str], read: Sequence[str], *, transactions: bool) -> list[str]:
        """``kafka-acls`` for the user that the source's settings name.

        Args:
            written: output topics.
            read: those of them that are read as well.
            transactions: positions live in the ledger topic.
        """
        place = self.place
        user = place.kafka.get("sasl.username") or "ANONYMOUS"
        head = f"kafka-acls --bootstrap-server {place.brokers} --add --allow-principal User:{user}"
        ids = f"--transactional-id oncely/{place.pipeline}/"
        found = [f"{head} --operation Write --operation Describe --topic {one}" for one in written]
        if not transactions:
            return found
        found += [f"{head} --operation Read --topic {one}" for one in read]
        return [
            *found,
            f"{head} --operation Read --operation Write --operation Describe --topic"
            f" {place.ledger_topic}",
            f"{head} --operation Read --group {replaying(place).group}",
            f"{head} --operation Write --operation Describe {ids} --resource-pattern-type prefixed",
        ]

    @contextmanager
    def _letters(self) -> Iterator[DeadLetters]:
        with closing(Cluster(replaying(self.place))) as cluster:
            yield DeadLetters(cluster, self.rejects_topic)
