"""How far a pipeline has come; read from ledger and topics, nothing is written."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oncely.core.topics import Position, TopicPartition
from oncely.pipeline.destination import Known
from oncely.sources.lag import PartitionLag, measure_lag

if TYPE_CHECKING:
    from oncely.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Status:
    """The answer to ``oncely status``.

    Attributes:
        partitions: position, end and lag of every partition that the topics have.
        rejects: dead letters that wait.
        epoch: the epoch given out last; 0 when the pipeline never ran.
        warnings: what the next start would refuse.
    """

    partitions: tuple[PartitionLag, ...]
    rejects: int
    epoch: int
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The documented answer, for programs."""
        return {
            "partitions": [one._asdict() for one in self.partitions],
            "rejects": self.rejects,
            "epoch": self.epoch,
        }


def status(pipeline: Pipeline) -> Status:
    """Ask ledger and topics.

    Raises:
        WrongInput: a topic is missing, or a server does not let us in.
        Unavailable: a server does not answer.
    """
    known = pipeline.destination.look()
    lags = measure_lag(pipeline.source, _reading(pipeline, known), int(time.time() * 1000))
    return Status(
        tuple(
            one._replace(position=known.positions.get(TopicPartition(one.topic, one.partition)))
            for one in lags
        ),
        known.rejects,
        known.epoch,
        _warnings(pipeline, known),
    )


def _reading(pipeline: Pipeline, known: Known) -> dict[TopicPartition, Position]:
    """Where the next start would begin to read."""
    if known.positions:
        return dict(known.positions)
    return pipeline.source.resolve_start(pipeline.settings.source.start)


def _warnings(pipeline: Pipeline, known: Known) -> tuple[str, ...]:
    now = pipeline.source.identity()
    if known.cluster_id not in (None, now.cluster_id):
        return (f"the ledger was written for another Kafka cluster, {known.cluster_id}",)
    return tuple(
        f"topic {topic} was deleted and made again since the pipeline read it"
        for topic, topic_id in now.topic_ids.items()
        if known.topic_ids.get(topic, topic_id) != topic_id
    )
