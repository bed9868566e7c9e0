"""Transactional ids, records of the ledger topic, and the metadata of committed group offsets.

The ledger is a compacted topic. Each pipeline has one partition of it. Its keys:

| key                                    | value                                                   |
|----------------------------------------|---------------------------------------------------------|
| ``["pipeline", name]``                 | `PipelineRecord`: epoch, run, source, destination       |
| ``["position", name, topic, number]``  | `PositionRecord`: position, epoch, the range just done  |
| ``["reset", name, topic, number, n]``  | `ResetRecord`: the position that a reset of epoch n set |
| ``["replayed", name, topic, number]``  | `ReplayRecord`: the next dead letter to be replayed     |
| ``["amended", name, topic, number]``   | `Totals`: changes of the position's totals by replays   |
| ``["rewritten", name, topic, number]`` | `RewriteRecord`: the last repair or backfill            |

A committed group offset is the position's fast copy, and its metadata adds epoch, mode and the
pipeline's name. An offset without such metadata was written by another program and is ignored, as
is an offset of another pipeline. Metadata without a name is of a version before the first release,
and is refused.

A value with a ``format`` above :data:`FORMAT` was written by a newer version and is refused; one
without it has format 1. A value without a field of :data:`_NOT_IN_EARLY_VERSIONS` is of a version
before the first release, and is refused. A takeover writes the pipeline's record, so that no older
version follows a newer one (docs/decisions/0052).

Both copies contain the mode of the run that wrote them, which determines the only transactional id
that may move the position (docs/decisions/0012).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from oncely.core.claim import Entry, RejectCount
from oncely.core.ranges import Position, TopicPartition, from_tree
from oncely.errors import OlderFormat, Stopped
from oncely.stores.document import Totals, refuse_lacking, require_known_format

_STAMP = "oncely"
_NOT_IN_EARLY_VERSIONS = (
    "outputs", "resetting", "leaders", "counted",
    "records", "rows", "rejects", "filtered", "mode", "totals", "backfilled",
)  # fmt: skip
FORMAT = 1
"""The newest format of records. Format 1 is not written."""

Mode = Literal["partition", "batch", "first", "second"]
"""The transactional id that moves a position on.

partition: its own, each time; batch: the publisher's; first, second: its own and its second one, in
turn (docs/decisions/0047).
"""

RunMode = Literal["partition", "batch", "turns"]
"""partition: tasks move a position by its own transactional id; batch: the driver moves all
positions by the publisher's; turns: a worker moves a position by two ids in turn."""

FIRST: Mapping[RunMode, Mode] = {"partition": "partition", "batch": "batch", "turns": "first"}
"""The mode of the positions that a run takes over."""

NEXT: Mapping[Mode, Mode] = {"first": "second", "second": "first"}
"""The mode after a transaction, where two ids take turns."""


class PositionRecord(msgspec.Struct, frozen=True):
    """A position, the range whose commit moved it there, and the ids that may move it."""

    position: int
    epoch: int
    cluster: str
    topic_id: str
    start: int
    end: int
    kind: str
    records: int
    rows: int
    rejects: int
    filtered: int
    mode: Mode
    totals: Totals | None

    @property
    def entry(self) -> Entry:
        """The position as a ledger entry."""
        return Entry(self.position, self.epoch)


class WholeTakeovers(msgspec.Struct, frozen=True, array_like=True):
    """Takeovers of all partitions, in a pipeline that has others too.

    Attributes:
        held: epoch of the last one that is known to have taken a position.
        given: the newest epoch that was given to one.
    """

    held: int = 0
    given: int = 0


