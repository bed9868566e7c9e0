"""What every ledger has: the port, formats of documents, the identity of the source, totals.

Most sink interfaces have no equivalent of ``positions``. A sink that cannot report its committed
position supports at-least-once delivery only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from oncely.core.claim import (
    Amendment,
    Claim,
    Counts,
    Entry,
    Fence,
    Notes,
    Opened,
    Positions,
    Takeover,
)
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import NewerFormat, OlderFormat, SourceMismatch


class MovesPositions(Protocol):
    """The part of a ledger that tasks use. Picklable; connects lazily, separately in each
    process."""

    @property
    def one_store(self) -> bool:
        """True when records and positions can only go back together, in a failover or restore.

        Then a ledger that is behind earlier commits gives the position to continue from. Otherwise
        the sink may contain records that the ledger does not.
        """

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """The committed positions.

        Args:
            fence: the calling run.
            of: the partitions that are needed, all if empty. The answer may include others.
            settled: include all commits before this call, of any process. Otherwise the result may
                lag slightly behind, which the compare-and-set of a commit detects.

        Raises:
            Unavailable: no answer, or a commit has begun and does not end.
        """

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Move positions alone, and keep the ranges in the history.

        Raises:
            PositionMoved: nothing was moved; read the ledger and decide again.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """


class Ledger(MovesPositions, Protocol):
    """Epochs, positions and notes of one pipeline."""

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch, end older sessions, and settle a position for EVERY partition.

        With ``takeover.partitions`` only for these partitions, and holders of others are not
        affected.

        Raises:
            Fenced: another run has opened since ``takeover.expected``, or another one has taken
                all partitions since ``takeover.since``.
            SourceMismatch: the ledger was written for another cluster or topic.
            TableMismatch: it was written for another destination.
            Stopped: the pipeline has written before, and its position is lost.
            Unavailable: no answer.
        """

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Add positions for partitions that were discovered during the run.

        A run of some partitions takes others over by :meth:`open`.

        Raises:
            Fenced: a newer run has opened.
        """

    def note(self, fence: Fence, notes: Notes) -> None:
        """Store notes beside the positions.

        A run of some partitions notes leader epochs of those that it still holds.

        Raises:
            Fenced: a newer run has opened, for a run of some partitions at all of them; nothing
                was noted.
            Unavailable: the outcome is unknown; it can be repeated.
        """

    def tidy(self, fence: Fence) -> None:
        """Housekeeping between batches; may fail, and is repeated later."""

    def close(self) -> None:
        """Close connections; never raises. The next call connects again."""


class _Stored(msgspec.Struct):
    format: int = 1


def require_known_format(document: bytes, known: int, what: str) -> None:
    """Refuse a document of a newer format, before its other fields are parsed.

    Args:
        document: JSON; anything but an object with a number as ``format`` is the parser's.
        known: the newest format of this version.
        what: the document, for the message.

    Raises:
        NewerFormat: a newer version of Oncely has written it.
    """
    try:
        found = msgspec.json.decode(document, type=_Stored).format
    except msgspec.DecodeError:
        return
    if found > known:
        raise NewerFormat(what, found, known)


def refuse_lacking(error: msgspec.DecodeError, what: str, fields: Iterable[str]) -> None:
    """Refuse a document without a field that every version since the first release writes.

    Args:
        error: of the parser.
        what: the document, for the message.
        fields: those that versions before it did not write.

    Raises:
        OlderFormat: the error is that one of them is missing.
    """
    if any(f"missing required field `{name}`" in str(error) for name in fields):
        raise OlderFormat(what) from None


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


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """Counts and digest of the ranges from an offset up to the position.

    They begin anew with a reset, and when another recipe covers the rows.

    Attributes:
        since: the offset.
        begun: the epoch of the first range: totals that begin at one offset twice differ.
        digest: the digest of the rows; None if it is not known.
        recipe: the columns that it covers.
    """

    since: int
    begun: int = 0
    records: int = 0
    rows: int = 0
    rejects: int = 0
    filtered: int = 0
    digest: int | None = 0
    recipe: str = ""

    @property
    def counts(self) -> Counts:
        """The sums."""
        return Counts(
            self.records, self.rows, self.rejects, self.filtered, self.digest, self.recipe
        )

    def plus(self, done: Counts) -> Totals:
        """The totals with these counts added."""
        sums = self.counts + done
        counts = (sums.records, sums.rows, sums.rejects, sums.filtered)
        return Totals(self.since, self.begun, *counts, sums.digest, sums.recipe)


def add_range(before: Totals | None, start: Position, done: Counts, epoch: int) -> Totals:
    """The totals after a range.

    Args:
        before: the totals at ``start``; None: they begin there.
        start: the first offset of the range.
        done: the counts of the range.
        epoch: the epoch of its commit.
    """
    if before is None or (before.rows and done.rows and before.recipe != done.recipe):
        before = Totals(start, epoch)
    return before.plus(done)


def add_amendment(before: Totals | None, of: Totals, change: Counts) -> Totals:
    """The sums of all changes to the ranges of some totals.

    Args:
        before: the changes so far; None, or those of totals that began elsewhere: these are the
            first.
        of: the totals of the ranges.
        change: the change.
    """
    if before is None or (before.since, before.begun) != (of.since, of.begun):
        before = Totals(of.since, of.begun)
    return before.plus(change)


def covered_by(totals: Mapping[TopicPartition, Totals]) -> _Covered:
    """Finds the offsets that are covered by totals, for :func:`oncely.core.change.replayed`."""
    return _Covered(totals)


class _Covered:
    def __init__(self, totals: Mapping[TopicPartition, Totals]) -> None:
        self._totals = totals

    def __call__(self, tp: TopicPartition, offsets: Sequence[int]) -> dict[int, OffsetRange]:
        since = self._totals[tp].since if tp in self._totals else None
        if since is None:
            return {}
        whole = OffsetRange(since, max(offsets) + 1) if max(offsets) >= since else None
        return {at: whole for at in offsets if whole is not None and at in whole}

    def changes(self, amendments: Sequence[Amendment]) -> dict[TopicPartition, Counts]:
        """The change of each partition's totals."""
        return {
            one.partition: one.counts
            for one in amendments
            if one.partition in self._totals
            and one.range.start >= self._totals[one.partition].since
        }
