"""Partitions that were read and whose position is neither in the ledger topic nor in the group.

Only the user can determine where such a partition continues, so a run is refused until a reset sets
its position. During that reset the partition stays among the settled ones of the pipeline's record
and gets no position: a crash before the target is noted leaves it lost, and it does not begin at
its first offset. After that its position is that of the reset, and no longer lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from oncely.core.ranges import TopicPartition, from_tree
from oncely.errors import ConfigError, Stopped
from oncely.ledgers.topic.cluster import Cluster, PipelineTopics
from oncely.ledgers.topic.records import OffsetMetadata, PipelineRecord, tree_names


def lost_partitions(
    cluster: Cluster,
    old: PipelineRecord | None,
    found: Collection[TopicPartition],
    partitions: Collection[TopicPartition],
) -> set[TopicPartition]:
    """The partitions that have had a position and have none.

    Args:
        cluster: the open clients.
        old: the pipeline's record; if it is missing, and positions or an emptied ledger topic show
            that the pipeline has written, every partition had a position.
        found: partitions that have a position.
        partitions: the source's partitions.
    """
    if old is not None:
        return set(tree_names(old.settled)) - set(found) - from_tree(old.resetting).keys()
    if found or cluster.bounds(stable=True)[0] > 0:
        return set(partitions) - set(found)
    return set()


def newest_lost_epoch(
    cluster: Cluster, old: PipelineRecord | None, lost: Collection[TopicPartition]
) -> int:
    """An upper bound of the lost positions' epochs: each was written to the ledger topic.

    A reset voids the dead letters of older epochs only, so epochs must not restart.
    """
    return cluster.bounds(stable=True)[1] if lost and old is None else 0


def refuse_lost(
    topics: PipelineTopics, lost: Collection[TopicPartition], *, resets: bool = False
) -> None:
    """Refuse to continue without these positions.

    Args:
        topics: cluster and topics of the pipeline.
        lost: the partitions; if empty, nothing is refused.
        resets: for a reset: the partitions that it leaves out.

    Raises:
        Stopped: the error names the partitions.
    """
    if not lost:
        return
    what = ", ".join(map(str, sorted(lost)))
    gone = (
        f"pipeline {topics.pipeline!r} has written before, but its positions are lost for {what}:"
        f" neither the ledger topic {topics.ledger_topic!r} nor group {topics.group!r} has a "
        "position"
    )
    if resets:
        raise Stopped(
            f"{gone}, and the reset gives none; nothing was changed",
            way_out="look in the output for the last records written; one reset must give all of"
            " them a position, without --topic or with all of them in it, and further resets with"
            " --topic can then move single ones",
        )
    raise Stopped(
        gone,
        way_out="look in the output for the last records written, and set positions with"
        " `oncely offsets reset`; or give the pipeline a new name to begin again",
    )


# -- positions of another pipeline ---------------------------------------------------------


def refuse_foreign(stamps: Mapping[TopicPartition, OffsetMetadata], topics: PipelineTopics) -> None:
    """Refuse a group that holds positions of another pipeline.

    Args:
        stamps: the group's offsets.
        topics: the group.

    Raises:
        ConfigError: the error names group and pipeline.
    """
    named = sorted({one.pipeline for one in stamps.values()} - {topics.pipeline})
    if named:
        raise ConfigError(
            "source.group",
            f"group {topics.group!r} holds positions of pipeline {', '.join(map(repr, named))}: two"
            " pipelines in one group would use each other's positions",
            way_out="name a group in source.group that no other pipeline commits to; where"
            f" {topics.pipeline!r} has written before, set its positions with"
            " `oncely offsets reset`",
        )