class PipelineRecord(msgspec.Struct, frozen=True):
    """A pipeline.

    Attributes:
        epoch: the last epoch.
        run: the run with that epoch.
        cluster: Kafka's cluster id.
        topic_ids: the ids of the source's topics.
        target: the output topic, or the column that determines it.
        pending: start positions of partitions without a position; decided once.
        settled: partitions that have had a position, by topic.
        outputs: ids of output topics that must not be recreated.
        resetting: the positions of a reset that was begun and is not completed.
        leaders: leader epochs of the source's partitions, each no older than the record before the
            position.
        counted: the count of rejects.
        whole: not written before the first takeover of some partitions: until then every epoch
            was given to one of all.
    """

    epoch: int
    run: str
    cluster: str
    topic_ids: dict[str, str]
    target: str
    pending: dict[str, dict[int, int]]
    settled: dict[str, list[int]]
    outputs: dict[str, str]
    resetting: dict[str, dict[int, int]]
    leaders: dict[str, dict[int, int]]
    counted: RejectCount
    whole: WholeTakeovers | msgspec.UnsetType = msgspec.UNSET


class ResetRecord(msgspec.Struct, frozen=True):
    """A reset: rejects of older epochs from this position on are read again, and are void as
    dead letters.

    Attributes:
        position: the position that it has set.
        before: the position before it; not written if that was lost.
    """

    position: int
    before: int | msgspec.UnsetType = msgspec.UNSET


class ReplayRecord(msgspec.Struct, frozen=True):
    """The next dead letter to be replayed, in a partition of the rejects' topic of that id."""

    position: int
    topic_id: str


class RewriteRecord(msgspec.Struct, frozen=True):
    """The last rewrite of records of a partition.

    Attributes:
        kind: repair or backfill.
        start, end: from the first to after the last of its offsets.
        epoch: of the run that held the position.
        backfilled: start, end and epoch of all ranges that were backfilled: their records may have
            other rows than the history says.
    """

    kind: str
    start: int
    end: int
    epoch: int
    backfilled: list[tuple[int, int, int]]


@dataclass
class View:
    """The state of the ledger topic at the last read.

    Attributes:
        pipeline: the newest record of the pipeline.
        positions: the records of the source's partitions.
        resets: per source partition, the epoch of each reset and its position.
        replayed: the records per partition of a rejects' topic.
        amended: per source partition, the changes by replays; of other totals they are void.
        rewritten: per source partition, the last rewrite.
    """

    pipeline: PipelineRecord | None = None
    positions: dict[TopicPartition, PositionRecord] = field(default_factory=dict)
    resets: dict[TopicPartition, dict[int, Position]] = field(default_factory=dict)
    replayed: dict[TopicPartition, ReplayRecord] = field(default_factory=dict)
    amended: dict[TopicPartition, Totals] = field(default_factory=dict)
    rewritten: dict[TopicPartition, RewriteRecord] = field(default_factory=dict)

    def copy(self) -> View:
        """A copy that later reads do not affect."""
        resets = {tp: dict(known) for tp, known in self.resets.items()}
        positions, replayed = dict(self.positions), dict(self.replayed)
        amended, rewritten = dict(self.amended), dict(self.rewritten)
        return View(self.pipeline, positions, resets, replayed, amended, rewritten)

    @property
    def begins(self) -> dict[TopicPartition, Position]:
        """The positions at which the next run begins: it first completes a reset that was begun."""
        now = {tp: moved.position for tp, moved in self.positions.items()}
        return now | (from_tree(self.pipeline.resetting) if self.pipeline else {})

    def entries(self) -> dict[TopicPartition, Entry]:
        """Every position."""
        return {tp: moved.entry for tp, moved in self.positions.items()}

    @property
    def totals(self) -> dict[TopicPartition, Totals]:
        """The totals of the positions that have them."""
        return {tp: one.totals for tp, one in self.positions.items() if one.totals is not None}

    @property
    def whole(self) -> WholeTakeovers:
        """Takeovers of all partitions: the epoch that was given to one may be held by now."""
        epochs = {moved.epoch for moved in self.positions.values()}
        if self.pipeline is None:
            return WholeTakeovers()
        known = self.pipeline.whole
        if known is msgspec.UNSET:
            return WholeTakeovers(max(epochs, default=0), self.pipeline.epoch)
        return WholeTakeovers(known.given if known.given in epochs else known.held, known.given)


