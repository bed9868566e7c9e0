"""The port of an offset store, its records, and the weak ledger that it makes.

Two stores cannot be written atomically. A pipeline that saves its positions here is therefore at
least once (rows first, then the position) or at most once (the position first), and never exactly
once, which requires the sink's own ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from oncely.core.claim import (
    Claim,
    Counts,
    Entry,
    Fence,
    Notes,
    Opened,
    PositionMoved,
    Positions,
    Takeover,
)
from oncely.core.ranges import Position, SourceIdentity, TopicPartition
from oncely.errors import Fenced, Stopped, check
from oncely.stores.document import same_cluster, same_topics
from oncely.stores.sql.connection import TableName


@dataclass(frozen=True)
class StoredPosition:
    """The stored state of one topic-partition.

    Attributes:
        position: next offset to read.
        epoch: the epoch of the run that wrote it.
        cluster_id: Kafka's cluster id.
        topic_id: the id of the topic (KIP-516).
    """

    position: Position
    epoch: int
    cluster_id: str
    topic_id: str


class OffsetStore(Protocol):
    """The positions of one pipeline. A store holds several pipelines side by side.

    Picklable. Connects at first use, separately in each process, and may be used from several
    threads. Several processes save different partitions at the same time, and do not undo each
    other's saves. There is no fencing: of two that save the *same* partition, the later one wins.
    """

    @property
    def where(self) -> str:
        """Kind and address of the store, for messages: never with a password."""

    def load(self) -> dict[TopicPartition, StoredPosition]:
        """All present positions of the pipeline. Creates nothing.

        Raises:
            Unavailable: no answer.
            ConfigError: the store refuses the login, or a setting is invalid (``offsets.…``).
            Stopped: it contains foreign data.
        """

    def save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        """Write these positions and no others; durable when it returns.

        After an error it is unknown which of them were written. Saving them again is safe.

        Raises:
            Unavailable: no answer.
            ConfigError: the store does not permit writing, or a setting is invalid (``offsets.…``).
            Stopped: it contains foreign data.
        """

    def warning(self) -> str:
        """A weakness of this store's durability; empty if none is known.

        Raises the errors of :meth:`load`.
        """
        return ""

    def close(self) -> None:
        """Close the connection; the next call opens a new one. Never raises."""


def encode(stored: StoredPosition) -> bytes:
    """``{"position":17,"epoch":3,"cluster_id":"…","topic_id":"…"}``."""
    return msgspec.json.encode(stored)


def decode(text: bytes, where: str, of: object) -> StoredPosition:
    """Parse the text of :func:`encode`.

    Args:
        text: the value.
        where: the store, for the message.
        of: the key of the value, for the message.

    Raises:
        Stopped: it has another form.
    """
    try:
        return checked(msgspec.json.decode(text, type=StoredPosition), where, of)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise foreign(where, of, str(error)) from None


def checked(stored: StoredPosition, where: str, of: object) -> StoredPosition:
    """The value, if position and epoch are valid.

    Raises:
        Stopped: they are not.
    """
    if stored.position < 0 or stored.epoch < 0:
        raise foreign(where, of, "a negative number")
    return stored


def foreign(where: str, of: object, problem: str) -> Stopped:
    """The error for foreign content in a store."""
    return Stopped(
        f"{where}: the value of {of} was not written by an offset store of Oncely: {problem}",
        way_out="check which other program writes there; give the pipeline a place of its own in "
        "[offsets],"
        " or remove what is there, and say where to begin by `oncely offsets reset`",
    )


def field_of(tp: TopicPartition) -> str:
    """``topic/partition``; a topic's name contains no slash."""
    return f"{tp.topic}/{tp.partition}"


def read_field(text: str, where: str) -> TopicPartition:
    """Parse the text of :func:`field_of`.

    Raises:
        Stopped: it has another form.
    """
    topic, _, number = text.rpartition("/")
    if not topic or "/" in topic or not (number.isascii() and number.isdecimal()):
        raise foreign(where, repr(text), "it does not name a topic and a partition")
    return TopicPartition(topic, int(number))


SQL_TABLE = TableName(None, "oncely_offsets")
"""The default table of a store in a SQL database; not ``oncely_positions``: the SQL sink's ledger
has a table of that name."""

