"""Rows of an upsert that another writer may have replaced or deleted.

A ledger tells of its own records only. Where another pipeline writes into the same table, or the
ledger was changed, a row that is not there need not be lost: a row of a higher version may have its
key, or a tombstone that this ledger does not contain may have deleted it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from oncely.audit.engine import Ends
from oncely.audit.evidence import Expected, Holder, KeyedEvidence, Keys, skipped
from oncely.audit.newest import Settled
from oncely.core.digest import STORED, Recipe
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped

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
