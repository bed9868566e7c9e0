"""The guarantee of a pipeline, its reasons and its limits, as text, derived from the settings.

With less than exactly once, each pair of sink and offset store has its own text: the effect of a
crash, the extent of fencing, and measures that make the damage harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from oncely.config import PipelineSettings
from oncely.config.pipeline import Delivery, TransformSettings
from oncely.core.change import RewriteKind
from oncely.errors import ConfigError
from oncely.kinds.kind import Kind, kind_of

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts


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


def guarantee_of(settings: PipelineSettings) -> Guarantee:
    """The guarantee of a pipeline with these settings."""
    if settings.delivery == "exactly_once":
        return _exactly_once(settings)
    whole = _exactly_once(settings)
    rejects = whole.rejects.replace("in the same transaction", "with the other records")
    common = _gap_ends(settings)
    row_ends = _batch_ends(kind_of(settings.sink.kind)) if settings.by_spark else ()
    return replace(
        whole,
        means=_weaker_means(settings),
        rejects=rejects,
        ends=(*_weaker_ends(settings), *row_ends, *common),
    )


def _exactly_once(settings: PipelineSettings) -> Guarantee:
    given = (settings.delivery, settings.offsets.store)
    own, transform = kind_of(settings.sink.kind), settings.transform
    kind = None if transform is None else transform.kind
    if kind == "spark":
        why = "transform.spark may mix records of several partitions (a shuffle), so no task's"
        return Guarantee(
            *given,
            "batch",
            f"{why} rows belong to one range of offsets",
            own.texts.by_driver,
            _rejects(settings, "decoded"),
            (*_batch_ends(own), *_common_ends(settings)),
        )
    if own.commits == "ranges":
        return Guarantee(
            *given,
            "batch",
            own.texts.why_driver,
            own.texts.by_driver,
            _rejects(settings, "decoded, transformed or written"),
            (*_ROW_ENDS[kind], *_common_ends(settings)),
        )
    return Guarantee(
        *given,
        "partition",
        _WHY_PARTITION[kind],
        own.texts.by_task,
        _rejects(settings, "decoded, transformed or written"),
        (*_ROW_ENDS[kind], *_common_ends(settings)),
    )


_WHY_PARTITION: Mapping[str | None, str] = {
    None: "there is no transform: a row comes from one record",
    "sql": "transform.sql is row-wise: a row has the index of its record",
    "python": "transform.python works on rows that carry the record they came from",
}
_AGAIN = "is computed again when a task fails before its commit; one result takes effect"
_ROW_ENDS: Mapping[str | None, tuple[str, ...]] = {
    None: (),
    "sql": (f"transform.sql {_AGAIN}, which shows with now() or random()",),
    "python": (
        f"transform.python {_AGAIN}: what it does elsewhere (calls, files) may happen twice, and"
        " a random result may differ from the first try's",
    ),
}
"""By the kind of the transform."""


def _rejects(settings: PipelineSettings, verbs: str) -> str:
    budget = settings.sink.max_rejects
    place = kind_of(settings.sink.kind).dead_letters(settings.sink)
    beyond = "however many" if budget.unlimited else f"beyond {budget} the pipeline stops"
    return (
        f"a record that can't be {verbs} is kept in {place} with key, value, headers and"
        f" reason, in the same transaction; {beyond} (sink.max_rejects)"
    )


def _batch_ends(kind: Kind) -> tuple[str, ...]:
    return (
        "GROUP BY, joins, windows and DISTINCT see one batch, not the whole stream",
        f"a row that {kind.texts.refused} stops the pipeline: after a Spark transform no single"
        " record answers for it",
        "the transform must give the same rows when part of it runs again: non-deterministic"
        " expressions before a shuffle are refused where Spark can see them, inside functions of"
        " your own it can't",
        "records without a value (tombstones) become rejects; rows keep no order",
    )


def _common_ends(settings: PipelineSettings) -> tuple[str, ...]:
    sink: Any = settings.sink
    ends = [*kind_of(sink.kind).texts.ends, *_gap_ends(settings)]
    if getattr(sink, "mode", None) == "upsert" and sink.version is None:
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


def refuse_unfit(settings: PipelineSettings) -> None:
    """Refuse what only Spark can run, for a worker.

    Raises:
        ConfigError: names the key.
    """
    kind = kind_of(settings.sink.kind)
    if settings.by_spark:
        raise ConfigError(
            "transform.spark",
            "a worker has no Spark",
            way_out="use transform.sql or .python, or start it by `oncely run`",
        )
    if not kind.works:
        raise ConfigError(
            "sink.kind",
            f"a worker does not write into {settings.sink.kind} yet",
            way_out="start it by `oncely run`",
        )
    # Offsets in a transaction name the members' group, which is the ledger's.
    if kind.group_is_ledger and settings.worker_group != settings.group:
        raise ConfigError(
            "worker.group",
            f"found {settings.worker.group!r}; the positions are in group {settings.group!r}",
            way_out="remove it; source.group names the group for positions and members",
        )
    if settings.delivery != "exactly_once":
        raise ConfigError(
            "delivery",
            f"found {settings.delivery!r}; a worker delivers exactly once",
            way_out='write delivery = "exactly_once", or start it by `oncely run`',
        )


def refuse_spark(settings: PipelineSettings) -> None:
    """Refuse a Spark transform, if the destination would.

    Raises:
        ConfigError: the first problem of the pipeline file with such a transform.
    """
    known, spark = settings.sink.problems(settings), TransformSettings(spark="module:function")
    changed = settings.model_copy(update={"transform": spark})
    for one in settings.sink.problems(changed):
        if one not in known:
            raise ConfigError(one.below, one.text, way_out=one.way_out)


_STORES = {
    "kafka": "the consumer group {group}",
    "file": "a file on this machine",
    "sql": "a table of another database",
    "redis": "Redis",
    "zookeeper": "ZooKeeper",
}


def _weaker_means(settings: PipelineSettings) -> str:
    """The meaning of the order of the two steps, with less than exactly once."""
    where = _where(settings)
    span = _span(settings)
    match settings.delivery:
        case "at_least_once":
            return (
                f"records first, then the position in {where}: nothing is lost, and a crash"
                f" between the two writes {span} again"
            )
        case "at_most_once":
            return (
                f"the position in {where} first, then the records: nothing is written twice, and"
                f" a crash between the two loses {span}"
            )
    interval = settings.commit_interval or "5 seconds"
    return (
        f"nothing: positions are saved in {where} every {interval}, independent of the "
        "records: a crash may lose some and write others again"
    )


def _weaker_ends(settings: PipelineSettings) -> tuple[str, ...]:
    """The limits of a guarantee of less than exactly once, and remedies."""
    kind = kind_of(settings.sink.kind)
    found = [_fencing(settings), *kind.texts.untransacted]
    if settings.delivery == "at_least_once":
        found.append(kind.again(settings.sink))
    if settings.delivery == "at_most_once":
        found.append(
            "if a server does not answer in time, the current records are lost as well: they "
            "are logged, and not retried"
        )
    if settings.offsets.store == "kafka":
        found.append(
            "a committed group offset expires (offsets.retention.minutes, 7 days by default) "
            "when the pipeline is stopped: it then needs `oncely offsets reset`, or begins at"
            " source.start if the destination shows no earlier run"
        )
    return tuple(found)


def _where(settings: PipelineSettings) -> str:
    if settings.offsets.store == "ledger":
        return "the sink's ledger"
    group = settings.group
    if settings.offsets.store == "kafka":
        group = settings.offsets.group_of(settings.name)
    return _STORES[settings.offsets.store].format(group=group)


def _span(settings: PipelineSettings) -> str:
    if settings.by_spark or kind_of(settings.sink.kind).commits == "ranges":
        return "a batch"
    if settings.commit_interval is None:
        return "up to 100,000 records of each task"
    return f"up to {settings.commit_interval} of each task"


def _fencing(settings: PipelineSettings) -> str:
    if settings.offsets.store == "ledger":
        return (
            "of two runs at the same time one is stopped by the ledger, when it moves a position;"
            " what it wrote before stays"
        )
    return (
        "the store compares and then writes, which does not fence reliably: two runs at the same"
        " time can both write"
    )


def check_rewrite(pipeline: Parts, kind: RewriteKind) -> Mapping[str, str]:
    """Refuse a pipeline whose rows can't be repaired, or backfilled; writes nothing.

    Returns and raises what :meth:`oncely.kinds.destination.Destination.check_rewrite` does.
    """
    if pipeline.settings.delivery != "exactly_once":
        raise ConfigError(
            "delivery",
            f"is {pipeline.settings.delivery}: rows may be written again, or not at all, at any"
            " time, also after a repair",
            way_out='repair with delivery = "exactly_once", while the pipeline is stopped',
        )
    if pipeline.spark_path is not None:
        raise ConfigError(
            "transform.spark",
            "a row of a Spark transform comes from no single record: nothing tells which rows a"
            " record has produced",
            way_out="reset the positions and write into a new table",
        )
    return pipeline.destination.check_rewrite(pipeline.row_schema(), kind)
