"""The guarantee of a pipeline, its reasons and its limits, as text, derived from the settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from oncely.config import DeltaSinkSettings, HandlersSinkSettings, PipelineSettings, SqlSinkSettings
from oncely.config.pipeline import Delivery
from oncely.pipeline import weaker_guarantee


@dataclass(frozen=True)
class Guarantee:
    """The guarantee, as shown by ``oncely plan``.

    Attributes:
        delivery: the value of the pipeline file.
        store: the store of the positions.
        commit: ``partition`` (tasks commit) or ``batch`` (the driver publishes).
        why: the reasons.
        means: the meaning.
        rejects: the handling of records that cannot be written.
        ends: the limits of the guarantee, a sentence each.
    """

    delivery: Delivery
    store: str
    commit: Literal["partition", "batch"]
    why: str
    means: str
    rejects: str
    ends: tuple[str, ...]


_PARTITION = {
    "sql": "each task writes rows, rejects and the new position of its topic-partitions in one"
    " transaction of the database; records of a partition keep their order",
    "kafka": "each task writes records, rejects and the new position of a topic-partition in one"
    " transaction of Kafka; readers with isolation.level=read_committed see each record once,"
    " and those of a partition with the same key in order",
    "handlers": "what a handler does with its transaction, rejects and the new position of a"
    " topic-partition are one transaction of the database; a partition's records come in order",
}
_BATCH = {
    "sql": "tasks stage rows; the driver publishes them with all rejects and all positions of the"
    " batch in one transaction of the database",
    "kafka": "tasks stage records; the driver publishes them with all rejects and all positions"
    " of the batch in one transaction of Kafka: all or nothing becomes visible to readers"
    " with isolation.level=read_committed, though not in all partitions at one instant",
    "delta": "tasks write Parquet files that belong to no version of the table; the driver adds or"
    " merges them, with all rejects and all positions of the batch, in one commit to the"
    " table's log",
    "files": "tasks write files that are not visible; the driver lists them in the manifest topic,"
    " with all rejects and all positions of the batch, in one transaction of Kafka: "
    "readers of the manifest with isolation.level=read_committed see each row once",
}


def guarantee_of(settings: PipelineSettings) -> Guarantee:
    """The guarantee of a pipeline with these settings."""
    if settings.delivery == "exactly_once":
        return _exactly_once(settings)
    whole = _exactly_once(settings)
    rejects = whole.rejects.replace("in the same transaction", "with the other records")
    common = _gap_ends(settings)
    row_ends = _batch_ends(settings.sink.kind) if settings.by_spark else ()
    return replace(
        whole,
        means=weaker_guarantee.means(settings),
        rejects=rejects,
        ends=(*weaker_guarantee.ends(settings), *row_ends, *common),
    )


def _exactly_once(settings: PipelineSettings) -> Guarantee:
    given = (settings.delivery, settings.offsets.store)
    transform = settings.transform
    kind = None if transform is None else transform.kind
    if kind == "spark":
        why = "transform.spark may mix records of several partitions (a shuffle), so no task's"
        return Guarantee(
            *given,
            "batch",
            f"{why} rows belong to one range of offsets",
            _BATCH[settings.sink.kind],
            _rejects(settings, "decoded"),
            (*_batch_ends(settings.sink.kind), *_common_ends(settings)),
        )
    if settings.sink.kind in ("files", "delta"):
        log = "the manifest" if settings.sink.kind == "files" else "the table's log"
        return Guarantee(
            *given,
            "batch",
            f"a file can't be part of a transaction, and its name in {log} can",
            _BATCH[settings.sink.kind],
            _rejects(settings, "decoded, transformed or written"),
            (*_row_ends(kind), *_common_ends(settings)),
        )
    whys = {
        None: "there is no transform: a row comes from one record",
        "sql": "transform.sql is row-wise: a row has the index of its record",
        "python": "transform.python works on rows that carry the record they came from",
    }
    return Guarantee(
        *given,
        "partition",
        whys[kind],
        _PARTITION[settings.sink.kind],
        _rejects(settings, "decoded, transformed or written"),
        (*_row_ends(kind), *_common_ends(settings)),
    )


def _rejects(settings: PipelineSettings, verbs: str) -> str:
    budget, sink = settings.sink.max_rejects, settings.sink
    if isinstance(sink, SqlSinkSettings | HandlersSinkSettings):
        place = "oncely_rejects"
    elif isinstance(sink, DeltaSinkSettings):
        place = "_oncely/ below the table's root"
    else:
        place = f"topic {sink.rejects}"
    beyond = "however many" if budget.unlimited else f"beyond {budget} the pipeline stops"
    return (
        f"a record that can't be {verbs} is kept in {place} with key, value, headers and"
        f" reason, in the same transaction; {beyond} (sink.max_rejects)"
    )


def _batch_ends(kind: str) -> tuple[str, ...]:
    refused = "the table refuses" if kind == "sql" else "can't be written"
    return (
        "GROUP BY, joins, windows and DISTINCT see one batch, not the whole stream",
        f"a row that {refused} stops the pipeline: after a Spark transform no single"
        " record answers for it",
        "the transform must give the same rows when part of it runs again: non-deterministic"
        " expressions before a shuffle are refused where Spark can see them, inside functions of"
        " your own it can't",
        "records without a value (tombstones) become rejects; rows keep no order",
    )


def _row_ends(kind: str | None) -> tuple[str, ...]:
    if kind is None:
        return ()
    again = "is computed again when a task fails before its commit; one result takes effect"
    if kind == "sql":
        return (f"transform.sql {again}, which shows with now() or random()",)
    return (
        f"transform.python {again}: what it does elsewhere (calls, files) may happen twice, and"
        " a random result may differ from the first try's",
    )


def _common_ends(settings: PipelineSettings) -> tuple[str, ...]:
    ends = [*_ENDS[settings.sink.kind]]
    ends += _gap_ends(settings)
    sink = settings.sink
    table = sink if isinstance(sink, SqlSinkSettings | DeltaSinkSettings) else None
    if table is not None and table.mode == "upsert" and table.version is None:
        ends.append(
            "a key whose records are in several partitions gets the record that is written "
            "last: without sink.version the newer one is not known"
        )
    if settings.tombstone_keys:
        ends += _key_ends(settings)
    elif settings.decode.key is not None and getattr(sink, "keys", None):
        ends.append("each tombstone is a dead letter: the column of sink.key is not in decode.key")
    return tuple(ends)


def _key_ends(settings: PipelineSettings) -> Iterator[str]:
    transform = settings.transform
    if transform is not None or settings.filter.drops:
        yield (
            "a record that a transform or filter drops leaves the row or message of its key as it"
            " is: only a tombstone deletes it"
        )
    if transform is not None and transform.python is not None:
        yield (
            "transform.python must pass the key columns through, as tombstones bypass it: plan has"
            " not tried it, and a record whose key it changes is a dead letter"
        )


def _gap_ends(settings: PipelineSettings) -> tuple[str, ...]:
    if settings.source.on_gap != "record":
        return ()
    return (
        'records that are deleted from the topic before they are read are lost: on_gap = "record"'
        " keeps the lost range in the history and continues",
    )


_SQL_ENDS = (
    "it covers the table and the ledger beside it, in one database: rows of other writers are "
    "not covered",
    "a database that is restored to an earlier state is restored with its positions: what"
    " came after is read again, as far as the topic still holds it",
)
_HANDLERS_ENDS = (
    "it covers what handlers do with the transaction that they get; what they do elsewhere (calls,"
    " files, other connections) may happen several times",
    _SQL_ENDS[1],
)
_KAFKA_ENDS = (
    "it covers what Oncely writes; a reader without isolation.level=read_committed also sees"
    " records of transactions that were aborted",
    "when the ledger topic and the consumer group are both deleted, no trace of earlier runs "
    "is left: the pipeline begins again",
)
_FILES_ENDS = (
    "it covers the files of the manifest: a listing of the folders also shows files of failed "
    "attempts, until `oncely files vacuum` removes them",
    _KAFKA_ENDS[1],
)
_DELTA_ENDS = (
    "it covers versions of the table: a listing of its folder also shows files of no version, "
    "which the table's VACUUM removes",
    "positions are in _oncely/ below the table's root, which must not be removed; after a RESTORE"
    " to a version before the newest rows a run is refused until `oncely repair`",
)
_ENDS = {"sql": _SQL_ENDS, "kafka": _KAFKA_ENDS, "files": _FILES_ENDS, "delta": _DELTA_ENDS,
         "handlers": _HANDLERS_ENDS}  # fmt: skip
