"""The readers of an audit, by the kind of the destination; and the pipelines that no audit can
compare. A reader's modules are imported when it reads: a plan asks for the refusals alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from oncely.config import PipelineSettings
from oncely.errors import ConfigError, WrongInput
from oncely.stores.sql.dialects import dialect_for

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from oncely.audit.by_identity import Window
    from oncely.audit.delta import DeltaGroups
    from oncely.audit.evidence import Evidence, Expected
    from oncely.audit.files import FilesEvidence
    from oncely.audit.kafka import KafkaGroup
    from oncely.audit.spec import Dataset
    from oncely.audit.sql import SqlContent

    Found: TypeAlias = Evidence | FilesEvidence | DeltaGroups | KafkaGroup | SqlContent
    Rows: TypeAlias = Callable[
        [SparkSession, PipelineSettings, Callable[[], pa.Schema], Path], DataFrame
    ]


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


def _no_rows(*_: object) -> NoReturn:
    raise ConfigError(
        "sink.kind",
        "an audit can't tell what handlers have written for a record",
        way_out="`oncely verify` checks the ledger; --left and --right compare topic and table",
    )


def _table(settings: PipelineSettings, expected: Expected | None, _: bool) -> Evidence | SqlContent:
    from oncely.audit.sql import open_evidence

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


def _late(name: str) -> Callable[..., Any]:
    """A function that is imported when it is called."""

    def called(*given: Any, **named: Any) -> Any:
        return resolve_name(f"oncely.audit.{name}")(*given, **named)

    return called


_DATABASE = _late("by_identity:window_of_database")

READERS: Mapping[str, Reader] = {
    "sql": Reader(
        _table,
        _DATABASE,
        _check_rows,
        _late("by_identity:database"),
        _late("by_identity:sqlite_rows"),
    ),
    "kafka": Reader(
        lambda settings, *_: _late("kafka:open_kafka")(settings),
        _late("by_identity:window_of_topics"),
        _check_topic,
        rows=_late("by_identity:topic_rows"),
    ),
    "files": Reader(
        lambda settings, _, download: _late("files:open_files")(settings, download=download),
        _late("by_identity:window_of_files"),
    ),
    "delta": Reader(
        lambda settings, _, download: _late("delta:open_delta")(settings, download=download),
        _late("by_identity:window_of_delta"),
        _check_rows,
        _late("by_identity:table_of_delta"),
    ),
    "handlers": Reader(_no_rows, _DATABASE, _no_rows, rows=_no_rows),
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
