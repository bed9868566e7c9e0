"""The newest row of each key, of all records up to the positions.

A tombstone deletes the row of its key. Another row replaces it, unless the one that is there has a
higher version. So of a key's rows behind its last tombstone those with the highest version count,
and of these the last. Records of a key that are in several partitions have no order: then only
versions decide, and without one, or with a tombstone, it is not known which row is the newest.

A ledger tells of its own records only. Where another pipeline writes into the same table, or the
ledger was changed, a row that is not there need not be lost: a row of a higher version may have its
key, or a tombstone that this ledger does not contain may have deleted it (:class:`OtherWriters`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oncely.audit.engine import Ends
from oncely.audit.evidence import Expected, Holder, IntArray, KeyedEvidence, Keys, skipped
from oncely.core.digest import STORED, Recipe
from oncely.core.expected import Changes
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped
from oncely.extras import polars as pl

_NONE = -1

Digests = npt.NDArray[np.uint64]


class Newest(NamedTuple):
    """Rows that a table should have, by partition in ascending order of offset.

    Attributes:
        offset: the record of each row.
        digest: the digest of each row.
    """

    offset: IntArray
    digest: Digests


class Fate(NamedTuple):
    """What should have become of a key.

    Attributes:
        partition, offset: of the newest row; or of the last tombstone if it is deleted.
        deleted: the key should have no row.
        sure: false if records of several partitions have the key, in no known order.
    """

    partition: TopicPartition
    offset: int
    deleted: bool
    sure: bool


class NewestRows:
    """Takes the changes of one partition after another, and keeps a line for each key.

    Args:
        versioned: the table has a version column.
        lines: lines that wait, at least, until they are reduced.
    """

    def __init__(self, *, versioned: bool, lines: int = 500_000) -> None:
        self._versioned, self._most = versioned, lines
        self._partitions: list[TopicPartition] = []
        self._done: list[pl.DataFrame] = []

    def add(self, partition: TopicPartition, changes: Iterable[Changes], rejects: IntArray) -> None:
        """Add a partition's changes, in order; those of dead letters had no effect."""
        state: pl.DataFrame | None = None
        waiting: list[pl.DataFrame] = []
        for one in changes:
            waiting.append(_frame(one, rejects))
            lines = sum(frame.height for frame in waiting)
            if lines > max(self._most, 0 if state is None else state.height):
                state, waiting = self._reduced([state, *waiting]), []
        number = pl.lit(len(self._partitions), pl.Int32).alias("partition")
        self._partitions.append(partition)
        whole = self._reduced([state, *waiting])
        if whole is not None:
            self._done.append(whole.with_columns(number))

    def _reduced(self, frames: Sequence[pl.DataFrame | None]) -> pl.DataFrame | None:
        """One line for each key: its last tombstone, and its newest row behind it."""
        given = [one for one in frames if one is not None and one.height]
        if not given:
            return None
        lines = pl.concat(given, how="vertical_relaxed")
        gone = lines.group_by("key").agg(pl.col("gone").max())
        live = lines.drop("gone").join(gone, on="key").filter(pl.col("at") > pl.col("gone"))
        order = ["version", "at"] if self._versioned else ["at"]
        best = live.sort(order, maintain_order=True).group_by("key", maintain_order=True).last()
        found = gone.join(best.drop("gone"), on="key", how="left")
        return found.with_columns(pl.col("at").fill_null(_NONE)).select(lines.columns)

    def settle(self) -> Settled:
        """The newest row of each key over all partitions."""
        if not self._done:
            return Settled(self._partitions, None)
        lines = pl.concat(self._done, how="vertical_relaxed")
        several = pl.len().over("key") > 1
        deletes = (pl.col("gone") != _NONE).any().over("key")
        sure = ~several
        if self._versioned:
            highest = pl.col("version") == pl.col("version").max().over("key")
            unique = highest.sum().over("key") == 1
            lines = lines.with_columns(
                pl.when(several & ~deletes & unique & ~highest.fill_null(value=False))
                .then(None)
                .otherwise(pl.col("at"))
                .alias("at")
            ).filter(pl.col("at").is_not_null())
            sure = pl.len().over("key") == 1
        return Settled(self._partitions, lines.with_columns(sure.alias("sure")).sort("key"))


@dataclass(frozen=True)
class Settled:
    """The newest rows.

    Attributes:
        partitions: by number.
        lines: sorted by key: the last tombstone (gone), the newest row (at), its digest.
    """

    partitions: Sequence[TopicPartition]
    lines: pl.DataFrame | None

    def rows(self, partition: TopicPartition, *, sure: bool = True) -> Newest:
        """The rows of a partition's records that the table should have; or may have."""
        if self.lines is None or partition not in self.partitions:
            return Newest(np.zeros(0, np.int64), np.zeros(0, np.uint64))
        own = self.lines.filter(
            (pl.col("partition") == self.partitions.index(partition))
            & (pl.col("at") != _NONE)
            & (pl.col("sure") == sure)
        ).sort("at")
        return Newest(own["at"].to_numpy(), own["digest"].to_numpy())

    def keys(self, places: Iterable[tuple[TopicPartition, int]]) -> pl.DataFrame:
        """The keys whose newest rows are of some records, ascending, with these (partition, at) and
        the versions."""
        number = {tp: at for at, tp in enumerate(self.partitions)}
        wanted = [(number[tp], offset) for tp, offset in places if tp in number]
        schema = {"partition": pl.Int32, "at": pl.Int64}
        asked = pl.DataFrame(wanted, schema, orient="row")
        if self.lines is None:
            return asked.clear()
        return self.lines.join(asked, on=["partition", "at"], how="semi").sort("key")

    def fate(self, key: int) -> Fate | None:
        """What should have become of a key; None if no record has it."""
        if self.lines is None:
            return None
        keys = self.lines["key"].to_numpy()
        at = int(np.searchsorted(keys, np.uint64(key)))
        if at == len(keys) or int(keys[at]) != key:
            return None
        line = self.lines.row(at, named=True)
        deleted = line["at"] == _NONE
        tp = self.partitions[line["partition"]]
        return Fate(tp, line["gone"] if deleted else line["at"], deleted, line["sure"])


