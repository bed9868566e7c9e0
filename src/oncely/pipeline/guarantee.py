"""The guarantee that a pipeline gets, why, and where it ends: in words, from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oncely.config import PipelineSettings


@dataclass(frozen=True)
class Guarantee:
    """What ``oncely plan`` says about delivery.

    Attributes:
        commit: ``partition`` (tasks commit) or ``batch`` (the driver publishes).
        why: what decided that.
        means: what holds.
        rejects: what becomes of records that can't be written.
        ends: where the guarantee ends, a sentence each.
    """

    commit: Literal["partition", "batch"]
    why: str
    means: str
    rejects: str
    ends: tuple[str, ...]


_PARTITION = (
    "each task writes rows, rejects and the new position of its topic-partitions in one"
    " transaction of the database; records of a partition keep their order"
)
_BATCH = (
    "tasks stage rows; the driver publishes them with all rejects and all positions of the"
    " micro-batch in one transaction of the database"
)


def guarantee_of(settings: PipelineSettings) -> Guarantee:
    """The guarantee of a pipeline that is described like this."""
    transform = settings.transform
    kind = None if transform is None else transform.kind
    if kind == "spark":
        why = "transform.spark may mix records of several partitions (a shuffle), so no task's"
        return Guarantee(
            "batch",
            f"{why} rows belong to one range of offsets",
            _BATCH,
            _rejects(settings, "decoded"),
            (*_batch_ends(), *_common_ends(settings)),
        )
    whys = {
        None: "there is no transform: a row comes from one record",
        "sql": "transform.sql is row-wise: a row knows the record it came from",
        "python": "transform.python works on rows that carry the record they came from",
    }
    return Guarantee(
        "partition",
        whys[kind],
        _PARTITION,
        _rejects(settings, "decoded, transformed or written"),
        (*_row_ends(kind), *_common_ends(settings)),
    )


def _rejects(settings: PipelineSettings, verbs: str) -> str:
    budget = settings.sink.max_rejects
    beyond = "however many" if budget.unlimited else f"beyond {budget} the pipeline stops"
    return (
        f"a record that can't be {verbs} is kept in oncely_rejects with key, value, headers and"
        f" reason, in the same transaction; {beyond} (sink.max_rejects)"
    )


def _batch_ends() -> tuple[str, ...]:
    return (
        "GROUP BY, joins, windows and DISTINCT see one micro-batch, not the whole stream",
        "a row that the table refuses stops the pipeline: after a Spark transform no single"
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
    ends = [
        "it covers the table and the ledger beside it, in one database: rows that others write"
        " there are not looked at",
        "a database that is restored to an earlier state is restored with its positions: what"
        " came after is read again, as far as the topic still holds it",
    ]
    if settings.source.on_gap == "record":
        ends.append(
            'records that leave the topic before they are read are lost: on_gap = "record" keeps'
            " the lost range in the history and goes on"
        )
    if settings.sink.mode == "upsert" and settings.sink.version is None:
        ends.append(
            "a key whose records are in several partitions gets whichever comes last: without"
            " sink.version nothing else says which is newer"
        )
    return tuple(ends)
