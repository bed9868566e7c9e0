"""``oncely plan``: everything that can be checked without writing, and what a run would do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely import artifacts
from oncely.core.topics import TopicPartition
from oncely.errors import OncelyError, Unavailable
from oncely.ledgers.same_source import same_topics
from oncely.pipeline.destination import Connections, Known, SinkFacts
from oncely.pipeline.guarantee import Guarantee, guarantee_of
from oncely.pipeline.problems import Problem, Problems
from oncely.runtimes.same_log import refuse_cut
from oncely.runtimes.spark import session
from oncely.runtimes.spark.probe import ExecutorFacts, Slots, probe
from oncely.sources.kafka import Watermarks
from oncely.sources.permissions import missing_permissions, needed_acls

if TYPE_CHECKING:
    from oncely.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class SourceFacts:
    """The topics as they are now."""

    cluster_id: str
    topics: Mapping[str, str]
    partitions: int
    offsets: int
    """Between where the next start would begin and the end; holes count."""
    begins: str


@dataclass(frozen=True)
class Plan:
    """The answer to ``oncely plan``; what could not be found out is None or empty."""

    name: str
    guarantee: Guarantee
    problems: tuple[Problem, ...] = ()
    source: SourceFacts | None = None
    epoch: int = 0
    sink: SinkFacts | None = None
    connections: Connections | None = None
    executors: tuple[ExecutorFacts, ...] | None = None
    ddl: tuple[str, ...] = ()
    acls: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 when it can run, 2 when something has to be changed, 1 when a server is away."""
        if not self.problems:
            return 0
        return 2 if any(one.wrong_input for one in self.problems) else 1

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        done = asdict(self)
        if self.connections is not None:
            done["connections"]["total"] = self.connections.total
        if self.sink is not None:
            done["sink"]["columns"] = [
                dict(zip(("name", "rows", "table"), one, strict=True)) for one in self.sink.columns
            ]
        return {"can_run": not self.problems, **done}


def plan(pipeline: Pipeline, use_spark: bool | None) -> Plan:
    """See :meth:`oncely.pipeline.Pipeline.plan`."""
    return _Planner(pipeline, use_spark).plan()


