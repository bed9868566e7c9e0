"""Display and reset of positions, like ``kafka-consumer-groups``.

A reset is a takeover: it takes a new epoch and writes the positions in one transaction, so a
running pipeline is fenced and cannot commit records from the old positions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oncely.commit.run import take_over
from oncely.core import events
from oncely.core.claim import Opened, Takeover
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import ConfigError, OncelyError, Unavailable, WrongInput
from oncely.kafka.reset import ResetPlan, Verb, plan_reset
from oncely.kafka.source import KafkaSource, Watermarks
from oncely.pipeline.running import logged

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts

log = logging.getLogger(__name__)

FENCED = (
    "A process that runs the pipeline is fenced, and ends with exit code 3. The systemd unit of"
    " packaging/ (RestartPreventExitStatus=2 3) does not start it again: start it after the reset."
    " Kubernetes restarts pods of a Deployment or a StatefulSet; they go on at the new positions."
)


class PartitionOffsets(NamedTuple):
    """One partition's offsets.

    Attributes:
        first: the first offset that is still in the topic.
        position: the ledger's position; None before the first start.
        end: the last stable offset.
        mirrored: the offset of the consumer group for lag tools; None if it has none.
    """

    topic: str
    partition: int
    first: Position
    position: Position | None
    end: Position
    mirrored: Position | None


def partition_offsets(pipeline: Parts) -> list[PartitionOffsets]:
    """See :meth:`oncely.pipeline.Pipeline.partition_offsets`."""
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
    """The result of a reset, or of a dry run.

    Attributes:
        before: the previous positions; partitions without one are absent.
        positions: the new positions.
        notes: one sentence for each position that had to be moved into the log.
        epoch: the epoch of the reset; None for a dry run.
    """

    before: Mapping[TopicPartition, Position]
    positions: Mapping[TopicPartition, Position]
    notes: tuple[str, ...] = ()
    epoch: int | None = None

    @property
    def warning(self) -> str:
        """The effect of records that are read again; empty if there are none."""
        if all(at >= self.before.get(tp, at) for tp, at in self.positions.items()):
            return ""
        return (
            "Records that are read again are written again: an append table contains their "
            "rows twice unless you delete them first. Rejects at or beyond the new positions are "
            "dropped, because their records are processed again."
        )

    def as_json(self) -> dict[str, Any]:
        """The result as JSON-able values."""
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
    pipeline: Parts,
    verb: Verb,
    topics: Sequence[str],
    *,
    execute: bool,
    path: str | Path | None,
) -> Reset:
    """See :meth:`oncely.pipeline.Pipeline.reset`."""
    source = pipeline.source
    known, identity = pipeline.destination.look(), source.identity()
    known.refuse_another_source(identity, pipeline.settings.name)
    if known.lost and topics:
        raise ConfigError(
            "offsets.store", known.lost, way_out="reset all partitions first: leave out --topic"
        )
    marks = source.watermarks()
    planned = _Planned(verb, _chosen(topics, marks), source)
    planned.of(known.positions, marks)
    if not execute:
        return planned.result()
    takeover = Takeover(
        identity,
        lambda: source.resolve_start(pipeline.settings.source.start),
        {tp: mark.low for tp, mark in marks.items()},
        # A live run may have moved on since the plan: plan again, now that it is fenced.
        reset=lambda current: planned.of(current, source.watermarks()),
    )
    with logged(pipeline, path, lambda _: None, resets=True) as listener:
        opened = take_over(pipeline.destination.sink(), pipeline.store, takeover)
        listener(events.PositionsReset(opened.fence.epoch, planned.current, opened.positions))
    _mirror(pipeline, opened)
    return planned.result(opened.fence.epoch)


@dataclass
class _Planned:
    """The latest plan of a reset, and the positions that it was made from."""

    verb: Verb
    chosen: Sequence[TopicPartition]
    source: KafkaSource
    current: Mapping[TopicPartition, Position] = field(default_factory=dict)
    plan: ResetPlan = field(default_factory=lambda: ResetPlan({}))

    def of(
        self, current: Mapping[TopicPartition, Position], marks: Mapping[TopicPartition, Watermarks]
    ) -> Mapping[TopicPartition, Position]:
        """The new positions of the chosen partitions."""
        self.current = dict(current)
        low = {tp: marks[tp].low for tp in self.chosen}
        end = {tp: marks[tp].stable for tp in self.chosen}
        self.plan = plan_reset(self.verb, current, low, end, self.source)
        return self.plan.positions

    def result(self, epoch: int | None = None) -> Reset:
        plan, current = self.plan, self.current
        before = {tp: current[tp] for tp in plan.positions if tp in current}
        return Reset(before, plan.positions, plan.notes, epoch)


def _mirror(pipeline: Parts, opened: Opened) -> None:
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
    """The partitions of ``--topic``.

    Raises:
        WrongInput: it contains a partition that the pipeline does not read.
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
