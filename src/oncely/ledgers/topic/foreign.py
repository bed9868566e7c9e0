"""Group offsets that another pipeline has committed, or may have."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError
from oncely.ledgers.topic.cluster import PipelineTopics
from oncely.ledgers.topic.records import OffsetMetadata


def refuse_foreign(
    stamps: Mapping[TopicPartition, OffsetMetadata],
    known: Collection[TopicPartition],
    place: PipelineTopics,
) -> None:
    """Refuse a group that holds positions of another pipeline, or may hold them.

    Args:
        stamps: the group's offsets.
        known: partitions that have a position of this pipeline in the ledger topic.
        place: the group.

    Raises:
        ConfigError: naming group, pipeline and positions.
    """
    words, name, group = place.words, place.pipeline, place.group
    way_out = (
        f"name a group in source.group that no other pipeline commits to; where {name!r} has"
        " written before, set its positions with `oncely offsets reset`"
    )
    foreign = {tp: one for tp, one in stamps.items() if not words.owns(one, group)}
    named = sorted({one.pipeline for one in foreign.values() if one.pipeline})
    if named:
        raise ConfigError(
            "source.group",
            f"group {group!r} holds positions of pipeline {', '.join(map(repr, named))}: two"
            " pipelines in one group would take each other's positions for their own",
            way_out=way_out,
        )
    unknown = [f"{tp} at {one.position}" for tp, one in sorted(foreign.items()) if tp not in known]
    if unknown:
        raise ConfigError(
            "source.group",
            f"group {group!r} holds positions of an earlier version of Oncely, which don't tell"
            f" the pipeline's name, and ledger topic {place.ledger_topic!r} does not confirm that"
            f" they are {name!r}'s: {', '.join(unknown)}",
            way_out=way_out,
        )