@dataclass(frozen=True)
class LedgerKeys:
    """The keys and transactional ids of one pipeline.

    Neither a topic's name nor a number contains a slash, and the part after the last slash
    distinguishes the kinds (nothing, a number, a word): all ids are different.
    """

    pipeline: str

    @property
    def opener(self) -> str:
        """The transactional id of runs that take an epoch."""
        return f"oncely/{self.pipeline}/"

    def writer(self, tp: TopicPartition) -> str:
        """The transactional id that moves a position in mode ``partition``."""
        return f"oncely/{self.pipeline}/{tp.topic}/{tp.partition}"

    def second(self, tp: TopicPartition) -> str:
        """The transactional id that moves a position in turn with :meth:`writer`."""
        return f"{self.writer(tp)}/second"

    @property
    def publisher(self) -> str:
        """The transactional id of the driver that publishes batches: all positions at once."""
        return f"oncely/{self.pipeline}//publish"

    def mover(self, tp: TopicPartition, position: StoredPosition | None) -> str:
        """The only transactional id that may move a position from its present value.

        A partition without a position belongs to its own id, in any mode: runs of different modes
        may write its first position.
        """
        return self.named(tp, "partition" if position is None else position.mode)

    def named(self, tp: TopicPartition, mode: Mode) -> str:
        """The transactional id that a position with this mode names."""
        if mode == "batch":
            return self.publisher
        return self.second(tp) if mode == "second" else self.writer(tp)

    def movers(self, tp: TopicPartition, position: StoredPosition | None) -> list[str]:
        """The ids that a takeover initialises: :meth:`mover`, or both that take turns.

        Such a position may name the other one by the time it is read.
        """
        if position is None or position.mode not in NEXT:
            return [self.mover(tp, position)]
        return [self.writer(tp), self.second(tp)]

    @property
    def replayer(self) -> str:
        """The transactional id of replays of dead letters; a writer's id has one part more."""
        return f"oncely/{self.pipeline}/replay"

    def pipeline_key(self) -> bytes:
        """The key of :class:`PipelineRecord`."""
        return msgspec.json.encode(["pipeline", self.pipeline])

    def position_key(self, tp: TopicPartition) -> bytes:
        """The key of :class:`PositionRecord`."""
        return msgspec.json.encode(["position", self.pipeline, *tp])

    def reset_key(self, tp: TopicPartition, epoch: int) -> bytes:
        """The key of :class:`ResetRecord`."""
        return msgspec.json.encode(["reset", self.pipeline, *tp, epoch])

    def replayed_key(self, tp: TopicPartition) -> bytes:
        """The key of :class:`ReplayRecord`."""
        return msgspec.json.encode(["replayed", self.pipeline, *tp])

    def amended_key(self, tp: TopicPartition) -> bytes:
        """The key of the changes of a position's totals."""
        return msgspec.json.encode(["amended", self.pipeline, *tp])

    def rewritten_key(self, tp: TopicPartition) -> bytes:
        """The key of the last rewrite of a partition's records."""
        return msgspec.json.encode(["rewritten", self.pipeline, *tp])

    def take(self, view: View, key: bytes | None, value: bytes | None) -> bool:
        """Apply one record of the ledger topic; those of other pipelines are ignored.

        Returns:
            False for a message that is no ledger record at all, which is ignored, too.

        Raises:
            Stopped: a record of this pipeline is invalid: another program has written it.
            NewerFormat, OlderFormat: another version of Oncely has written a record of this
                pipeline.
        """
        try:
            known = msgspec.json.decode(key or b"")
        except msgspec.DecodeError:
            return False
        match known:
            case [str(), str(name), *_]:
                if name == self.pipeline:
                    self._take_ours(view, known, value)
                return True
        return False

    def _take_ours(self, view: View, key: list[object], value: bytes | None) -> None:
        what = f"the ledger topic's record of pipeline {self.pipeline!r}"
        require_known_format(value or b"", FORMAT, what)
        try:
            match key:
                case ["pipeline", _]:
                    view.pipeline = (
                        msgspec.json.decode(value, type=PipelineRecord) if value else None
                    )
                case ["position", _, str(topic), int(number)]:
                    tp = TopicPartition(topic, number)
                    if value:
                        view.positions[tp] = msgspec.json.decode(value, type=PositionRecord)
                    else:
                        view.positions.pop(tp, None)
                case _ if value:
                    self._take_letters(view, key, value)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            refuse_lacking(error, what, _NOT_IN_EARLY_VERSIONS)
            raise Stopped(
                f"the ledger topic holds a record under {key} that Oncely has not written: {error}",
                way_out="write the last good value of that key once more behind it (the topic holds"
                " it until it is compacted), and find out who else writes to the topic",
            ) from None

    def _take_letters(self, view: View, key: object, value: bytes) -> None:
        """Apply records about dead letters: which are still to be replayed, what replays wrote."""
        match key:
            case ["reset", _, str(topic), int(number), int(epoch)]:
                led_to = msgspec.json.decode(value, type=ResetRecord).position
                view.resets.setdefault(TopicPartition(topic, number), {})[epoch] = led_to
            case ["replayed", _, str(topic), int(number)]:
                tp = TopicPartition(topic, number)
                view.replayed[tp] = msgspec.json.decode(value, type=ReplayRecord)
            case ["amended", _, str(topic), int(number)]:
                tp = TopicPartition(topic, number)
                view.amended[tp] = msgspec.json.decode(value, type=Totals)
            case ["rewritten", _, str(topic), int(number)]:
                tp = TopicPartition(topic, number)
                view.rewritten[tp] = msgspec.json.decode(value, type=RewriteRecord)


