"""``oncely plan``: all checks that write nothing, and the effects of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely import artifacts, extras
from oncely.config.secrecy import unprotected
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, OncelyError, Unavailable, WrongInput
from oncely.extras import WITHOUT_SPARK, require
from oncely.kafka.source import Watermarks, missing_permissions, needed_acls, refuse_cut
from oncely.kinds.destination import (
    LOST_WAY_OUT,
    NO_COLUMNS,
    Connections,
    Inspection,
    LedgerState,
    PlanProblem,
    SinkFacts,
    SinkPlan,
    TopicPlan,
)
from oncely.kinds.tables import keeps_source
from oncely.pipeline.guarantee import Guarantee, guarantee_of, refuse_spark, refuse_unfit
from oncely.secrets import redact
from oncely.stores.document import same_topics

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts
    from oncely.pipeline.trial import Trial
    from oncely.runtimes.spark.session import ExecutorFacts, Slots


_EACH_MACHINE = (
    "needs the same packages, in a Python at the same path (spark.pyspark.python), a way to the"
    " brokers, and the files that [source.kafka] names"
)


def unchecked(pipeline: Parts, *, asked: bool) -> list[str]:
    """The preconditions of a pipeline that ``plan`` has not checked.

    Args:
        pipeline: the pipeline.
        asked: executors were asked.
    """
    settings, transform = pipeline.settings, pipeline.settings.transform
    cluster = settings.on_cluster
    beside = bool(pipeline.threads or pipeline.drops or (transform and transform.python))
    every = (
        (not asked and pipeline.spark_path is not None,
         "without Spark the transform's columns are not known: table unchecked"),
        (cluster and not asked,
         f"without Spark the executors were not checked: each machine {_EACH_MACHINE}"),
        (cluster and asked,
         f"executors were checked; a machine that has none yet {_EACH_MACHINE}"),
    )  # fmt: skip
    own = pipeline.kind.unchecked(pipeline, beside)
    return [text for applies, text in (*every, (bool(own), own)) if applies]


@dataclass(frozen=True)
class SourceFacts:
    """The present state of the topics."""

    cluster_id: str
    topics: Mapping[str, str]
    partitions: int
    offsets: int
    """Offsets between the next start position and the end, including holes."""
    begins: str


@dataclass(frozen=True)
class Impossible:
    """An operation that this pipeline does not permit.

    Attributes:
        operation: a command, which may name the kind of damage; or ``transform.spark``.
        key, reason, way_out: of the error with which it refuses; a kind of damage has only a
            reason.
    """

    operation: str
    key: str
    reason: str
    way_out: str


@dataclass(frozen=True)
class Plan:
    """The result of ``oncely plan``; unknown values are None or empty."""

    name: str
    guarantee: Guarantee
    problems: tuple[PlanProblem, ...] = ()
    source: SourceFacts | None = None
    epoch: int = 0
    sink: SinkFacts | None = None
    connections: Connections | None = None
    executors: tuple[ExecutorFacts, ...] | None = None
    ddl: tuple[str, ...] = ()
    topics: tuple[TopicPlan, ...] = ()
    acls: tuple[str, ...] = ()
    denied: bool = False
    notes: tuple[str, ...] = ()
    impossible: tuple[Impossible, ...] = ()
    sample: Trial | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 if it can run, 2 if it needs changes, 1 if a server does not answer."""
        if not self.problems:
            return 0
        return 2 if any(one.wrong_input for one in self.problems) else 1

    def as_json(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        done = asdict(self)
        if not self.impossible:
            del done["impossible"]
        if self.connections is not None:
            done["connections"]["total"] = self.connections.total
        if self.sink is not None:
            done["sink"]["columns"] = [
                dict(zip(("name", "rows", "table"), one, strict=True)) for one in self.sink.columns
            ]
        return {"can_run": not self.problems, **done}


def plan(pipeline: Parts, use_spark: bool | None, sample: int = 0) -> Plan:
    """See :meth:`oncely.pipeline.Pipeline.plan`."""
    return _Planner(pipeline, use_spark, sample).plan()


class _Planner:
    """Checks source, code, Spark and sink in sequence."""

    def __init__(self, pipeline: Parts, use_spark: bool | None, sample: int) -> None:
        self.sample = sample
        self.pipeline, self.settings = pipeline, pipeline.settings
        self.use_spark = self._spark_is_in_question() if use_spark is None else use_spark
        self.inspection = Inspection()
        self.known: LedgerState | None = None
        self.unanswered = False

    def plan(self) -> Plan:
        with self.inspection.about(self._sink_key):
            try:
                self.known = self.pipeline.destination.look()
            except (Unavailable, ConfigError) as error:
                # The server would not answer the next questions, too, and each takes its timeout.
                self.unanswered = isinstance(error, self.pipeline.kind.silent_after)
                raise
        if self.known is not None:
            with self.inspection.about("source.start"):
                self.pipeline.refuse_future_start(self.known)
        if self.settings.runtime == "spark":
            self._requirements_of_spark()
        if slower := extras.absence():
            self.inspection.notes.append(slower)
        self.inspection.notes += unprotected(self.settings)
        source = None if self._source_is_silent else self._source()
        schema = self._schema()
        # Before the sink is asked: its own problem may name decode.schema, too.
        decodes = not self._refused("decode", "transform")
        slots = self.inspection.slots
        sink = SinkPlan()
        if not self.unanswered:
            columns = NO_COLUMNS if schema is None else schema
            sink = self.pipeline.destination.plan(columns, self.inspection)
        self.inspection.notes += unchecked(self.pipeline, asked=slots is not None)
        tried = self._tried() if self.sample and decodes and source is not None else None
        return Plan(
            name=self.settings.name,
            guarantee=guarantee_of(self.settings),
            problems=tuple(self.inspection.problems),
            source=source,
            epoch=self.known.epoch if self.known else 0,
            sink=sink.facts,
            connections=sink.connections,
            executors=None if slots is None else slots.executors,
            ddl=sink.statements,
            topics=sink.topics,
            acls=(
                *needed_acls(self.pipeline.source, self.settings.shown_group),
                *sink.acls,
            ),
            denied=self.inspection.denied,
            notes=tuple(self.inspection.notes),
            impossible=tuple(self._impossible(schema)),
            sample=tried,
            settings=self.settings.describe(),
        )

    def _impossible(self, schema: pa.Schema | None) -> Iterator[Impossible]:
        """What the commands would refuse; not what the plan names as a problem."""
        told = {one.message for one in self.inspection.problems}
        for operation, *checks in self._operations(schema):
            try:
                found = [check() for check in checks]
            except WrongInput as error:
                problem, way_out = redact(error.problem), redact(error.way_out)
                if problem not in told:
                    yield Impossible(operation, error.key, problem, way_out)
            except OncelyError:  # no answer: not known
                pass
            else:
                lacks = found[0] if isinstance(found[0], Mapping) else {}
                for kind, reason in lacks.items():
                    yield Impossible(f"{operation} of {kind} records", "", reason, "")

    def _operations(self, schema: pa.Schema | None) -> Iterator[tuple[Any, ...]]:
        """The operations, each with what refuses it; without those that would ask a silent server
        or need columns that are not known."""
        from oncely.audit.readers import check_audit
        from oncely.pipeline.guarantee import check_rewrite

        settings, to = self.settings, self.pipeline.destination
        kept = not settings.by_spark and (schema is None or keeps_source(schema))
        audits = partial(check_audit, settings, offsets=kept)
        sink = partial(to.sink, pa.schema([]) if schema is None else schema)
        yield "oncely run", sink
        yield "oncely work", partial(refuse_unfit, settings), sink
        if not self.unanswered:
            yield "oncely rejects replay", to.check_replay
            yield "oncely rejects discard", to.discarding
            if schema is not None or settings.by_spark:
                yield "oncely repair", partial(check_rewrite, self.pipeline, "repair"), audits
                yield "oncely backfill", partial(check_rewrite, self.pipeline, "backfill")
        yield "oncely audit", audits
        yield "transform.spark", partial(refuse_spark, settings)

    @property
    def _sink_key(self) -> str:
        """The key of the pipeline file for the server of the sink's ledger."""
        return self.pipeline.kind.ledger_key(self.settings.sink)

    @property
    def _source_is_silent(self) -> bool:
        """True if the brokers of the source were asked for the ledger, and did not answer."""
        ledger = self.settings.offsets.store == "ledger"
        return self.unanswered and ledger and self._sink_key == "source.brokers"

    # -- source ----------------------------------------------------------------------------

    def _source(self) -> SourceFacts | None:
        """Check brokers, topics, permissions, and that the ledger's positions are in the log."""
        pipeline, facts = self.pipeline, None
        with self.inspection.about("source.brokers"):
            pipeline.source.check_properties()
            identity = pipeline.source.identity()
            for one in missing_permissions(pipeline.source, self.settings.shown_group):
                if one.shows_only:
                    self.inspection.notes.append(f"the broker does not permit {one.text}")
                else:
                    self.inspection.add("source.topics", f"the broker does not permit {one.text}",
                                      "grant it with the kafka-acls commands below")  # fmt: skip
                    self.inspection.denied = True
            marks = pipeline.source.watermarks()
            positions = dict(self.known.positions) if self.known else {}
            begins = f"where epoch {self.known.epoch} has ended" if self.known else ""
            if not positions:
                positions = pipeline.source.resolve_start(self.settings.source.start)
                begins = f"{self.settings.source.start} (first start)"
            if self.known is not None and self.known.lost:
                self.inspection.add("offsets.store", self.known.lost, LOST_WAY_OUT)
                begins = ""
            offsets = sum(max(0, m.stable - positions.get(tp, m.low)) for tp, m in marks.items())
            facts = SourceFacts(
                identity.cluster_id, dict(identity.topic_ids), len(marks), offsets, begins
            )
            self._in_the_log(positions, marks)
            with suppress(OncelyError):  # of a user who may not describe configurations
                self.inspection.notes += pipeline.source.too_large()
        if self.known is not None and self.known.cluster_id is not None and facts is not None:
            with self.inspection.about("source.topics"):
                same_topics(self.known.topic_ids, identity, self.settings.name)
                if self.known.cluster_id == identity.cluster_id:
                    self._same_log(self.known, marks)
            if self.known.cluster_id != identity.cluster_id:
                self.inspection.add(
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
                self.inspection.add(
                    "source.topics",
                    f"{tp} ends at {marks[tp].high}, the ledger has read up to {at}",
                    "restore the topic, or move the position with `oncely offsets reset`",
                )
            elif at < marks[tp].low:
                lost = (
                    f"{tp}: offsets [{at}, {marks[tp].low}) were deleted from the topic before they"
                    " were read"
                )
                if self.settings.source.on_gap == "fail":
                    self.inspection.add("source.on_gap", lost, 'on_gap = "record" continues')
                else:
                    self.inspection.notes.append(f"{lost}; on_gap records it and continues")

    def _same_log(self, known: LedgerState, marks: Mapping[TopicPartition, Watermarks]) -> None:
        """The check of leader epochs that a run makes at its start."""
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

    def _requirements_of_spark(self) -> None:
        packages = partial(require, "spark", "spark", "a run on Spark", WITHOUT_SPARK)
        for check in (packages, artifacts.java):
            with self.inspection.about("spark"):
                try:
                    check()
                except WrongInput as error:
                    if not _fits_a_worker(self.pipeline):
                        raise
                    self.inspection.notes.append(
                        'for `oncely run`, unless runtime is "processes", but not for'
                        f" `oncely work`: {error.message}"
                    )

    def _spark_is_in_question(self) -> bool:
        conf = self.settings.spark.spark_conf()
        return self.settings.runtime == "spark" and (
            not self.settings.spark.is_local
            or self.pipeline.spark_path is not None
            or "spark.pyspark.python" in conf
        )

    def _schema(self) -> pa.Schema | None:
        """Check decoder, transform and executors; the columns of the rows if there is no
        problem."""
        pipeline, schema = self.pipeline, None
        with self.inspection.about("decode"):
            pipeline.decoder  # noqa: B018 - made here for the first time
        if self._refused("decode"):
            return None
        with self.inspection.about("transform"):
            pipeline.spark_transform  # noqa: B018 - imported here for the first time
            if pipeline.spark_path is None:
                schema = pipeline.transformed_schema()
            else:
                pipeline.refuse_keep_source()
        if schema is not None and not self.unanswered:
            with self.inspection.about(self._sink_key):
                schema = pipeline.destination.row_schema(schema)
        of_spark = self._ask_spark() if self.use_spark else None
        return schema if of_spark is None else of_spark

    def _refused(self, *keys: str) -> bool:
        """True if there is a problem of one of these keys, or below it."""
        return any(one.key.startswith(keys) for one in self.inspection.problems)

    def _tried(self) -> Trial | None:
        """The outcome of a sample; None if it can't be decoded."""
        from oncely.pipeline.trial import trial

        with self.inspection.about("decode"):
            return trial(self.pipeline, self.sample)
        return None

    def _ask_spark(self) -> pa.Schema | None:
        from oncely.runtimes.spark import session
        from oncely.runtimes.spark.session import probe, refusals

        schema = None
        with self.inspection.about("spark.master"):
            spark = _start(self.pipeline)
            try:
                self.inspection.slots = slots = probe(spark, self._functions())
                self._executor_problems(slots)
                if not self.inspection.problems:
                    self._kafka_problems(refusals(spark, self.pipeline.source))
                if self.pipeline.spark_path is not None and not self.inspection.problems:
                    with self.inspection.about("transform.spark"):
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
            self.inspection.add("spark.master", f"a task fails: {slots.problem}", way_out)
        for one in slots.executors:
            for missing in one.missing:
                self.inspection.add("spark.master", f"{one.host}, {one.python}: {missing}", way_out)

    def _kafka_problems(self, refused: Sequence[tuple[str, str]]) -> None:
        way_out = (
            "executors fetch records themselves: let them reach the brokers by the addresses that"
            " these advertise, and have the files of [source.kafka] at the same paths"
        )
        for host, why in refused:
            self.inspection.add("source", f"an executor on {host} can't read Kafka: {why}", way_out)


def _fits_a_worker(pipeline: Parts) -> bool:
    try:
        refuse_unfit(pipeline.settings)
    except ConfigError:
        return False
    return True


def _start(pipeline: Parts) -> Any:
    """A Spark session for checks, with its output discarded.

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
