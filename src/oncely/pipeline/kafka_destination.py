"""Topics of the source's cluster as a pipeline's destination."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from oncely.clients.kafka import limits, topics
from oncely.clients.kafka.client import make
from oncely.config import KafkaSinkSettings, PipelineSettings
from oncely.core.batch import Reject
from oncely.errors import ConfigError, OncelyError
from oncely.ledgers.topic.cluster import Connect, PipelineTopics
from oncely.pipeline.destination import Known, SinkFacts, SinkPlan
from oncely.pipeline.problems import Check, Problems
from oncely.pipeline.topic_ledger import TopicLedger
from oncely.runtimes.spark.probe import Slots
from oncely.sinks.kafka.avro_value import AvroValue
from oncely.sinks.kafka.record_format import RawValue, RecordFormat
from oncely.sinks.kafka.replay import Replay, ToTopics, refuse_compacted
from oncely.sinks.kafka.sink import KafkaSink
from oncely.sinks.kafka.staging import default_staging
from oncely.sources.kafka import KafkaSource

_NO_LATE_DELETES = (
    "a tombstone written late could delete what is newer, for readers who keep the last record"
    " of a key"
)


@dataclass(frozen=True)
class KafkaDestination:
    """Topics for records and rejects, and the ledger topic beside them.

    Attributes:
        settings: the pipeline's.
        given: its ``[sink]``.
        source: where records come from; the sink is on the same cluster.
        connect: how clients are made; a test puts faults here.
    """

    settings: PipelineSettings
    given: KafkaSinkSettings
    source: KafkaSource
    connect: Connect = make

    @property
    def place(self) -> PipelineTopics:
        """Cluster, group and ledger topic."""
        given = self.given
        return PipelineTopics(
            brokers=given.brokers or self.source.brokers,
            pipeline=self.settings.name,
            group=self.settings.mirror_group or f"oncely-{self.settings.name}",
            ledger_topic=given.ledger_topic,
            kafka=self.source.kafka,
            producer=given.kafka,
            transaction_timeout=given.transaction_timeout,
            connect=self.connect,
        )

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows."""
        return schema

    def sink(self, schema: pa.Schema) -> KafkaSink:
        """The topics for rows of these columns."""
        given = self.given
        form = RecordFormat(schema, self._value(), given.topic, given.topic_column, given.key)
        return KafkaSink(
            self.place,
            form,
            given.rejects,
            create=given.create,
            headers=given.headers,
            staging=self._staging(),
        )

    @property
    def bare_sink(self) -> KafkaSink:
        """The sink for work on the ledger alone."""
        return self.sink(pa.schema([]))

    @property
    def _topics(self) -> TopicLedger:
        return TopicLedger(self.place, self.given.rejects)

    def look(self) -> Known:
        """Read the ledger topic; one that was never created knows nothing."""
        self._same_cluster()
        return self._topics.look()

    def check(self, schema: pa.Schema) -> None:
        """Refuse another cluster, columns without a form, and topics that don't fit."""
        with closing(self.sink(schema)) as sink:
            for _, check in self._checks(sink):
                check()

    def _checks(self, sink: KafkaSink) -> Iterator[Check]:
        """What a run would refuse; without columns only what needs none."""
        given = self.given
        yield "sink.brokers", self._same_cluster
        if len(sink.form.schema):
            yield "sink", sink.check
        if not self._has_ledger:
            return
        yield "sink.ledger_topic", self._check_ledger
        yield "sink.topic", lambda: self._topics.check_target(sink.form.target)
        timeout = given.transaction_timeout
        yield "sink.transaction_timeout", lambda: limits.check_timeout(sink.cluster.asker, timeout)

    def rejects(self, limit: int) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and how many there are."""
        self._same_cluster()
        return self._topics.rejects(limit)

    @property
    def late_delete(self) -> str | None:
        """For readers who keep the last record of a key, an old delete would win."""
        return _NO_LATE_DELETES

    def check_replay(self) -> None:
        """Refuse a compacted topic: an old record would replace newer ones of its key."""
        self._same_cluster()
        with closing(self.bare_sink) as sink:
            named = [self.given.topic] if self.given.topic else []
            refuse_compacted(sink, topics.described(sink.cluster.asker, named))

    @contextmanager
    def replaying(self, schema: pa.Schema) -> Iterator[Replay]:
        """Begin a replay into the topics."""
        with closing(Replay(ToTopics(self.sink(schema).bind()))) as under_way:
            yield under_way

    def plan(
        self,
        schema: pa.Schema | None,
        findings: Problems,
        notes: list[str],  # noqa: ARG002 - the protocol's
        slots: Slots | None,  # noqa: ARG002
    ) -> SinkPlan:
        """Look at cluster, topics and columns."""
        facts, absent = None, []
        with closing(self.bare_sink if schema is None else self.sink(schema)) as sink:
            findings.collect(self._checks(sink))
            with findings.about("sink.topic"):
                absent = topics.missing(sink.cluster.asker, self._written)
                facts = SinkFacts(
                    "topic",
                    sink.place.brokers,
                    sink.form.target,
                    self.given.topic not in absent,
                    () if schema is None else tuple(self._columns(schema)),
                )
        given = self.given
        commands = self._topics.commands(absent, [given.ledger_topic])
        out = [name for name in (given.topic, given.rejects) if name]
        acls = self._topics.acls(out, [given.rejects], transactions=self._has_ledger)
        return SinkPlan(facts, None, tuple(commands), tuple(acls))

    # -- parts -----------------------------------------------------------------------------

    def _staging(self) -> str:
        """Where tasks stage, in a run of batch commit; empty in others."""
        transform = self.settings.transform
        if transform is None or transform.spark is None:
            return ""
        if self.given.staging is not None:
            return self.given.staging
        # By the cluster too: pipelines of one name on two clusters must not sweep each other's.
        return default_staging(hashlib.sha256(self.place.brokers.encode()).hexdigest()[:12])

    def _value(self) -> Literal["json"] | AvroValue | RawValue:
        given = self.given
        if given.value == "json":
            return "json"
        if given.value != "avro" or given.schema_file is None:
            return RawValue(given.value)
        try:
            text = given.schema_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "sink.schema_file", f"can't be read: {error}", way_out="name an .avsc file"
            ) from None
        return AvroValue(text, given.schema_id)

    def _check_ledger(self) -> None:
        """Refuse a ledger topic, a group or an output topic that this pipeline can't go on with."""
        named = [self.given.topic] if self.given.topic else []
        self._topics.check(self.source.partitions(), named, create=self.given.create)

    @property
    def _has_ledger(self) -> bool:
        """Whether positions live in the ledger topic, moved by transactions."""
        return self.settings.offsets.store == "ledger"

    @property
    def _written(self) -> list[str]:
        """The topics that are written to."""
        return [t for t in self.given.topics if self._has_ledger or t != self.given.ledger_topic]

    def _same_cluster(self) -> None:
        """Refuse a sink elsewhere: two clusters share no transaction.

        Raises:
            ConfigError: ``sink.brokers`` leads to another cluster than ``source.brokers``.
        """
        if self.given.brokers is None:
            return
        here = self.source.identity().cluster_id
        try:
            there = KafkaSource(self.given.brokers, (), self.source.kafka).identity().cluster_id
        except ConfigError as error:
            raise ConfigError("sink.brokers", error.message, way_out=error.way_out) from None
        except OncelyError as error:
            raise type(error)(f"sink.brokers: {error.message}", way_out=error.way_out) from None
        if here != there:
            raise ConfigError(
                "sink.brokers",
                f"leads to cluster {there}, and source.brokers to {here}: two clusters share no"
                " transaction, so nothing could be exactly once",
                way_out="write to a topic of the source's cluster, and copy that elsewhere"
                " (MirrorMaker 2); or read from the other cluster",
            )

    def _columns(self, schema: pa.Schema) -> list[tuple[str, str, str]]:
        given = self.given
        whole = given.value in ("json", "avro")
        parts = {given.topic_column: "topic", given.key: "key"}
        found = []
        for one in schema:
            part = [parts[one.name]] if one.name in parts else []
            if (whole and one.name != given.topic_column) or one.name == given.value:
                part.append(f"value ({given.value})" if whole else "value")
            found.append((one.name, str(one.type), ", ".join(part) or "not written"))
        return found
