"""The destination of a pipeline is the one that its ledger topic names."""

from __future__ import annotations

from collections.abc import Mapping

from oncely.errors import TableMismatch
from oncely.ledgers.topic.records import PipelineRecord


def same_target(old: PipelineRecord, target: str, name: str) -> None:
    """Refuse another destination than the pipeline has written to so far.

    Raises:
        TableMismatch: the error names both.
    """
    if old.target and old.target != target:
        raise TableMismatch(
            f"the destination is {target!r}, and pipeline {name!r} has written to {old.target!r}:"
            " the new one would begin where the old one ends",
            way_out="give the pipeline a new name to begin again; if this is meant, `oncely "
            "offsets reset FILE --shift-by 0 --execute` confirms it",
        )


def same_outputs(old: PipelineRecord, now: Mapping[str, str | None], name: str) -> None:
    """Refuse output topics that were deleted or recreated since.

    Args:
        old: the ids in the ledger.
        now: the topics' ids; None for a topic that does not exist.
        name: the name of the pipeline.

    Raises:
        TableMismatch: the error names the topic.
    """
    for topic, id_ in sorted(now.items()):
        if old.outputs.get(topic, id_) != id_:
            again = "" if id_ is None else " and recreated"
            raise TableMismatch(
                f"{topic!r} was deleted{again} since pipeline {name!r} wrote to it: its "
                "records are lost, and the pipeline would continue in the middle",
                way_out="restore the topic; or give the pipeline a new name, and a new place to "
                "write to, to begin again; into a topic of records `oncely offsets reset` sets "
                "the start, and creates the topic",
            )
