"""What was found, compared with what was published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Self

from storm.destinations import Found


@dataclass(frozen=True)
class Tally:
    """Counts of a storm, or of several.

    Attributes:
        records: committed records of the source.
        lost: records that are not in the destination.
        duplicated: surplus copies.
        aborted_reads: records of aborted transactions that are in the destination.
        out_of_order: neighbours of one source partition in the wrong order.
    """

    records: int = 0
    lost: int = 0
    duplicated: int = 0
    aborted_reads: int = 0
    out_of_order: int = 0

    def __add__(self, other: Tally) -> Self:
        own = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        return type(self)(**own)

    @property
    def is_clean(self) -> bool:
        """True if there were records, and all of them took effect once, in order."""
        wrong = self.lost, self.duplicated, self.aborted_reads, self.out_of_order
        return self.records > 0 and not any(wrong)


def compare(expected: Mapping[int, list[int]], found: Found) -> Tally:
    """Compare the destination with the source's committed records.

    Args:
        expected: numbers by source partition.
        found: what the destination contains, in the order of arrival.
    """
    there = Counter((part, number) for part, number, _ in found)
    arrived: dict[int, list[int]] = {}
    for part, number, _ in found:
        arrived.setdefault(part, []).append(number)
    return Tally(
        records=sum(map(len, expected.values())),
        lost=len(lost(expected, found)),
        duplicated=sum(number - 1 for number in there.values()),
        aborted_reads=sum(aborted for _, _, aborted in found),
        out_of_order=sum(b < a for numbers in arrived.values() for a, b in pairwise(numbers)),
    )


def lost(expected: Mapping[int, list[int]], found: Found) -> set[tuple[int, int]]:
    """Partition and number of the records that are not in the destination."""
    wanted = {(part, number) for part, numbers in expected.items() for number in numbers}
    return wanted - {(part, number) for part, number, _ in found}
