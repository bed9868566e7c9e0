"""Positions shown and reset, in the manner of ``kafka-consumer-groups``.

A reset is a takeover: it takes a new epoch and writes the positions in one transaction, so
whatever still runs is fenced and can't commit what it had read from the old positions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from oncely.commit.run import take_over
from oncely.core.claim import Opened, Takeover
from oncely.core.topics import Position, TopicPartition
from oncely.errors import OncelyError, Unavailable, WrongInput
from oncely.sources.kafka import Watermarks
from oncely.sources.reset import ResetPlan, Verb, plan_reset

if TYPE_CHECKING:
    from oncely.pipeline.pipeline import Pipeline

log = logging.getLogger(__name__)


class PartitionOffsets(NamedTuple):
    """One partition's offsets.

    Attributes:
        first: the first offset that the topic still holds.
        position: the ledger's; None before the first start.
        end: the last stable offset.
        mirrored: what the consumer group shows to lag tools; None when it shows nothing.
    """

    topic: str
    partition: int
    first: Position
    position: Position | None
    end: Position
    mirrored: Position | None


def standings(pipeline: Pipeline) -> list[PartitionOffsets]:
    """Positions of every partition that the topics have.

    Raises:
        WrongInput: a topic is missing, or a server does not let us in.
        Unavailable: a server does not answer.
    """
    known = pipeline.destination.look()
    marks = pipeline.source.watermarks()
    group = pipeline.settings.shown_group
    mirrored: Mapping[TopicPartition, Position] = {}
    if group is not None:
        try:
            mirrored = pipeline.source.mirrored(group)
        except OncelyError as error:  # display only
            log.warning("group %s can't be read: %s", group, error.message)
    return [
        PartitionOffsets(*tp, mark.low, known.positions.get(tp), mark.stable, mirrored.get(tp))
        for tp, mark in sorted(marks.items())
    ]


@dataclass(frozen=True)
class Reset:
    """What a reset does, or has done.

    Attributes:
        before: the positions as they were; partitions that had none are absent.
        positions: the new ones.
        notes: one sentence for each position that had to be moved into the log.
        epoch: the epoch it was written with; None for a dry run.
    """

    before: Mapping[TopicPartition, Position]
    positions: Mapping[TopicPartition, Position]
    notes: tuple[str, ...] = ()
    epoch: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "partitions": [
                {
                    "topic": tp.topic,
                    "partition": tp.partition,
                    "position": self.before.get(tp),
                    "new_position": at,
                }
                for tp, at in sorted(self.positions.items())
            ],
            "notes": list(self.notes),
            "executed": self.epoch is not None,
            "epoch": self.epoch,
        }


def reset(
    pipeline: Pipeline, verb: Verb, topics: Sequence[str] = (), *, execute: bool = False
) -> Reset:
    """Plan new positions and, with ``execute``, write them.

    Args:
        pipeline: whose.
        verb: where to.
        topics: ``topic`` or ``topic:0,1``; only these partitions. All by default.
        execute: without it nothing is written.

    Raises:
        WrongInput: no such partition, or the ledger belongs to another topic or cluster.
        Fenced: another run opened at the same moment.
        Unavailable: a server does not answer.
    """
    source = pipeline.source
    known = pipeline.destination.look()
    marks = source.watermarks()
    chosen = _chosen(topics, marks)

    def planned(
        current: Mapping[TopicPartition, Position], marks: Mapping[TopicPartition, Watermarks]
    ) -> ResetPlan:
        low = {tp: marks[tp].low for tp in chosen}
        return plan_reset(verb, current, low, {tp: marks[tp].stable for tp in chosen}, source)

    plan = planned(known.positions, marks)
    before = {tp: known.positions[tp] for tp in plan.positions if tp in known.positions}
    if not execute:
        return Reset(before, plan.positions, plan.notes)

    def settled(current: Mapping[TopicPartition, Position]) -> Mapping[TopicPartition, Position]:
        # A live run may have moved on since we looked: plan again, now that it is fenced.
        nonlocal plan, before
        plan = planned(current, source.watermarks())
        before = {tp: current[tp] for tp in plan.positions if tp in current}
        return plan.positions

    takeover = Takeover(
        source.identity(),
        lambda: source.resolve_start(pipeline.settings.source.start),
        {tp: mark.low for tp, mark in marks.items()},
        reset=settled,
    )
    opened = take_over(pipeline.destination.bare_sink, pipeline.store, takeover)
    _mirror(pipeline, opened)
    return Reset(before, plan.positions, plan.notes, opened.fence.epoch)


def _mirror(pipeline: Pipeline, opened: Opened) -> None:
    group = pipeline.mirror_group
    if group is None:
        return
    try:
        pipeline.source.mirror(group, opened.positions)
    except Unavailable as error:
        log.warning("group %s still shows the old positions: %s", group, error.message)


def _chosen(
    topics: Sequence[str], marks: Mapping[TopicPartition, Watermarks]
) -> list[TopicPartition]:
    """The partitions that ``--topic`` names.

    Raises:
        WrongInput: it names one that the pipeline does not read.
    """
    chosen: set[TopicPartition] = set()
    for text in topics:
        name, colon, numbers = text.rpartition(":") if ":" in text else (text, "", "")
        of_topic = {tp for tp in marks if tp.topic == name}
        wanted = of_topic
        if colon:
            parts = [part.strip() for part in numbers.split(",")]
            wanted = {tp for tp in of_topic if str(tp.partition) in parts}
            missing = set(parts) - {str(tp.partition) for tp in wanted}
            if missing and of_topic:
                raise WrongInput(
                    f"--topic {text}: {name} has no partition {', '.join(sorted(missing))}",
                    way_out=f"it has 0 to {len(of_topic) - 1}",
                )
        if not of_topic:
            raise WrongInput(
                f"--topic {text}: the pipeline does not read {name!r}",
                way_out=f"source.topics has {', '.join(sorted({tp.topic for tp in marks}))}",
            )
        chosen |= wanted
    return sorted(chosen or marks)
