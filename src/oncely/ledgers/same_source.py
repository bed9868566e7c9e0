"""Checks that the source is still that of a ledger's positions; used by every sink."""

from __future__ import annotations

from collections.abc import Mapping

from oncely.core.ranges import SourceIdentity
from oncely.errors import SourceMismatch


def same_cluster(known: str, source: SourceIdentity, pipeline: str) -> None:
    """Compare the cluster id (KIP-78) with that in the ledger.

    Raises:
        SourceMismatch: another cluster.
    """
    if known != source.cluster_id:
        raise SourceMismatch(
            f"pipeline {pipeline!r} has read from Kafka cluster {known!r},"
            f" and source.brokers leads to {source.cluster_id!r}",
            way_out="point source.brokers back, or give the pipeline a new name",
        )


def same_topics(known: Mapping[str, str], source: SourceIdentity, pipeline: str) -> None:
    """Compare topic ids (KIP-516) with those in the ledger; a missing or empty id is unknown.

    Raises:
        SourceMismatch: a topic was deleted and recreated.
    """
    for topic, topic_id in source.topic_ids.items():
        if (known.get(topic) or topic_id) != topic_id:
            raise SourceMismatch(
                f"topic {topic!r} was deleted and recreated: its id is {topic_id}, pipeline"
                f" {pipeline!r} has read {known[topic]}; the same offsets are other records now",
                way_out="give the pipeline a new name (it then starts where source.start says);"
                " what it has written stays",
            )
