"""A destination with positions and dead letters in topics of the source's cluster."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Generic, NoReturn, Protocol, TypeVar

import pyarrow as pa

from oncely.config import PipelineSettings
from oncely.core.batch import Reject
from oncely.errors import ConfigError, OncelyError, TableMismatch
from oncely.kafka import topics
from oncely.kafka import topics as limits
from oncely.kafka.client import KafkaAdmin, make
from oncely.kafka.source import KafkaSource
from oncely.kinds.base import Sink
from oncely.kinds.destination import (
    Check,
    Inspection,
    LedgerState,
    SinkFacts,
    SinkPlan,
    TopicPlan,
)
from oncely.kinds.topic_ledger import TopicLedger
from oncely.stores.topic import ledger as ledgers
from oncely.stores.topic.cluster import Cluster, Connect, PipelineTopics

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

    @property
    def cluster(self) -> Cluster:
        """The clients of this process."""

    def check(self) -> None:
        """Check the present settings and topics; no topic is created."""


S = TypeVar("S", bound=TopicSink)


@dataclass(frozen=True)
class TopicDestination(Generic[S]):
    """Base of the destinations with a ledger topic.

    Attributes:
        settings: the settings of the pipeline.
        given: its ``[sink]``.
        source: the source of the records; the topics are on the same cluster.
        connect: creates Kafka's clients; tests inject faults here.
    """

    settings: PipelineSettings
    given: TopicSettings
    source: KafkaSource
    connect: Connect = make

    output_key: ClassVar[str]
    """The key of the output topics."""
    target_key: ClassVar[str]
    """The key of the destination."""

    @abstractmethod
    def sink(self, schema: pa.Schema) -> S:
        """The sink for rows of these columns."""

    @abstractmethod
    def facts(self, sink: S, schema: pa.Schema | None, absent: Collection[str]) -> SinkFacts:
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

    def check_sink(self, sink: S) -> None:
        """Refuse unsuitable settings, columns and topics."""
        sink.check()

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
            connect=self.connect,
        )

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows."""
        return schema

    @property
    def bare_sink(self) -> S:
        """The sink for operations on the ledger only."""
        return self.sink(pa.schema([]))

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
        yield self.output_key, lambda: self._check_topics(sink.cluster.admin)
        if not self._has_ledger:
            return
        yield "sink.ledger_topic", self._check_ledger
        yield self.target_key, lambda: self._topics.check_target(sink.ledger.target)
        timeout = self.given.transaction_timeout
        yield "sink.transaction_timeout", lambda: limits.check_timeout(sink.cluster.admin, timeout)

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

    def plan(self, schema: pa.Schema | None, inspection: Inspection) -> SinkPlan:
        """Inspect cluster, topics and columns."""
        facts, absent, plans = None, [], []
        made = self._written if self.given.create else []  # unless the cluster has them
        with closing(self.bare_sink if schema is None else self.sink(schema)) as sink:
            inspection.collect(self._checks(sink))
            with inspection.about(self.output_key):
                absent = topics.missing(sink.cluster.admin, self._written)
                made = absent if self.given.create else []
                facts = self.facts(sink, schema, absent)
                plans = self._topic_plans(sink)
                admin, there = sink.cluster.admin, [one.name for one in plans if one.exists]
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

    def new_partitions(self, sink: S) -> Mapping[str, int]:
        """The partitions of topics that are created with another number than the default."""
        del sink
        return {}

    @property
    def _compacted_partitions(self) -> dict[str, int]:
        return dict.fromkeys(self.compacted, 1) | {
            self.given.ledger_topic: topics.LEDGER_PARTITIONS
        }

    def _topic_plans(self, sink: S) -> list[TopicPlan]:
        """The present topics, and those that the first start creates, with their layouts."""
        admin, names = sink.cluster.admin, sorted({*self._written})
        there = topics.layouts(admin, names)
        absent = [name for name in names if name not in there]
        if not self.given.create:
            absent = []
        usual = _default_layout(admin) if absent else _UNKNOWN
        own = {**self.new_partitions(sink), **self._compacted_partitions} if absent else {}
        made = {name: usual._replace(partitions=own.get(name, usual.partitions)) for name in absent}
        found = {**there, **made}
        return [TopicPlan(name, name in there, *found[name]) for name in names if name in found]

    @property
    def _topics(self) -> TopicLedger:
        return TopicLedger(self.pipeline_topics, self.given.rejects)

    @property
    def _has_ledger(self) -> bool:
        """True if positions are in the ledger topic, moved by transactions."""
        return self.settings.offsets.store == "ledger"

    @property
    def _written(self) -> list[str]:
        """The topics that the sink writes to."""
        return [t for t in self.given.topics if self._has_ledger or t != self.given.ledger_topic]
