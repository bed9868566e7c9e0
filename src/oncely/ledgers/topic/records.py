"""Transactional ids, records of the ledger topic, and the metadata of committed group offsets.

The ledger is a compacted topic with one partition. Its keys:

| key                                    | value                                                   |
|----------------------------------------|---------------------------------------------------------|
| ``["pipeline", name]``                 | `PipelineRecord`: epoch, run, source, destination       |
| ``["position", name, topic, number]``  | `PositionRecord`: position, epoch, the range just done  |
| ``["reset", name, topic, number, n]``  | `ResetRecord`: the position that a reset of epoch n set |
| ``["replayed", name, topic, number]``  | `ReplayRecord`: the next dead letter to be replayed     |

A committed group offset is the position's fast copy, and its metadata is the stamp, which adds
epoch, mode and the pipeline's name. An offset without a stamp was written by another program and
is not believed, nor is an offset of another pipeline. The stamps of earlier versions have no name:
see :meth:`LedgerKeys.owns`.

Both copies carry the mode of the run that wrote them: it says which transactional id alone may
move the position on (docs/decisions/0012).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from oncely.core.budget import RejectCount
from oncely.core.ledger import Entry
from oncely.core.topics import Position, TopicPartition
from oncely.errors import Stopped

_STAMP = "oncely"

Mode = Literal["partition", "batch"]
"""partition: tasks move a position by its own transactional id; batch: the driver moves all
positions by the publisher's."""


class PositionRecord(msgspec.Struct, frozen=True):
    """A position, the range whose commit moved it there, and by which ids it moves on."""

    position: int
    epoch: int
    cluster: str
    topic_id: str
    start: int
    end: int
    kind: str
    records: int = 0
    rows: int = 0
    rejects: int = 0
    filtered: int = 0
    mode: Mode = "partition"

    @property
    def entry(self) -> Entry:
        """As decisions take it."""
        return Entry(self.position, self.epoch)


class PipelineRecord(msgspec.Struct, frozen=True):
    """A pipeline.

    Attributes:
        epoch: the newest that was given out.
        run: the run that it was given to.
        cluster: Kafka's cluster id.
        topic_ids: of the source's topics.
        target: the output topic, or how it is chosen.
        pending: where partitions begin that have no position yet; decided once.
        settled: partitions that have had a position, by topic.
        outputs: topic ids of those output topics that must not be made anew.
        resetting: where a reset puts positions that was begun and is not done yet.
        leaders: leader epochs of the source's partitions, each no older than the record before
            the position.
        counted: the count of rejects.
    """

    epoch: int
    run: str
    cluster: str
    topic_ids: dict[str, str]
    target: str
    pending: dict[str, dict[int, int]]
    settled: dict[str, list[int]]
    outputs: dict[str, str] = {}
    resetting: dict[str, dict[int, int]] = {}
    leaders: dict[str, dict[int, int]] = {}
    counted: RejectCount = RejectCount()


class ResetRecord(msgspec.Struct, frozen=True):
    """A reset: what older epochs have rejected from here on is read again, and no dead letter."""

    position: int


class ReplayRecord(msgspec.Struct, frozen=True):
    """The next dead letter to be replayed, in a partition of the rejects' topic of that id."""

    position: int
    topic_id: str


@dataclass
class View:
    """What the ledger topic said when it was last read.

    Attributes:
        pipeline: the newest word on it.
        positions: of the source's partitions.
        resets: per source partition, the epoch of each reset and where it led.
        replayed: per partition of a rejects' topic.
    """

    pipeline: PipelineRecord | None = None
    positions: dict[TopicPartition, PositionRecord] = field(default_factory=dict)
    resets: dict[TopicPartition, dict[int, Position]] = field(default_factory=dict)
    replayed: dict[TopicPartition, ReplayRecord] = field(default_factory=dict)

    def copy(self) -> View:
        """As it is now, whatever is read later."""
        resets = {tp: dict(known) for tp, known in self.resets.items()}
        return View(self.pipeline, dict(self.positions), resets, dict(self.replayed))

    @property
    def begins(self) -> dict[TopicPartition, Position]:
        """Where the next run begins: it first finishes a reset that was begun."""
        now = {tp: moved.position for tp, moved in self.positions.items()}
        return now | (from_tree(self.pipeline.resetting) if self.pipeline else {})

    def entries(self) -> dict[TopicPartition, Entry]:
        """Every position."""
        return {tp: moved.entry for tp, moved in self.positions.items()}


