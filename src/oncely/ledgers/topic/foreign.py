"""Group offsets that another pipeline has committed, or may have committed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError
from oncely.ledgers.topic.cluster import PipelineTopics
from oncely.ledgers.topic.records import OffsetMetadata


def refuse_foreign(
    stamps: Mapping[TopicPartition, OffsetMetadata],
    known: Collection[TopicPartition],
    topics: PipelineTopics,
) -> None:
    """Refuse a group that holds positions of another pipeline, or may hold them.

    Args:
        stamps: the group's offsets.
        known: partitions that have a position of this pipeline in the ledger topic.
        topics: the group.

    Raises:
        ConfigError: the error names group, pipeline and positions.
    """
    keys, name, group = topics.keys, topics.pipeline, topics.group
    way_out = (
        f"name a group in source.group that no other pipeline commits to; where {name!r} has"
        " written before, set its positions with `oncely offsets reset`"
    )
    foreign = {tp: one for tp, one in stamps.items() if not keys.owns(one, group)}
    named = sorted({one.pipeline for one in foreign.values() if one.pipeline})
    if named:
        raise ConfigError(
            "source.group",
            f"group {group!r} holds positions of pipeline {', '.join(map(repr, named))}: two"
            " pipelines in one group would use each other's positions",
            way_out=way_out,
        )
    unknown = [f"{tp} at {one.position}" for tp, one in sorted(foreign.items()) if tp not in known]
    if unknown:
        raise ConfigError(
            "source.group",
            f"group {group!r} holds positions of an earlier version of Oncely, which don't "
            f"contain the pipeline's name, and ledger topic {topics.ledger_topic!r} does not "
            f"confirm that"
            f" they are {name!r}'s: {', '.join(unknown)}",
            way_out=way_out,
        )
