"""The audit of a pipeline: its evidence and its topics, by the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import pyarrow as pa

from oncely.audit.by_identity import (
    Window,
    database,
    sqlite_rows,
    table_of_delta,
    topic_rows,
    window_of_database,
    window_of_delta,
    window_of_files,
    window_of_topics,
)
from oncely.audit.compare import Rules
from oncely.audit.delta import DeltaGroups, DeltaOffsets, open_delta
from oncely.audit.engine import ByGroup, ByOffset
from oncely.audit.evidence import Evidence, Expected, Log
from oncely.audit.files import FilesEvidence, open_files
from oncely.audit.kafka import KafkaGroup, open_kafka
from oncely.audit.report import Report
from oncely.audit.spec import Dataset
from oncely.audit.sql import SqlContent, SqlEvidence, open_evidence
from oncely.audit.topic import KafkaLog
from oncely.audit.upserts import Upsert
from oncely.config import PipelineSettings, load
from oncely.errors import ConfigError, OncelyError, WrongInput
from oncely.kafka.records import in_words, shown
from oncely.secrets import scope
from oncely.stores.sql.dialects import dialect_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Found = Evidence | FilesEvidence | DeltaGroups | KafkaGroup | SqlContent
Rows = Callable[["SparkSession", PipelineSettings, Callable[[], pa.Schema], Path], "DataFrame"]


class Audited(Protocol):
    """What an audit takes of a pipeline: :class:`oncely.Pipeline` has it."""

    @property
    def settings(self) -> PipelineSettings:
        """The settings of the pipeline file."""

    @property
    def expected(self) -> Expected | None:
        """Recomputes records; None if rows belong to no single record."""


def audit(
    pipeline: str | Path | Audited,
    *,
    limit: int = 50,
    until: datetime | None = None,
    log: Log | None = None,
    download: bool = False,
) -> Report:
    """Compare a pipeline's topics with its destination. Writes nothing; the pipeline may run.

    Args:
        pipeline: the pipeline; or its file, and then records are not recomputed.
        limit: the findings of each kind that the report lists.
        until: compare only records before this time.
        log: the topics; it is left open. A new one by default.
        download: read the rows of files and Delta tables, whose number is compared otherwise.

    Raises:
        ConfigError: this pipeline can't be audited; or the file is invalid.
        WrongInput: a topic or table is missing, or may not be read.
        Unavailable: a server does not answer.
    """
    if isinstance(pipeline, str | Path):
        settings, expected = load(pipeline), None
    else:
        settings, expected = pipeline.settings, pipeline.expected
    with scope(settings.secrets):
        try:
            if log is not None:
                return _audited(settings, log, expected, limit, until, download)
            with closing(log_of(settings)) as own:
                return _audited(settings, own, expected, limit, until, download)
        except OncelyError as error:
            error.hide(settings.secrets)
            raise


def with_records(report: Report, settings: PipelineSettings, log: Log) -> Report:
    """The report with the destination, and with keys and values that the topics still have."""
    found: dict[object, tuple[str | None, ...]] = {}
    for tp, end in ((one.partition, one.end) for one in report.partitions):
        offsets = [one.offset for one in report.findings if one.partition == tp]
        wanted = [at for at in offsets if at is not None and at < end]
        for at, message in (log.messages(tp, wanted) if wanted else {}).items():
            found[tp, at] = in_words(shown(message.key())), in_words(shown(message.value()))
    findings = [
        replace(one, record=found.get((one.partition, one.offset), ())) for one in report.findings
    ]
    return replace(report, findings=findings, destination=settings.target)


def log_of(settings: PipelineSettings) -> KafkaLog:
    """The topics of a pipeline."""
    source = settings.source
    return KafkaLog(source.brokers, source.topics, source.kafka_properties())


def _audited(
    settings: PipelineSettings,
    log: Log,
    expected: Expected | None,
    limit: int,
    until: datetime | None,
    download: bool,
) -> Report:
    recomputing = nullcontext() if expected is None else closing(expected)
    with recomputing, closing(evidence_of(settings, expected, download=download)) as evidence:
        if isinstance(evidence, FilesEvidence | DeltaGroups | KafkaGroup | SqlContent):
            if isinstance(evidence, SqlContent) and until is not None:
                raise WrongInput(
                    "rows without offsets can't be compared up to a time",
                    way_out="audit the whole table, without --until",
                )
            transforms = settings.transform is not None
            rules = Rules(several=transforms, filters=transforms or settings.filter.drops)
            return ByGroup(settings.name, evidence, log, expected, limit, rules).run(until)
        sink: Any = settings.sink
        comparison = ByOffset(settings.name, evidence, log, expected, limit)
        if isinstance(evidence, SqlEvidence | DeltaOffsets) and sink.mode == "upsert":
            comparison = Upsert(settings.name, evidence, log, expected, limit, sink.version)
        if expected is not None and expected.unfit:
            unfit = f"no record was decoded, as the table does not accept its row: {expected.unfit}"
            comparison.notes.append(unfit)
        report = comparison.run(until)
        if expected is not None and expected.unfit:
            report = _refused(report, expected.unfit)
        if report.found and isinstance(evidence, DeltaOffsets):
            return replace(report, limits=[*report.limits, *evidence.blames])
        return report


def _refused(report: Report, unfit: str) -> Report:
    """Lost records with the reason why their rows can't be written now."""
    told = [
        replace(one, detail=f"{one.detail}; no row can be written now: {unfit}")
        if one.kind == "lost" else one
        for one in report.findings
    ]  # fmt: skip
    return replace(report, findings=told)


