"""Destinations with positions and dead letters in topics of the source's cluster, and inspection of
such a ledger."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar, cast

import pyarrow as pa

from oncely.core.batch import Reject
from oncely.core.ranges import TopicPartition, from_tree
from oncely.errors import ConfigError, OncelyError, TableMismatch
from oncely.kafka import topics
from oncely.kafka.client import KafkaAdmin, make
from oncely.kinds.base import Sink
from oncely.kinds.destination import (
    NO_COLUMNS,
    Check,
    Inspection,
    LedgerState,
    SinkFacts,
    SinkPlan,
    TopicPlan,
    refusal,
)
from oncely.kinds.kind import Parts
from oncely.kinds.topic_publishing import DeadLetterTopic, replaying
from oncely.stores.topic import ledger as ledgers
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.records import View
from oncely.stores.topic.takeover import (
    lost_partitions,
    refuse_foreign,
    refuse_lost,
    same_outputs,
    same_target,
)

_UNKNOWN = topics.Layout(None, None, None)
_LOST = ": records whose dead letter is deleted look lost to an audit"


def _default_layout(admin: KafkaAdmin) -> topics.Layout:
    """The cluster's defaults, if this user may read them."""
    try:
        return topics.default_layout(admin)
    except OncelyError:
        return _UNKNOWN


def kept_ms(config: Mapping[str, str]) -> float:
    """The time for which a topic keeps records."""
    given = config["retention.ms"] if "delete" in config["cleanup.policy"] else "-1"
    return inf if given == "-1" else int(given)


def lost_with_a_broker(plans: Iterable[TopicPlan], state: Collection[str]) -> Iterator[str]:
    """Notes on topics with positions that do not survive the loss of a broker.

    Args:
        plans: the topics.
        state: the names of those that hold positions, or name the files.
    """
    for one in plans:
        if one.name not in state:
            continue
        if one.replicas == 1:
            yield f"topic {one.name} has one replica: with its broker all that it holds is lost"
        elif one.min_insync == 1:
            yield (
                f"topic {one.name} has min.insync.replicas 1: a commit may be on one broker alone,"
                " and is lost with it"
            )


@dataclass(frozen=True)
class LedgerTopic:
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
            topics.check_open_files(cluster.admin)
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
    def _letters(self) -> Iterator[DeadLetterTopic]:
        with closing(Cluster(replaying(self.pipeline_topics))) as cluster:
            yield DeadLetterTopic(cluster, self.rejects_topic)


class TopicSettings(Protocol):
    """What ``[sink]`` says about topics of positions and dead letters."""

    ledger_topic: str
    create: bool
    transaction_timeout: float
    kafka: dict[str, str]

    @property
    def rejects(self) -> str:
        """The topic of dead letters."""

    @property
    def topics(self) -> tuple[str, ...]:
        """All topics that the sink writes to."""


class TopicSink(Sink, Protocol):
    """A sink with a ledger topic."""

    @property
    def ledger(self) -> ledgers.TopicLedger:
        """Epochs and positions, in the ledger topic and the group."""

    def check(self) -> None:
        """Check the present settings and topics; no topic is created."""

    def new_partitions(self) -> Mapping[str, int]:
        """The partitions of topics that are created with another number than the default."""


S = TypeVar("S", bound=TopicSink)


