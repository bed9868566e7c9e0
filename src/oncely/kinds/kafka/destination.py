"""Topics of the source's cluster as a pipeline's destination."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from math import inf
from typing import Literal

import pyarrow as pa

from oncely.core.change import RewriteKind
from oncely.errors import ConfigError, OncelyError
from oncely.kafka import topics
from oncely.kafka.client import KafkaAdmin
from oncely.kinds.destination import NO_COLUMNS, SinkFacts
from oncely.kinds.kafka.change import LACKS, KafkaRewrites, refuse_compacted, replay_into_topics
from oncely.kinds.kafka.form import form_of
from oncely.kinds.kafka.format import AvroValue, RawValue, RecordFormat
from oncely.kinds.kafka.settings import KafkaSinkSettings
from oncely.kinds.kafka.sink import KafkaSink
from oncely.kinds.rows import Form
from oncely.kinds.topic_destination import TopicDestination, kept_ms
from oncely.kinds.topic_publishing import TopicReplay


class KafkaDestination(TopicDestination[KafkaSink]):
    """Topics for records and rejects, and the ledger topic beside them."""

    given: KafkaSinkSettings

    output_key = target_key = "sink.topic"
    late_delete: str | None = (
        "a tombstone written late could delete newer records, for readers that keep the last record"
        " of a key"
    )

    @property
    def brokers(self) -> str:
        """Those of ``sink.brokers``, which may name another listener of the source's cluster."""
        return self.given.brokers or self.source.brokers

    @property
    def outputs(self) -> list[str]:
        """The topic of all records, if it is not named by a column."""
        return [self.given.topic] if self.given.topic else []

    @property
    def compacted(self) -> list[str]:
        """The ledger topic."""
        return [self.given.ledger_topic]

    @property
    def read_back(self) -> list[str]:
        """Dead letters are replayed."""
        return [self.given.rejects]

    def sink(self, schema: pa.Schema = NO_COLUMNS) -> KafkaSink:
        """The sink for rows of these columns."""
        given = self.given
        form = RecordFormat(
            schema, self._value(), given.topic, given.topic_column, given.key,
            keep_source=given.keep_source, decimals=given.decimals,
            source_timestamp=given.timestamp == "source",
            own_topics=frozenset({given.rejects, given.ledger_topic}),
        )  # fmt: skip
        return KafkaSink(
            self.pipeline_topics,
            form,
            given.rejects,
            create=given.create,
            headers=given.headers,
            by_batch=self.settings.by_spark,
            partitions=given.partitions,
            source_topics=self.settings.source.topics,
        )

    def form(self, schema: pa.Schema) -> Form:
        """Keys and values of messages."""
        sink = self.sink(schema)
        return form_of(sink.form, sink.limits)

    def check_replay(self) -> None:
        """Refuse a compacted topic: an old record would replace newer ones of its key."""
        self.refuse_cluster()
        with closing(self.sink()) as sink:
            refuse_compacted(sink, topics.described(sink.cluster.admin, self.outputs))

    def replaying(self, schema: pa.Schema) -> closing[TopicReplay]:
        """Begin a replay into the topics."""
        return closing(replay_into_topics(self.sink(schema).bind()))

    def check_rewrite(self, schema: pa.Schema, kind: RewriteKind) -> Mapping[str, str]:
        """Refuse all but a repair of lost records in a topic whose records name their sources."""
        del schema
        if self.given.topic is None:
            raise ConfigError(
                "sink.topic_column",
                "the topics that records were written to are not known",
                way_out="a pipeline with sink.topic can be repaired",
            )
        if not self.given.keep_source:
            raise ConfigError(
                "sink.keep_source",
                "is false: nothing tells which records of the topic a record has produced",
                way_out="records without the header can't be repaired; for a new topic set"
                " sink.keep_source = true",
            )
        if kind == "backfill":
            raise ConfigError(
                "sink.kind",
                "a record can't be replaced in a topic",
                way_out="write into a new topic",
            )
        self.refuse_cluster()
        with closing(KafkaRewrites(self.sink())) as rewrites:
            rewrites.check()
        return LACKS

    def rewriting(self, schema: pa.Schema, kind: RewriteKind) -> closing[KafkaRewrites]:
        """Begin a repair of lost records."""
        del kind
        return closing(KafkaRewrites(self.sink(schema).bind()))

    def check_sink(self, sink: KafkaSink) -> None:
        """Refuse unsuitable settings and topics, and columns without an encoding."""
        if len(sink.form.schema):
            sink.check()

    def facts(self, sink: KafkaSink, schema: pa.Schema, absent: Collection[str]) -> SinkFacts:
        """Topic and columns."""
        there = self.given.topic not in absent
        columns = tuple(self._columns(schema))
        return SinkFacts("topic", sink.pipeline_topics.brokers, sink.form.target, there, columns)

    def defeats(self, admin: KafkaAdmin, config: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
        """Notes on settings of topics that defeat those of the sink."""
        yield from super().defeats(admin, config)
        own, source = self.given.kafka, self.given.timestamp == "source"
        codec = own.get("compression.type", own.get("compression.codec"))
        for name, of in ((one, config[one]) for one in self.outputs if one in config):
            appended = of["message.timestamp.type"] == "LogAppendTime"
            told = (
                (source and appended, "message.timestamp.type", "sink.timestamp has no effect"),
                (source and not appended and kept_ms(of) < inf, "retention.ms",
                 'with sink.timestamp = "source" older records are soon deleted'),
                (codec and of["compression.type"] not in ("producer", codec), "compression.type",
                 f"the broker compresses again, and sink.kafka asks for {codec}"),
                (int(own.get("batch.size", 0)) > int(of["max.message.bytes"]), "max.message.bytes",
                 "sink.kafka.batch.size is lowered to it"),
            )  # fmt: skip
            yield from (f"topic {name} has {key} {of[key]}: {why}" for on, key, why in told if on)

    # -- parts -----------------------------------------------------------------------------

    def _value(self) -> Literal["json"] | AvroValue | RawValue:
        given = self.given
        if given.value == "json":
            return "json"
        if given.value != "avro" or given.schema_file is None:
            return RawValue(given.value)
        try:
            text = given.schema_file.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "sink.schema_file", f"can't be read: {error}", way_out="name an .avsc file"
            ) from None
        return AvroValue(text, given.schema_id)

    def refuse_cluster(self) -> None:
        """Refuse a sink on another cluster: two clusters share no transaction.

        Raises:
            ConfigError: ``sink.brokers`` leads to another cluster than ``source.brokers``.
        """
        if self.given.brokers is None:
            return
        here = self.source.identity().cluster_id
        source = replace(self.source, brokers=self.given.brokers, topics=())
        try:
            there = source.identity().cluster_id
        except OncelyError as error:
            way_out = error.way_out.replace("source.brokers", "sink.brokers")
            if isinstance(error, ConfigError):
                raise ConfigError("sink.brokers", error.message, way_out=way_out) from None
            raise type(error)(error.message, key="sink.brokers", way_out=way_out) from None
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