def replay_group(group: str) -> str:
    """The group that holds the positions of replays."""
    return f"{group}.replay"


def stamp(moved: PositionRecord | OffsetMetadata, pipeline: str) -> str:
    """The metadata of our group offset; far below Kafka's limit of 4,096 bytes."""
    known = [_STAMP, moved.epoch, moved.cluster, moved.topic_id, moved.mode, pipeline]
    more = [] if moved.totals is None else [moved.totals]
    return msgspec.json.encode([*known, *more]).decode()


class OffsetMetadata(msgspec.Struct, frozen=True):
    """A group offset with our metadata."""

    position: int
    epoch: int
    cluster: str
    topic_id: str
    mode: Mode = "partition"
    pipeline: str = ""
    totals: Totals | None = None

    @property
    def entry(self) -> Entry:
        """The position as a ledger entry."""
        return Entry(self.position, self.epoch)


StoredPosition = PositionRecord | OffsetMetadata
"""A stored position: the ledger topic's record, or the group's offset."""


def read_stamp(offset: Position, metadata: str | None) -> OffsetMetadata | None:
    """The group offset, or None if it was committed by a tool or another client.

    Raises:
        OlderFormat: the metadata has no name of a pipeline.
    """
    try:
        found = msgspec.json.decode((metadata or "").encode())
    except msgspec.DecodeError:
        return None
    match found:
        case ["oncely", int(epoch), str(cluster), str(topic_id), *rest] if offset >= 0:
            match rest:
                case [] | ["batch"]:
                    raise OlderFormat(f"the consumer group's offset {offset} (epoch {epoch})")
                case [
                    "partition" | "batch" | "first" | "second" as mode,
                    str(pipeline),
                    *more,
                ]:
                    totals = _totals(*more)
                    return OffsetMetadata(offset, epoch, cluster, topic_id, mode, pipeline, totals)
    return None


def _totals(given: object = None, *_: object) -> Totals | None:
    """The totals in metadata; None if the position has none."""
    try:
        return None if given is None else msgspec.convert(given, Totals)
    except msgspec.ValidationError:  # of a later version: they begin anew
        return None


def tree_names(names: Mapping[str, Iterable[int]]) -> list[TopicPartition]:
    """The partitions of a tree."""
    return [TopicPartition(topic, number) for topic, own in names.items() for number in own]


def encode(
    record: PositionRecord | PipelineRecord | ResetRecord | ReplayRecord | RewriteRecord | Totals,
) -> bytes:
    """The value of a ledger record."""
    return msgspec.json.encode(record)
