"""Group offsets that another pipeline has committed."""

from __future__ import annotations

from collections.abc import Mapping

from oncely.core.topics import TopicPartition
from oncely.errors import ConfigError
from oncely.ledgers.topic.cluster import PipelineTopics
from oncely.ledgers.topic.records import OffsetMetadata


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