def _frame(changes: Changes, rejects: IntArray) -> pl.DataFrame:
    count = len(changes.offset)
    none = np.full(count, _NONE, dtype=np.int64)
    columns = {
        "key": changes.key,
        "at": np.where(changes.deleted, none, changes.offset),
        "gone": np.where(changes.deleted, changes.offset, none),
        "digest": np.zeros(count, np.uint64) if changes.digest is None else changes.digest,
    }
    frame = pl.DataFrame(columns)
    if changes.version is not None:
        version = pl.from_arrow(changes.version)
        frame = frame.with_columns(pl.Series("version", version))
    keep = ~np.isin(changes.offset, rejects)
    return frame.filter(pl.Series(keep)) if count else frame


# -- other writers --------------------------------------------------------------------------

Place = tuple[TopicPartition, int]
"""A record."""

DELETED = (
    "rows of keys that have none of their newest record: records that this ledger does not contain,"
    " of another pipeline or of the time before it was changed, may have deleted them; a repair"
    " leaves them"
)
REPLACED = (
    "rows of keys that have a row for which this ledger does not account, and nothing tells that"
    " it is the newer one; a repair leaves them"
)


@dataclass(frozen=True)
class OtherWriters:
    """Tells what others may have done.

    Attributes:
        snapshot: the table.
        expected: knows the digests of keys.
        newest: the rows that the table should have.
        ends: what is compared.
        version: the name of the version column; None if there is none.
    """

    snapshot: KeyedEvidence
    expected: Expected
    newest: Settled
    ends: Ends
    version: str | None

    def explain(self, missing: Collection[Place]) -> dict[Place, str]:
        """Those of some records without a row that need not be lost: why that is not known; empty
        if it is right, as newer rows have their keys."""
        keys = self.newest.keys(missing)
        recipe = self.expected.keys
        holders: dict[int, Holder] = {}
        if recipe and not self.snapshot.unable(recipe) and keys.height:
            versions = keys["version"].to_arrow() if self._comparable else None
            asked = Keys(recipe, keys["key"].to_numpy(), self.version, versions)
            holders = {one.key: one for one in self.snapshot.holders(asked)}
        lines = zip(keys["partition"], keys["at"], keys["key"], strict=True)
        by_place = grouped(((self.newest.partitions[tp], at), key) for tp, at, key in lines)
        found = {}
        for place, own in by_place.items():
            reasons = [self._reason(place, holders.get(key)) for key in own]
            known = [one for one in reasons if one is not None]
            if len(known) == len(reasons):
                found[place] = max(known)
        return found

    @property
    def _comparable(self) -> bool:
        """True if the server takes the versions as they are sent."""
        kinds = dict(Recipe.parse(self.expected.recipe).columns)
        return self.version in kinds and kinds[self.version].name != STORED

    def _reason(self, place: Place, holder: Holder | None) -> str | None:
        """Why nothing is known of the row of a key, empty if it is right; None: it is lost."""
        if holder is None:
            return DELETED if self.may_delete(*place) else None
        tp, at = TopicPartition(str(holder.topic), holder.partition or 0), holder.offset
        if (tp, at) == place:
            return ""
        if at is not None and any(at in one for one in self._ours.get(tp, ())):
            return None
        later = self.version is None and tp == place[0] and at is not None and at > place[1]
        return "" if holder.newer or later else REPLACED

    @cached_property
    def _ours(self) -> Mapping[TopicPartition, Sequence[OffsetRange]]:
        """The offsets for which this ledger accounts, and no other."""
        theirs = grouped((tp, one) for _, tp, one in self.snapshot.claims)
        passed = skipped(self.snapshot.committed)
        return {
            tp: whole.minus([*theirs.get(tp, ()), *passed.get(tp, ())])
            for tp, whole in self.ends.whole.items()
        }

    def may_delete(self, tp: TopicPartition, offset: int) -> bool:
        """True if there may be a tombstone, later than a record, that this ledger does not contain.
        Of other partitions all records before the start of the pipeline are earlier ones."""
        later = {of: one.start for of, one in self.ends.whole.items()} | {tp: offset + 1}
        return any(end > later.get(of, 0) for of, end in self._unknown.items())

    @cached_property
    def _unknown(self) -> Mapping[TopicPartition, Position]:
        """The ends of what others have committed, and of rows for which no ledger accounts."""
        found: dict[TopicPartition, Position] = {}
        for tp, end in self._ends():
            found[tp] = max(end, found.get(tp, 0))
        return found

    def _ends(self) -> Iterator[tuple[TopicPartition, Position]]:
        for _, tp, range_ in self.snapshot.claims:
            yield tp, range_.end
        for batch in self.snapshot.outside(self.ends.whole):
            for topic, number, at, *_ in (one.values() for one in batch.to_pylist()):
                tp = TopicPartition(str(topic), number or 0)
                if at is not None and (tp not in self.ends.bounds or at < self.ends.bounds[tp].end):
                    yield tp, at + 1
