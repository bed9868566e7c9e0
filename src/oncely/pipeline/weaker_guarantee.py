"""The guarantee of a pipeline with less than exactly once, as text, derived from the settings.

Each pair of sink and offset store has its own text: the effect of a crash, the extent of fencing,
and measures that make the damage harmless.
"""

from __future__ import annotations

from oncely.config import PipelineSettings
from oncely.kinds.kind import kind_of

_STORES = {
    "kafka": "the consumer group {group}",
    "file": "a file on this machine",
    "sql": "a table of another database",
    "redis": "Redis",
    "zookeeper": "ZooKeeper",
}


def means(settings: PipelineSettings) -> str:
    """The meaning of the order of the two steps."""
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


def ends(settings: PipelineSettings) -> tuple[str, ...]:
    """The limits of the guarantee, and remedies."""
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
