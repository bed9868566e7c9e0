"""Files, and the topics that name them, as a pipeline's destination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa

from oncely.clients.files.filesystem import Connect as FilesConnect
from oncely.clients.files.filesystem import connect as connect_files
from oncely.clients.kafka import limits, topics
from oncely.clients.kafka.client import make
from oncely.config import FilesSinkSettings, JsonDecode, PipelineSettings
from oncely.core.batch import Reject
from oncely.decode.merging import Caps
from oncely.lake.file_format import FileFormat
from oncely.lake.partitions import parse_partition_by
from oncely.ledgers.topic.cluster import Connect, PipelineTopics
from oncely.pipeline.destination import Known, Replaying, SinkFacts, SinkPlan
from oncely.pipeline.problems import Check, Problems
from oncely.pipeline.topic_ledger import TopicLedger
from oncely.runtimes.spark.probe import Slots
from oncely.sinks.files.publication import Topics
from oncely.sinks.files.replay import ToFiles
from oncely.sinks.files.sink import FilesSink
from oncely.sinks.kafka.replay import Replay
from oncely.sources.kafka import KafkaSource

_PROBE = (
    "a probe was written below sink.url and removed: nothing else tells whether files may be"
    " written there"
)
_NESTED = (
    "sink.partition_by: a point in a name is taken as part of it; members of objects can't be"
    " partitioned by"
)


@dataclass(frozen=True)
class FilesDestination:
    """A root for files, and topics on the source's cluster.

    Attributes:
        settings: the pipeline's.
        given: its ``[sink]``.
        source: where records come from.
        connect: how Kafka's clients are made; a test puts faults here.
        files_connect: how the root is reached; likewise.
    """

    settings: PipelineSettings
    given: FilesSinkSettings
    source: KafkaSource
    connect: Connect = make
    files_connect: FilesConnect = connect_files

    @property
    def place(self) -> PipelineTopics:
        """Cluster, group and ledger topic."""
        return PipelineTopics(
            brokers=self.source.brokers,
            pipeline=self.settings.name,
            group=self.settings.mirror_group or f"oncely-{self.settings.name}",
            ledger_topic=self.given.ledger_topic,
            kafka=self.source.kafka,
            producer=self.given.kafka,
            transaction_timeout=self.given.transaction_timeout,
            connect=self.connect,
        )

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the rows."""
        return schema

    def sink(self, schema: pa.Schema) -> FilesSink:
        """The files for rows of these columns; inferred ones come as they are."""
        given = self.given
        form = FileFormat(
            given.format,
            parse_partition_by(given.partition_by),
            None if self._inferred else schema,
            given.target_file_size,
            self._caps,
        )
        return FilesSink(
            self.place,
            replace(given.store, connect=self.files_connect),
            form,
            Topics(given.manifest_topic, given.schemas),
            given.rejects,
            create=given.create,
            max_staging_age=given.max_staging_age,
        )

    @property
    def bare_sink(self) -> FilesSink:
        """The sink for work on the ledger alone."""
        return self.sink(pa.schema([]))

    def look(self) -> Known:
        """Read the ledger topic; one that was never created knows nothing."""
        return self._topics.look()

    def check(self, schema: pa.Schema) -> None:
        """Refuse a root that takes no files, columns that don't fit, and unfit topics."""
        with closing(self.sink(schema)) as sink:
            for _, check in self._checks(sink):
                check()

    def _checks(self, sink: FilesSink) -> Iterator[Check]:
        """What a run would refuse."""
        given = self.given
        yield "sink", sink.check
        if not self._has_ledger:
            return
        yield "sink.ledger_topic", self._check_ledger
        yield "sink.url", lambda: self._topics.check_target(sink.target)
        timeout = given.transaction_timeout
        yield "sink.transaction_timeout", lambda: limits.check_timeout(sink.cluster.asker, timeout)

    def rejects(self, limit: int) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and how many there are."""
        return self._topics.rejects(limit)

    @property
    def late_delete(self) -> str | None:
        """Files hold rows; a record without a value is none."""
        return None

    def check_replay(self) -> None:
        """Old records do no harm in files."""

    @contextmanager
    def replaying(self, schema: pa.Schema) -> Iterator[Replaying]:
        """Begin a replay into new files."""
        sink = self.sink(schema)
        sink.prepare()
        with closing(Replay(ToFiles(sink))) as under_way:
            yield under_way

    def plan(
        self,
        schema: pa.Schema | None,
        findings: Problems,
        notes: list[str],
        slots: Slots | None,  # noqa: ARG002 - the protocol's
    ) -> SinkPlan:
        """Look at root, topics and columns."""
        given, absent, facts = self.given, [], None
        with closing(self.bare_sink if schema is None else self.sink(schema)) as sink:
            findings.collect(self._checks(sink))
            notes.append(_PROBE)
            if self._inferred and any("." in one.column for one in sink.form.columns):
                notes.append(_NESTED)
            with findings.about("sink.manifest_topic"):
                absent = topics.missing(sink.cluster.asker, self._written)
                columns = () if schema is None or self._inferred else tuple(
                    (one.name, str(one.type), given.format) for one in schema
                )  # fmt: skip
                there = given.manifest_topic not in absent
                facts = SinkFacts("files", given.url, given.manifest_topic, there, columns)
        if given.url.startswith("file:") and not self.settings.spark.is_local:
            notes.append(f"{given.url} must be one folder that all machines of the cluster share")
        compacted = (given.manifest_topic, given.schemas, given.ledger_topic)
        return SinkPlan(
            facts,
            None,
            tuple(self._topics.commands(absent, compacted)),
            tuple(self._topics.acls(
                [given.manifest_topic, given.schemas, given.rejects],
                [given.manifest_topic, given.schemas, given.rejects],
                transactions=self._has_ledger,
            )),
        )  # fmt: skip

    # -- parts -----------------------------------------------------------------------------

    @property
    def _inferred(self) -> bool:
        decode = self.settings.decode
        return isinstance(decode, JsonDecode) and decode.inferred

    @property
    def _caps(self) -> Caps:
        decode = self.settings.decode
        if not isinstance(decode, JsonDecode):
            return Caps()
        return Caps(decode.max_fields, decode.max_depth, decode.max_name)

    @property
    def _topics(self) -> TopicLedger:
        return TopicLedger(self.place, self.given.rejects)

    def _check_ledger(self) -> None:
        """Refuse a ledger topic, a group or a manifest that this pipeline can't go on with."""
        outputs = (self.given.manifest_topic, self.given.schemas)
        self._topics.check(self.source.partitions(), outputs, create=self.given.create)

    @property
    def _has_ledger(self) -> bool:
        """Whether positions live in the ledger topic, moved by transactions."""
        return self.settings.offsets.store == "ledger"

    @property
    def _written(self) -> list[str]:
        """The topics that are written to."""
        return [t for t in self.given.topics if self._has_ledger or t != self.given.ledger_topic]