SAY_WHERE = "say where to begin by `oncely offsets reset`, such as with --to-earliest --execute"


@dataclass(frozen=True)
class StoreLedger:
    """Positions in an offset store. They are compared, then written, in two steps.

    It stores no notes: each process counts rejects separately.

    Attributes:
        store: the store of the pipeline.
        pipeline: its name.
    """

    store: OffsetStore
    pipeline: str
    _taken: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Epochs that this run has tried to take. A store contains no name of a run by which it
    could identify itself when the answer to a save was lost."""
    _opened: set[TopicPartition] = field(default_factory=set, init=False, repr=False, compare=False)
    """Partitions whose positions this run has saved: the store loses none of them by itself."""

    @property
    def one_store(self) -> bool:
        """The records are in another store."""
        return False

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch, and settle a position for every partition."""
        check(takeover.partitions is None, "an offset store gives out epochs for all partitions")
        source, known = takeover.source, self._load()
        for tp, stored in known.items():
            same_cluster(stored.cluster_id, source, self.pipeline)
            same_topics({tp.topic: stored.topic_id}, source, self.pipeline)
        newest = max((stored.epoch for stored in known.values()), default=0)
        expected = takeover.expected
        if expected is not None and newest > expected and newest not in self._taken:
            raise Fenced(self.pipeline, expected, newest)
        begin = {**takeover.earliest, **(takeover.start() if not known else {})}
        positions = begin | {tp: stored.position for tp, stored in known.items()}
        if takeover.reset is not None:
            positions |= takeover.reset(positions)
        fence = Fence(self.pipeline, newest + 1)
        self._taken.add(fence.epoch)
        self._save({tp: _stored(tp, at, fence, source) for tp, at in positions.items()})
        return Opened(fence, positions, not known, begun=frozenset(positions.keys() - known))

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Add positions of new partitions."""
        known = self._held(fence)
        new = {tp: at for tp, at in positions.items() if tp not in known}
        self._save({tp: _stored(tp, at, fence, source) for tp, at in new.items()})

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """Every position; saved positions are always visible."""
        del fence, of, settled
        return {tp: Entry(one.position, one.epoch) for tp, one in self._load().items()}

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Compare positions, then save the new ones; a store keeps no history."""
        del counts
        known = self._held(claim.fence)
        moved = {}
        for tp in claim.ranges:
            now = known.get(tp)
            if now is None or Entry(now.position, now.epoch) != claim.expected[tp]:
                raise PositionMoved(str(tp))
            moved[tp] = replace(now, position=claim.end(tp))
        self.store.save(moved)

    def note(self, fence: Fence, notes: Notes) -> None:
        """Does nothing: a store keeps positions only."""

    def tidy(self, fence: Fence) -> None:
        """Does nothing: there is nothing to tidy."""

    def close(self) -> None:
        """Close the store's connection."""
        self.store.close()

    def _save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        self.store.save(positions)
        self._opened.update(positions)

    def _load(self) -> dict[TopicPartition, StoredPosition]:
        """Every position of the store.

        Raises:
            Stopped: it no longer has positions that this run has saved. To open again would begin
                at ``start``, or at the first offset, and skip or repeat records.
        """
        known = self.store.load()
        if gone := self._opened - known.keys():
            raise Stopped(
                f"{self.store.where} no longer holds the position of"
                f" {', '.join(map(str, sorted(gone)))}, which this run has saved there: it was"
                " emptied, or was restarted without its data",
                way_out=f"restore it; or {SAY_WHERE}",
            )
        return known

    def _held(self, fence: Fence) -> dict[TopicPartition, StoredPosition]:
        """Every position, unless a newer run has taken one.

        Raises:
            Fenced: a newer run has taken a position.
        """
        known = self._load()
        newest = max((stored.epoch for stored in known.values()), default=fence.epoch)
        if newest > fence.epoch:
            raise Fenced(fence.pipeline, fence.epoch, newest)
        return known


def _stored(
    tp: TopicPartition, at: Position, fence: Fence, source: SourceIdentity
) -> StoredPosition:
    return StoredPosition(at, fence.epoch, source.cluster_id, source.topic_ids.get(tp.topic, ""))