def evidence_of(
    settings: PipelineSettings, expected: Expected | None = None, *, download: bool = False
) -> Found:
    """A snapshot of the pipeline's destination.

    Args:
        settings: the pipeline's.
        expected: knows the columns of today's rows, for a history without digests.
        download: read the rows of files and Delta tables.

    Raises the errors of :func:`check_audit`, and those of the kind's reader.
    """
    found = check_audit(settings).evidence(settings, expected, download)
    if isinstance(found, SqlContent | DeltaGroups):
        try:
            check_audit(settings, offsets=False)
        except WrongInput:
            found.close()
            raise
    return found


def check_audit(settings: PipelineSettings, *, offsets: bool = True) -> Reader:
    """Refuse a pipeline that can't be audited; asks no server.

    Args:
        settings: the pipeline's.
        offsets: False if a table lacks the columns with the offsets of records.

    Raises:
        ConfigError: positions and rows are in two stores, or there is no evidence of this sink.
        WrongInput: rows of an upsert do not contain the offsets of their records.
    """
    if settings.offsets.store != "ledger":
        raise ConfigError(
            "offsets.store",
            f"the positions are in {settings.offsets.store}, not beside the rows: no snapshot shows"
            " both, so nothing can be compared",
            way_out="an audit needs the sink's own ledger",
        )
    reader = reader_of(settings)
    reader.check(settings, offsets)
    return reader


def window_of(settings: PipelineSettings) -> Window:
    """Read the ledger of a pipeline.

    Raises:
        ConfigError: the ledger of this sink can't be read, or is not beside the rows.
        WrongInput: the pipeline never ran, or its ledger may not be read.
        Unavailable: no answer.
    """
    if settings.offsets.store != "ledger":
        raise ConfigError(
            "offsets.store",
            f"the positions are in {settings.offsets.store}, not beside the rows",
            way_out="compare topic and destination with --left and --right",
        )
    return reader_of(settings).window(settings)


def _no_rows(*_: object) -> NoReturn:
    raise ConfigError(
        "sink.kind",
        "an audit can't tell what handlers have written for a record",
        way_out="`oncely verify` checks the ledger; --left and --right compare topic and table",
    )


def _table(settings: PipelineSettings, expected: Expected | None, _: bool) -> Evidence | SqlContent:
    sink: Any = settings.sink
    dialect = dialect_for(sink.url.get_secret_value(), sink.connect_timeout)
    offsets = sink.keep_source is not False and not settings.by_spark
    recipe = "" if expected is None else expected.recipe
    return open_evidence(settings.name, dialect, sink.table, offsets=offsets, recipe=recipe)


def _check_rows(settings: PipelineSettings, offsets: bool) -> None:
    sink: Any = settings.sink
    if sink.mode == "upsert" and not offsets:
        raise WrongInput(
            f"{sink.target} does not contain the offsets of its rows, and without them the"
            " rows of an upsert can't be told apart",
            key="sink.table" if hasattr(sink, "table") else "sink.url",
            way_out="add the columns kafka_topic, kafka_partition and kafka_offset, and read the"
            " topic again: `oncely offsets reset FILE --to-earliest --execute`; or compare by --id",
        )


def _check_topic(settings: PipelineSettings, offsets: bool) -> None:
    del offsets
    sink: Any = settings.sink
    if sink.topic is None:
        raise ConfigError(
            "sink.topic_column",
            "an audit is not possible: the topics that records were written to are not known",
            way_out="audit a pipeline with sink.topic",
        )


@dataclass(frozen=True)
class Reader:
    """How an audit reads a kind of destination: without the code of the kind.

    Attributes:
        evidence: a snapshot of the rows and the ledger. It takes the settings, what knows the
            columns of today's rows, and whether rows of files are read.
        window: the ledger, for a comparison by identity.
        check: refuses a pipeline whose destination it can't compare. It takes the settings, and
            whether rows of a table contain the offsets of their records.
        dataset: the destination for Spark's own readers, by ``[sink]``; None if none of them gives
            its rows.
        rows: its present rows, where Spark has no reader. It takes the session, the settings, the
            columns of the rows, and a folder for files. None: :func:`oncely.files.read` gives them.
    """

    evidence: Callable[[PipelineSettings, Expected | None, bool], Found]
    window: Callable[[PipelineSettings], Window]
    check: Callable[[PipelineSettings, bool], None] = lambda *_: None
    dataset: Callable[[Any], Dataset | None] = lambda _: None
    rows: Rows | None = None


READERS: Mapping[str, Reader] = {
    "sql": Reader(_table, window_of_database, _check_rows, database, sqlite_rows),
    "kafka": Reader(
        lambda settings, *_: open_kafka(settings), window_of_topics, _check_topic, rows=topic_rows
    ),
    "files": Reader(
        lambda settings, _, download: open_files(settings, download=download), window_of_files
    ),
    "delta": Reader(
        lambda settings, _, download: open_delta(settings, download=download),
        window_of_delta,
        _check_rows,
        table_of_delta,
    ),
    "handlers": Reader(_no_rows, window_of_database, _no_rows, rows=_no_rows),
}
"""By the kind of the destination."""


def reader_of(settings: PipelineSettings) -> Reader:
    """The reader of the pipeline's destination.

    Raises:
        ConfigError: it is of a kind that another package has added.
    """
    kind = settings.sink.kind
    if kind in READERS:
        return READERS[kind]
    way_out = f"what {', '.join(READERS)} have written can be audited"
    raise ConfigError("sink.kind", f"no audit can read {kind}", way_out=way_out)