@dataclass(frozen=True)
class LedgerKeys:
    """Spells keys and ids of one pipeline.

    Neither a topic's name nor a number holds a slash, and what follows the last one tells the
    kinds apart (nothing, a number, a word): no two ids are the same.
    """

    pipeline: str

    @property
    def opener(self) -> str:
        """The transactional id of whoever takes an epoch."""
        return f"oncely/{self.pipeline}/"

    def writer(self, tp: TopicPartition) -> str:
        """The transactional id of whoever moves a position."""
        return f"oncely/{self.pipeline}/{tp.topic}/{tp.partition}"

    @property
    def publisher(self) -> str:
        """The transactional id of the driver that publishes batches: all positions at once."""
        return f"oncely/{self.pipeline}//publish"

    def mover(self, tp: TopicPartition, standing: StoredPosition | None) -> str:
        """The one transactional id that may move a position from where it stands.

        A partition without a position belongs to its own id, whatever the mode: runs of
        different modes may give it its first one.
        """
        batch = standing is not None and standing.mode == "batch"
        return self.publisher if batch else self.writer(tp)

    @property
    def replayer(self) -> str:
        """The transactional id of whoever replays dead letters; a writer's has one part more."""
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

    def owns(self, stamped: OffsetMetadata, group: str) -> bool:
        """Whether a stamp in ``group`` was written by this pipeline.

        A stamp without a name is ours in the group that is named after this pipeline. In a group
        that the pipeline file names it may be another pipeline's, so it is not believed: the
        ledger topic says the same if it is ours, as both were written by one transaction.
        """
        named_after = f"oncely-{self.pipeline}"
        return stamped.pipeline == self.pipeline or (
            not stamped.pipeline and group in (named_after, replay_group(named_after))
        )

    def take(self, view: View, key: bytes | None, value: bytes | None) -> bool:
        """Apply one record of the ledger topic; those of other pipelines are passed over.

        Returns:
            False for a message that is no ledger record at all, which is passed over, too.

        Raises:
            Stopped: a record of this pipeline that can't be read: another program has written it.
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
            raise Stopped(
                f"the ledger topic holds a record under {key} that Oncely has not written: {error}",
                way_out="write the last good value of that key once more behind it (the topic holds"
                " it until it is compacted), and find out who else writes to the topic",
            ) from None

    def _take_letters(self, view: View, key: object, value: bytes) -> None:
        """Apply what decides which dead letters still wait."""
        match key:
            case ["reset", _, str(topic), int(number), int(epoch)]:
                led_to = msgspec.json.decode(value, type=ResetRecord).position
                view.resets.setdefault(TopicPartition(topic, number), {})[epoch] = led_to
            case ["replayed", _, str(topic), int(number)]:
                tp = TopicPartition(topic, number)
                view.replayed[tp] = msgspec.json.decode(value, type=ReplayRecord)


def replay_group(group: str) -> str:
    """The group that holds the positions of replays."""
    return f"{group}.replay"


def stamp(moved: PositionRecord | OffsetMetadata, pipeline: str) -> str:
    """The metadata of a group offset of ours; far below Kafka's limit of 4,096 bytes."""
    known = [_STAMP, moved.epoch, moved.cluster, moved.topic_id, moved.mode, pipeline]
    return msgspec.json.encode(known).decode()


class OffsetMetadata(msgspec.Struct, frozen=True):
    """A group offset that carries our stamp; ``pipeline`` is empty in stamps without a name."""

    position: int
    epoch: int
    cluster: str
    topic_id: str
    mode: Mode = "partition"
    pipeline: str = ""

    @property
    def entry(self) -> Entry:
        """As decisions take it."""
        return Entry(self.position, self.epoch)


StoredPosition = PositionRecord | OffsetMetadata
"""Where a position stands: the ledger topic's word, or the group's."""


def read_stamp(offset: Position, metadata: str | None) -> OffsetMetadata | None:
    """The group offset, or None when it is not ours: a tool's, or another client's."""
    try:
        found = msgspec.json.decode((metadata or "").encode())
    except msgspec.DecodeError:
        return None
    match found:
        case ["oncely", int(epoch), str(cluster), str(topic_id), *rest] if offset >= 0:
            match rest:
                case []:
                    return OffsetMetadata(offset, epoch, cluster, topic_id)
                case ["batch"]:
                    return OffsetMetadata(offset, epoch, cluster, topic_id, "batch")
                case ["partition" | "batch" as mode, str(pipeline)]:
                    return OffsetMetadata(offset, epoch, cluster, topic_id, mode, pipeline)
    return None


def by_topic(partitions: Mapping[TopicPartition, int]) -> dict[str, dict[int, int]]:
    """Positions as a tree, for JSON."""
    tree: dict[str, dict[int, int]] = {}
    for tp, at in sorted(partitions.items()):
        tree.setdefault(tp.topic, {})[tp.partition] = at
    return tree


def from_tree(tree: Mapping[str, Mapping[int, int]]) -> dict[TopicPartition, Position]:
    """What :func:`by_topic` has made a tree of."""
    return {TopicPartition(t, n): at for t, own in tree.items() for n, at in own.items()}


def tree_names(names: Mapping[str, Iterable[int]]) -> list[TopicPartition]:
    """The partitions of a tree."""
    return [TopicPartition(topic, number) for topic, own in names.items() for number in own]


def encode(record: PositionRecord | PipelineRecord | ResetRecord | ReplayRecord) -> bytes:
    """The value of a ledger record."""
    return msgspec.json.encode(record)
