"""The audit of a pipeline: its evidence and its topics, by the settings."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oncely.audit.by_identity import Window
from oncely.audit.compare import Rules
from oncely.audit.delta import DeltaGroups, DeltaOffsets
from oncely.audit.engine import ByGroup, ByOffset
from oncely.audit.evidence import Expected, Log
from oncely.audit.files import FilesEvidence
from oncely.audit.kafka import KafkaGroup
from oncely.audit.readers import check_audit, reader_of
from oncely.audit.report import Report
from oncely.audit.sql import SqlContent, SqlEvidence
from oncely.audit.topic import KafkaLog
from oncely.audit.upserts import Upsert
from oncely.config import PipelineSettings, load
from oncely.errors import ConfigError, OncelyError, WrongInput
from oncely.kafka.records import in_words, shown
from oncely.secrets import scope

if TYPE_CHECKING:
    from oncely.audit.readers import Found


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
