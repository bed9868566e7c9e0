"""Inspection of a ledger in a topic: positions, dead letters, suitability."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from oncely.core.batch import Reject
from oncely.core.ranges import TopicPartition, from_tree
from oncely.kafka import topics
from oncely.kafka.topics import check_open_files
from oncely.kinds.destination import LedgerState, refusal
from oncely.kinds.topic_dead_letters import DeadLetters, replaying
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.records import View
from oncely.stores.topic.takeover import (
    lost_partitions,
    refuse_foreign,
    refuse_lost,
    same_outputs,
    same_target,
)


@dataclass(frozen=True)
class TopicLedger:
    """The ledger topic of one pipeline, and the topic of its dead letters.

    Attributes:
        pipeline_topics: cluster, pipeline, group and ledger topic.
        rejects_topic: the topic of dead letters.
    """

    pipeline_topics: PipelineTopics
    rejects_topic: str

    def look(
        self, outputs: Collection[str], partitions: Callable[[], Collection[TopicPartition]] = list
    ) -> LedgerState:
        """Read the ledger; empty if it was never created. For the arguments see :meth:`check`."""
        with closing(Cluster(self.pipeline_topics)) as cluster:
            missing = topics.missing(cluster.admin, [self.pipeline_topics.ledger_topic])
            view = View() if missing else cluster.look()
            known = view.pipeline
            if known is None:
                return self._left_in_group(cluster, partitions())
            ids = topics.ids(cluster.admin, outputs)
        name = self.pipeline_topics.pipeline
        with self._letters() as letters:
            waiting = letters.count()
        return LedgerState(
            known.epoch,
            known.cluster,
            view.begins,
            known.topic_ids,
            waiting,
            from_tree(known.leaders),
            refused=refusal(lambda: same_outputs(known, ids, name)),
        )

    def _left_in_group(
        self, cluster: Cluster, partitions: Collection[TopicPartition]
    ) -> LedgerState:
        """The state of a pipeline that the ledger topic does not know: what is left in the group.

        The next start continues there, too.
        """
        stamps = cluster.stamped_offsets(partitions, stable=False) if partitions else {}
        ours = self.pipeline_topics
        own = {tp: one for tp, one in stamps.items() if one.pipeline == ours.pipeline}
        if not own:
            return LedgerState()
        notice = (
            f"the ledger topic {ours.ledger_topic!r} was deleted or emptied, and only the offsets"
            f" of group {ours.group!r} are left: start the pipeline before they expire, and it"
            " continues there; the number of dead letters is not known"
        )
        newest, at = max(own.values(), key=lambda one: one.epoch), own.items()
        ids = {tp.topic: one.topic_id for tp, one in at}
        positions = {tp: one.position for tp, one in at}
        return LedgerState(newest.epoch, newest.cluster, positions, ids, notice=notice)

    def rejects(self, limit: int) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and their total number."""
        with self._letters() as letters:
            return letters.survey(limit)

    def check(
        self, partitions: Collection[TopicPartition], outputs: Collection[str], *, create: bool
    ) -> None:
        """Refuse a ledger topic that is unsuitable, or missing although it may not be created.

        Also refuses a limit of open files that is too low for transactions.

        Args:
            partitions: the source's partitions; a group with another pipeline's positions is
                refused.
            outputs: topics that must be the same as before.
            create: the ledger topic may be created.

        Raises:
            Stopped: a partition was read, and its position is lost.
        """
        with closing(Cluster(self.pipeline_topics)) as cluster:
            check_open_files(cluster.admin)
            name, view = self.pipeline_topics.ledger_topic, View()
            missing = bool(topics.missing(cluster.admin, [name]))
            if not create or not missing:
                topics.require_ledger(cluster.admin, name, create=False)
                view = cluster.look()
            stamps = cluster.stamped_offsets(partitions, stable=False)
            refuse_foreign(stamps, self.pipeline_topics)
            if not missing:
                self._refuse_lost(cluster, view, stamps, partitions)
            if view.pipeline is not None:
                ids = topics.ids(cluster.admin, outputs)
                same_outputs(view.pipeline, ids, self.pipeline_topics.pipeline)

    def _refuse_lost(
        self,
        cluster: Cluster,
        view: View,
        stamps: Collection[TopicPartition],
        partitions: Collection[TopicPartition],
    ) -> None:
        """Refuse partitions that were read and have no position any more.

        Positions may be hidden by a run that opens meanwhile, or by another pipeline's open
        transaction.
        """
        if lost_partitions(cluster, view.pipeline, {*view.positions, *stamps}, partitions):
            now = cluster.settled()
            found = {*now.positions, *stamps}
            if now.pipeline == view.pipeline:
                refuse_lost(
                    self.pipeline_topics, lost_partitions(cluster, view.pipeline, found, partitions)
                )

    def check_target(self, target: str) -> None:
        """Refuse another destination than that of the ledger's positions.

        Raises:
            TableMismatch: the error names both.
        """
        with closing(Cluster(self.pipeline_topics)) as cluster:
            if topics.missing(cluster.admin, [self.pipeline_topics.ledger_topic]):
                return
            known = cluster.look().pipeline
        if known is not None:
            same_target(known, target, self.pipeline_topics.pipeline)

    def commands(
        self, absent: Sequence[str], compacted: Sequence[str], partitions: Mapping[str, int]
    ) -> list[str]:
        """``kafka-topics`` commands that create missing topics."""
        head = f"kafka-topics --bootstrap-server {self.pipeline_topics.brokers} --create --topic"
        segments = "".join(f" --config {key}={value}" for key, value in topics.SEGMENTS.items())
        return [
            f"{head} {name}"
            + (f" --partitions {partitions[name]}" if name in partitions else "")
            + (f" --config cleanup.policy=compact{segments}" if name in compacted else "")
            for name in absent
        ]

    def acls(
        self,
        written: Sequence[str],
        read: Sequence[str],
        made: Collection[str],
        *,
        transactions: bool,
    ) -> list[str]:
        """``kafka-acls`` commands for the user of the source's settings.

        Args:
            written: output topics.
            read: the output topics that are read as well.
            made: topics that the first start creates.
            transactions: positions are in the ledger topic.
        """
        pipeline_topics = self.pipeline_topics
        user = pipeline_topics.kafka.get("sasl.username") or "ANONYMOUS"
        head = f"kafka-acls --bootstrap-server {pipeline_topics.brokers} --add"
        head += f" --allow-principal User:{user}"
        ids = f"--transactional-id oncely/{pipeline_topics.pipeline}/"
        described = "--operation Describe --operation DescribeConfigs --topic"
        ledger = pipeline_topics.ledger_topic
        topics_made = [one for one in [*written, *[ledger] * transactions] if one in made]
        found = [f"{head} --operation Write {described} {one}" for one in written]
        found += [f"{head} --operation Create --topic {one}" for one in topics_made]
        if not transactions:
            return found
        found += [f"{head} --operation Read --topic {one}" for one in read]
        return [
            *found,
            f"{head} --operation Read --operation Write {described} {ledger}",
            f"{head} --operation Read --group {replaying(pipeline_topics).group}",
            f"{head} --operation Write --operation Describe {ids} --resource-pattern-type prefixed",
        ]

    @contextmanager
    def _letters(self) -> Iterator[DeadLetters]:
        with closing(Cluster(replaying(self.pipeline_topics))) as cluster:
            yield DeadLetters(cluster, self.rejects_topic)
