"""The input and the result of repairs and backfills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from oncely.commit.rewrite import NOTHING
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.core.rewrite import Rewritten
from oncely.errors import WrongInput

NO_OFFSET = "the audit does not know the offset: the rows do not contain it (sink.keep_source)"
NO_RECORD = "no record has this place: delete the row by hand, or correct its columns"
NOT_OURS = "the ledger's history does not contain this offset: it was never read, or was changed"
REFUSED = (
    "not written now, and what is there was left as it is: {}; correct the table or the transform,"
    " and repair again"
)
LOST_FOR_GOOD = "lost for good: the topic no longer has the record"


class Found(NamedTuple):
    """A finding of an audit.

    Attributes:
        partition, offset: the record; None if it is not known.
        kind: lost, duplicated, altered or unexpected.
        within: where it is, if the offset is not known: offsets by partition.
        file: the file that must not be there.
    """

    partition: TopicPartition | None
    offset: int | None
    kind: str
    within: tuple[tuple[TopicPartition, OffsetRange], ...] = ()
    file: str = ""


class Impossible(NamedTuple):
    """A finding that can't be repaired, and the reason."""

    found: Found
    reason: str


@dataclass(frozen=True)
class Repaired:
    """The effect of a repair or backfill; of a dry run, what it would process.

    Attributes:
        executed: False for a dry run.
        offsets: the number of offsets, by kind of damage.
        ranges: the offsets of a backfill.
        impossible: findings that were left as they are.
        done: the sums of the transactions.
        files: files that are replaced or removed, if rows do not contain their offsets.
        removes: the rows and rejects that are removed, and not replaced.
    """

    executed: bool
    offsets: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[TopicPartition, OffsetRange] = field(default_factory=dict)
    impossible: Sequence[Impossible] = ()
    done: Rewritten = NOTHING
    files: int = 0
    removes: Mapping[str, int] = field(default_factory=dict)

    def exceeds(self, most: int) -> str:
        """What would be removed, if that is more than the allowed number of a kind."""
        if max(self.removes.values(), default=0) <= most:
            return ""
        told = " and ".join(f"{number:,} {kind}" for kind, number in self.removes.items())
        return f"it removes {told}, and --max-removed is {most:,}"

    def refuse_more(self, most: int) -> None:
        """Refuse to remove more rows, or more rejects.

        Raises:
            WrongInput: nothing was written.
        """
        if self.executed and (told := self.exceeds(most)):
            raise WrongInput(
                f"the repair was refused, and nothing was written: {told}",
                way_out="look at what `oncely audit` names: are the rows wrong, or is the ledger?"
                f" `--max-removed {max(self.removes.values())}` allows the removal",
            )

    def as_json(self) -> dict[str, Any]:
        """JSON-able values."""
        return {
            "executed": self.executed,
            "offsets": dict(self.offsets),
            "ranges": [
                {"topic": tp.topic, "partition": tp.partition, "start": one.start, "end": one.end}
                for tp, one in sorted(self.ranges.items())
            ],
            "impossible": [
                {
                    "topic": one.found.partition and one.found.partition.topic,
                    "partition": one.found.partition and one.found.partition.partition,
                    "offset": one.found.offset,
                    "kind": one.found.kind,
                    "reason": one.reason,
                }
                for one in self.impossible
            ],
            "removed_rows": self.done.removed_rows,
            "removed_rejects": self.done.removed_rejects,
            "rows": self.done.counts.rows,
            "rejects": self.done.counts.rejects,
            "filtered": self.done.counts.filtered,
            "files": self.files,
            "removes": dict(self.removes),
        }