class TopicDestination(Generic[S]):
    """Base of the destinations with a ledger topic, on the cluster of the source.

    Args:
        parts: the pipeline.
    """

    given: TopicSettings
    output_key: ClassVar[str]
    """The key of the output topics."""
    target_key: ClassVar[str]
    """The key of the destination."""

    def __init__(self, parts: Parts) -> None:
        self.settings, self.source = parts.settings, parts.source
        self.given = cast("Any", parts.settings.sink)
        self._connect = parts.kafka_connect or make

    @abstractmethod
    def sink(self, schema: pa.Schema = NO_COLUMNS) -> S:
        """The sink for rows of these columns."""

    @abstractmethod
    def facts(self, sink: S, schema: pa.Schema, absent: Collection[str]) -> SinkFacts:
        """The present state of the destination."""

    @property
    @abstractmethod
    def outputs(self) -> Sequence[str]:
        """Output topics other than ledger and dead letters, if their names are known."""

    @property
    @abstractmethod
    def compacted(self) -> Sequence[str]:
        """Topics that keep the last record of a key."""

    @property
    @abstractmethod
    def read_back(self) -> Sequence[str]:
        """Topics, other than the ledger's, that are read as well as written."""

    @property
    def brokers(self) -> str:
        """The brokers of the source's cluster."""
        return self.source.brokers

    def refuse_cluster(self) -> None:
        """Refuse brokers of another cluster."""

    @property
    def pipeline_topics(self) -> PipelineTopics:
        """Cluster, group and ledger topic."""
        given = self.given
        return PipelineTopics(
            brokers=self.brokers,
            pipeline=self.settings.name,
            group=self.settings.group,
            ledger_topic=given.ledger_topic,
            kafka=self.source.kafka,
            producer=given.kafka,
            transaction_timeout=given.transaction_timeout,
            connect=self._connect,
        )

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows."""
        return schema

    def look(self) -> LedgerState:
        """Read the ledger topic; empty if it was never created."""
        self.refuse_cluster()
        return self._topics.look(self.outputs, self.source.partitions if self._has_ledger else list)

    def wrote(self) -> str:
        """Nothing: others may write to the topics, too. The mirrored group is asked instead."""
        return ""

    def rejects(self, limit: int, *, discarded: bool = False) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and their total number."""
        if discarded:
            self.discarding()
        self.refuse_cluster()
        return self._topics.rejects(limit)

    def discarding(self) -> NoReturn:
        """Refuse."""
        raise ConfigError(
            "sink.rejects_topic",
            f"dead letters are messages of the topic {self.given.rejects}: none can be changed or"
            " removed alone",
            way_out="set retention.ms of that topic: Kafka then deletes old dead letters;"
            " docs/dead-letters.md",
        )

    def check(self, schema: pa.Schema) -> None:
        """Refuse another cluster, and unsuitable columns, topics or root."""
        with closing(self.sink(schema)) as sink:
            for _, check in self._checks(sink):
                check()

    def _checks(self, sink: S) -> Iterator[Check]:
        """The checks of a run; without columns only the checks that need none."""
        yield "sink.brokers", self.refuse_cluster
        yield "sink", lambda: self.check_sink(sink)
        yield self.output_key, lambda: self._check_topics(sink.ledger.cluster.admin)
        if not self._has_ledger:
            return
        yield "sink.ledger_topic", self._check_ledger
        yield self.target_key, lambda: self._topics.check_target(sink.ledger.target)
        timeout = self.given.transaction_timeout
        yield (
            "sink.transaction_timeout",
            lambda: topics.check_timeout(sink.ledger.cluster.admin, timeout),
        )

    def check_sink(self, sink: S) -> None:
        """Refuse unsuitable settings, columns and topics."""
        sink.check()

    def _check_topics(self, admin: KafkaAdmin) -> None:
        """Refuse topics that take no record, and one for dead letters that does not keep them."""
        there = topics.layouts(admin, self._written)
        for name, one in there.items():
            if (one.min_insync or 0) > (one.replicas or 0):
                raise TableMismatch(
                    f"topic {name} has min.insync.replicas {one.min_insync} and replicas:"
                    f" {one.replicas}; the broker takes no record",
                    way_out="lower it, or add replicas (kafka-reassign-partitions)",
                )
        if topics.compacted(admin, {self.given.rejects} & there.keys()):
            problem = (
                f"topic {self.given.rejects!r} is compacted (cleanup.policy): a dead letter would"
                " replace others of its key"
            )
            way_out = "set its cleanup.policy to delete, or name another topic"
            raise ConfigError("sink.rejects_topic", problem, way_out=way_out)

    def _check_ledger(self) -> None:
        """Refuse a ledger topic, a group or an output with which this pipeline cannot continue."""
        partitions = self.source.partitions()
        self._topics.check(partitions, self.outputs, create=self.given.create)

    def plan(self, schema: pa.Schema, inspection: Inspection) -> SinkPlan:
        """Inspect cluster, topics and columns."""
        facts, absent, plans = None, [], []
        made = self._written if self.given.create else []  # unless the cluster has them
        with closing(self.sink(schema)) as sink:
            inspection.collect(self._checks(sink))
            with inspection.about(self.output_key):
                absent = topics.missing(sink.ledger.cluster.admin, self._written)
                made = absent if self.given.create else []
                facts = self.facts(sink, schema, absent)
                plans = self._topic_plans(sink)
                admin, there = sink.ledger.cluster.admin, [one.name for one in plans if one.exists]
                inspection.notes += self.defeats(admin, topics.configured(admin, there))
        inspection.notes += lost_with_a_broker(plans, self.compacted)
        partitions = {one.name: one.partitions for one in plans if one.partitions is not None}
        partitions |= self._compacted_partitions
        commands = self._topics.commands(absent, self.compacted, partitions)
        written = [name for name in (*self.outputs, self.given.rejects) if name]
        acls = self._topics.acls(written, self.read_back, made, transactions=self._has_ledger)
        return SinkPlan(facts, None, tuple(commands), tuple(acls), tuple(plans))

    def defeats(self, admin: KafkaAdmin, config: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
        """Notes on settings of topics that defeat those of the sink, by names of topics."""
        with suppress(OncelyError):  # this user may not read the source's configuration
            sources = topics.configured(admin, self.source.topics).values()
            rejects = config.get(self.given.rejects)
            if rejects and kept_ms(rejects) < max(map(kept_ms, sources)):
                yield (
                    f"topic {self.given.rejects} has a shorter retention.ms than the source" + _LOST
                )

    @property
    def _compacted_partitions(self) -> dict[str, int]:
        return dict.fromkeys(self.compacted, 1) | {
            self.given.ledger_topic: topics.LEDGER_PARTITIONS
        }

    def _topic_plans(self, sink: S) -> list[TopicPlan]:
        """The present topics, and those that the first start creates, with their layouts."""
        admin, names = sink.ledger.cluster.admin, sorted({*self._written})
        there = topics.layouts(admin, names)
        absent = [name for name in names if name not in there]
        if not self.given.create:
            absent = []
        usual = _default_layout(admin) if absent else _UNKNOWN
        own = {**sink.new_partitions(), **self._compacted_partitions} if absent else {}
        made = {name: usual._replace(partitions=own.get(name, usual.partitions)) for name in absent}
        found = {**there, **made}
        return [TopicPlan(name, name in there, *found[name]) for name in names if name in found]

    @property
    def _topics(self) -> LedgerTopic:
        return LedgerTopic(self.pipeline_topics, self.given.rejects)

    @property
    def _has_ledger(self) -> bool:
        """True if positions are in the ledger topic, moved by transactions."""
        return self.settings.offsets.store == "ledger"

    @property
    def _written(self) -> list[str]:
        """The topics that the sink writes to."""
        return [t for t in self.given.topics if self._has_ledger or t != self.given.ledger_topic]
