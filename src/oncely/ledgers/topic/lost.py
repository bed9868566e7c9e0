"""Partitions that were read and whose position neither the ledger topic nor the group has.

Nothing but a person knows where such a partition goes on, so a run is refused until a reset gives
it a target. While that reset is under way the partition stays among the settled ones of the
pipeline's record and gets no position: a crash before the target is noted leaves it lost, and it
does not begin at its first offset. From then on it is what the reset puts somewhere, and no longer
lost.
"""

from __future__ import annotations

from collections.abc import Collection

from oncely.core.topics import TopicPartition
from oncely.errors import Stopped
from oncely.ledgers.topic.cluster import Cluster, PipelineTopics
from oncely.ledgers.topic.records import PipelineRecord, from_tree, tree_names


def lost_partitions(
    cluster: Cluster,
    old: PipelineRecord | None,
    found: Collection[TopicPartition],
    partitions: Collection[TopicPartition],
) -> set[TopicPartition]:
    """The partitions that have had a position and have none.

    Args:
        cluster: the open clients.
        old: the pipeline's record; when it is gone, and positions or an emptied ledger topic tell
            that the pipeline has written, every partition had a position.
        found: partitions that have a position.
        partitions: the source's.
    """
    if old is not None:
        return set(tree_names(old.settled)) - set(found) - from_tree(old.resetting).keys()
    if found or cluster.bounds(stable=True)[0] > 0:
        return set(partitions) - set(found)
    return set()


def newest_lost_epoch(
    cluster: Cluster, old: PipelineRecord | None, lost: Collection[TopicPartition]
) -> int:
    """No epoch of the lost positions was newer: each was written to the ledger topic.

    A reset voids the dead letters of older epochs only, so epochs must not begin anew.
    """
    return cluster.bounds(stable=True)[1] if lost and old is None else 0


def refuse_lost(
    place: PipelineTopics, lost: Collection[TopicPartition], *, resets: bool = False
) -> None:
    """Refuse to go on without these positions.

    Args:
        place: of the pipeline.
        lost: the partitions; none: nothing to refuse.
        resets: this is a reset, and these are the partitions that it leaves out.

    Raises:
        Stopped: naming the partitions.
    """
    if not lost:
        return
    what = ", ".join(map(str, sorted(lost)))
    gone = (
        f"pipeline {place.pipeline!r} has written before, but where it was is gone for {what}:"
        f" neither the ledger topic {place.ledger_topic!r} nor group {place.group!r} knows a"
        " position"
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
        " `oncely offsets reset`; or give the pipeline a new name to begin anew",
    )