class _Planner:
    """Asks source, code, Spark and sink one after another."""

    def __init__(self, pipeline: Pipeline, use_spark: bool | None) -> None:
        self.pipeline, self.settings = pipeline, pipeline.settings
        self.use_spark = self._spark_is_in_question() if use_spark is None else use_spark
        self.findings = Problems()
        self.notes: list[str] = []
        self.known: Known | None = None
        self.slots: Slots | None = None

    def plan(self) -> Plan:
        with self.findings.about(self._sink_key):
            self.known = self.pipeline.destination.look()
        with self.findings.about("spark"):
            artifacts.java()
        source = self._source()
        schema = self._schema()
        sink = self.pipeline.destination.plan(schema, self.findings, self.notes, self.slots)
        return Plan(
            name=self.settings.name,
            guarantee=guarantee_of(self.settings),
            problems=tuple(self.findings.problems),
            source=source,
            epoch=self.known.epoch if self.known else 0,
            sink=sink.facts,
            connections=sink.connections,
            executors=None if self.slots is None else self.slots.executors,
            ddl=sink.statements,
            acls=(
                *needed_acls(self.pipeline.source, self.settings.shown_group),
                *sink.acls,
            ),
            notes=tuple(self.notes),
            settings=self.settings.describe(),
        )

    @property
    def _sink_key(self) -> str:
        """The key of the file that says where the sink is."""
        return "sink.brokers" if self.settings.sink.kind == "kafka" else "sink.url"

    # -- source ----------------------------------------------------------------------------

    def _source(self) -> SourceFacts | None:
        """Brokers, topics, permissions, and whether the ledger's positions lie in the log."""
        pipeline, facts = self.pipeline, None
        with self.findings.about("source.brokers"):
            identity = pipeline.source.identity()
            for one in missing_permissions(pipeline.source, self.settings.shown_group):
                if "lag tools" in one:
                    self.notes.append(f"the broker does not permit {one}")
                else:
                    self.findings.add("source.topics", f"the broker does not permit {one}",
                                      "grant it with the kafka-acls commands below")  # fmt: skip
            marks = pipeline.source.watermarks()
            positions = dict(self.known.positions) if self.known else {}
            begins = f"where epoch {self.known.epoch} has ended" if self.known else ""
            if not positions:
                positions = pipeline.source.resolve_start(self.settings.source.start)
                begins = f"{self.settings.source.start} (first start)"
            offsets = sum(max(0, m.stable - positions.get(tp, m.low)) for tp, m in marks.items())
            facts = SourceFacts(
                identity.cluster_id, dict(identity.topic_ids), len(marks), offsets, begins
            )
            self._in_the_log(positions, marks)
        if self.known is not None and self.known.cluster_id is not None and facts is not None:
            with self.findings.about("source.topics"):
                same_topics(self.known.topic_ids, identity, self.settings.name)
                if self.known.cluster_id == identity.cluster_id:
                    self._same_log(self.known, marks)
            if self.known.cluster_id != identity.cluster_id:
                self.findings.add(
                    "source.brokers",
                    f"the ledger was written for cluster {self.known.cluster_id},"
                    f" this is {identity.cluster_id}",
                    "point source.brokers back, or give the pipeline a new name",
                )
        return facts

    def _in_the_log(
        self, positions: Mapping[TopicPartition, int], marks: Mapping[TopicPartition, Watermarks]
    ) -> None:
        for tp, at in sorted(positions.items()):
            if tp not in marks:
                continue
            if at > marks[tp].high:
                self.findings.add(
                    "source.topics",
                    f"{tp} ends at {marks[tp].high}, the ledger has read up to {at}",
                    "restore the topic, or move the position with `oncely offsets reset`",
                )
            elif at < marks[tp].low:
                lost = f"{tp}: offsets [{at}, {marks[tp].low}) left the topic before they were read"
                if self.settings.source.on_gap == "fail":
                    self.findings.add("source.on_gap", lost, 'on_gap = "record" goes on')
                else:
                    self.notes.append(f"{lost}; on_gap records it and goes on")

    def _same_log(self, known: Known, marks: Mapping[TopicPartition, Watermarks]) -> None:
        """The check of leader epochs that a run makes when it opens."""
        if not known.leaders:
            return
        inside = {
            tp: at
            for tp, at in known.positions.items()
            if tp in marks and marks[tp].low <= at <= marks[tp].high
        }
        source = self.pipeline.source
        refuse_cut(source, source.leader_epochs(), inside, known.leaders)

    # -- code ------------------------------------------------------------------------------

    def _spark_is_in_question(self) -> bool:
        conf = self.settings.spark.spark_conf()
        return (
            not self.settings.spark.is_local
            or self.pipeline.spark_path is not None
            or "spark.pyspark.python" in conf
        )

    def _schema(self) -> pa.Schema | None:
        """Decoder, transform and executors; the columns of the rows when all is well."""
        pipeline, schema = self.pipeline, None
        with self.findings.about("decode"):
            pipeline.decoder  # noqa: B018 - made here for the first time
        if any(one.key.startswith("decode") for one in self.findings.problems):
            return None
        with self.findings.about("transform"):
            pipeline.spark_transform  # noqa: B018 - imported here for the first time
            if pipeline.spark_path is None:
                schema = pipeline.row_schema()
            else:
                pipeline.refuse_keep_source()
        if not self.use_spark:
            self._say_what_spark_would_tell()
            return schema
        return self._ask_spark() or schema

    def _say_what_spark_would_tell(self) -> None:
        if self.pipeline.spark_path is not None:
            self.notes.append(
                "without Spark the transform's columns are not known: table unchecked"
            )
        if not self.settings.spark.is_local:
            self.notes.append("without Spark the executors were not asked what they can import")

    def _ask_spark(self) -> pa.Schema | None:
        schema = None
        with self.findings.about("spark.master"):
            spark = _start(self.pipeline)
            try:
                self.slots = probe(spark, self._functions())
                self._executor_problems(self.slots)
                if self.pipeline.spark_path is not None and not self.findings.problems:
                    with self.findings.about("transform.spark"):
                        schema = self.pipeline.row_schema(spark)
            finally:
                session.stop(spark)
        return schema

    def _functions(self) -> list[str]:
        transform = self.settings.transform
        return [one for one in (transform.python, transform.spark) if one] if transform else []

    def _executor_problems(self, slots: Slots) -> None:
        way_out = "install the same packages for the executors' Python (spark.pyspark.python)"
        if slots.problem:
            self.findings.add("spark.master", f"a task fails: {slots.problem}", way_out)
        for one in slots.executors:
            for missing in one.missing:
                self.findings.add("spark.master", f"{one.host}, {one.python}: {missing}", way_out)


def _start(pipeline: Pipeline) -> Any:
    """Spark for questions, its noise thrown away.

    Raises:
        Unavailable: it did not start.
    """
    with open(os.devnull, "ab") as nowhere:
        try:
            return pipeline.start_spark(nowhere)
        except OncelyError:
            raise
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            raise Unavailable(f"Spark did not start: {''.join(first)}") from None
