"""Rows and dead letters for which the ledger does not account: at offsets before the start of the
pipeline, beyond its position, or of a partition without a position.

The topic decides. A row of no record, or with other values than its record gives today, is
unexpected. Any other one may be right, and the ledger damaged: nothing is decided about it.

:func:`compare_letters` compares the dead letters of committed offsets with their records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from oncely.audit.compare import NO_RECORD
from oncely.audit.evidence import Bounds, Cell, IntArray, Log, Span
from oncely.audit.layout import Part, by_partition
from oncely.audit.ranges import RangeComparison
from oncely.audit.report import Finding, Undecided
from oncely.audit.stored.topic_ledger import Letter, content_of
from oncely.core.batch import DISCARDED, Rejection, Stage
from oncely.core.expected import Expected
from oncely.core.ranges import OffsetRange, TopicPartition, grouped
from oncely.kafka.records import LATEST_MS, headers_of, timestamp_of

_CELL = 8_192
_AT_ONCE = 100  # cells

NOT_CONTRADICTED = (
    "the topic does not contradict them. A reset went back, the ledger was changed, or another"
    " program has written them; a repair leaves them"
)

Judged = Finding | Undecided


@dataclass(frozen=True)
class Outside:
    """Compares them with the topic.

    Attributes:
        comparison: reads the topic and the destination.
        divided: the offsets for which the ledger accounts, by its history.
        bounds: of the logs.
        whole: the offsets for which the ledger accounts.
    """

    comparison: RangeComparison
    divided: Sequence[Part]
    bounds: Mapping[TopicPartition, Bounds]
    whole: Mapping[TopicPartition, OffsetRange]

    def judged(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Judged, int]]:
        """The conclusions, each with its number of rows and dead letters."""
        rows: dict[TopicPartition, Counter[int]] = {}
        for topic, number, at, count, _ in (one.values() for b in batches for one in b.to_pylist()):
            tp = None if topic is None or number is None else TopicPartition(topic, number)
            if tp is not None and at is not None and at >= 0:
                rows.setdefault(tp, Counter())[at] += count
            else:
                text = f"no record has the place of this row: {topic}, {number}, {at}"
                yield Finding(tp, at, "unexpected", text), count
        for tp, own in rows.items():
            yield from self._of_partition(tp, own)

    def _of_partition(
        self, tp: TopicPartition, rows: Mapping[int, int]
    ) -> Iterator[tuple[Judged, int]]:
        offsets = np.array(sorted(rows), np.int64)
        wrong = self._contradicted(tp, offsets)
        if {*wrong.values()} - {NO_RECORD} and not self._gives_the_same(tp):
            wrong = {at: detail for at, detail in wrong.items() if detail == NO_RECORD}
        for at, detail in wrong.items():
            text = f"{self._where(tp, at)}: {detail}"
            yield Finding(tp, at, "unexpected", text), rows[at]
        left = grouped((self._where(tp, at), at) for at in sorted(rows.keys() - wrong.keys()))
        for where, own in left.items():
            number = sum(rows[at] for at in own)
            reason = (
                f"the ledger does not account for {number:,} rows or dead letters {where}:"
                f" {NOT_CONTRADICTED}"
            )
            yield Undecided(tp, OffsetRange(own[0], own[-1] + 1), reason), number

    @cached_property
    def _by_partition(self) -> dict[TopicPartition, list[Part]]:
        return by_partition(self.divided)

    def _gives_the_same(self, tp: TopicPartition) -> bool:
        """True if the records of the first and last range give today what was committed. If not,
        decode or transform may have changed since rows were written."""
        own = self._by_partition.get(tp, ())
        known = [one for one in own if one.digest and self.comparison.is_cheap(one)]
        return bool(known) and all(map(self.comparison.gives_the_same, (*known[:1], *known[-1:])))

    def _where(self, tp: TopicPartition, offset: int) -> str:
        if tp not in self.whole:
            return "the ledger has no position of this partition"
        own = self.whole[tp]
        if offset >= own.end:
            return f"beyond the position, {own.end}"
        return f"before the start of the pipeline, {own.start}"

    def _contradicted(self, tp: TopicPartition, offsets: IntArray) -> dict[int, str]:
        """Those of no record, and those whose record gives something else, with the difference."""
        end = self.bounds[tp].end if tp in self.bounds else 0
        found = dict.fromkeys(offsets[offsets >= end].tolist(), NO_RECORD)
        expected = self.comparison.expected
        recipe = "" if expected is None else expected.recipe
        starts = np.unique(offsets[offsets < end] // _CELL).tolist()
        cells = [
            Cell(Span(tp, OffsetRange(at * _CELL, min(end, at * _CELL + _CELL))), recipe)
            for at in starts
        ]
        for at in range(0, len(cells), _AT_ONCE):
            for one in self.comparison.against_records(cells[at : at + _AT_ONCE]):
                for damage in one.damage:
                    if damage.kind in ("unexpected", "altered"):
                        hit = damage.offsets[np.isin(damage.offsets, offsets)]
                        found |= dict.fromkeys(hit.tolist(), damage.detail)
        return found


_PARTS = ("timestamp", "key", "value", "headers")
_STAGES = {*get_args(Stage), DISCARDED}
_LETTERS = 500  # records that are in memory together
_COMPARED = 200  # characters of a reason: destinations shorten it


_NOTHING = content_of(None, None, None, ())


def compare_letters(
    letters: Iterable[Letter],
    ranges: Mapping[TopicPartition, OffsetRange],
    log: Log,
    expected: Expected | None,
) -> Iterator[tuple[Letter, str | None]]:
    """The dead letters of some offsets, and what is wrong with each: empty if nothing is, None if
    the topic no longer holds its record.

    Args:
        letters: by partition and offset.
        ranges: the offsets.
        log: the topics.
        expected: tells the stage at which a record is refused today; None if nothing does.
    """
    for tp, own in groupby(letters, lambda one: one.of):
        inside = [one for one in own if tp in ranges and one.offset in ranges[tp]]
        for at in range(0, len(inside), _LETTERS):
            some = inside[at : at + _LETTERS]
            found = log.messages(tp, [one.offset for one in some])
            refused = expected.refused(tp, list(found.values())) if expected and found else {}
            for one in some:
                there = one.offset in found
                yield one, _problem(one, found[one.offset], refused) if there else None


def _problem(letter: Letter, record: Any, refused: Mapping[int, Rejection]) -> str:
    at = timestamp_of(record)
    at = None if at is None or abs(at) > LATEST_MS else at
    wanted = content_of(at, record.key(), record.value(), headers_of(record))
    if letter.stage == DISCARDED:
        wanted = (wanted[0], *_NOTHING[1:])
    parts = zip(_PARTS, letter.content, wanted, strict=True)
    if other := [name for name, kept, own in parts if kept != own]:
        return f"its dead letter has another {' and '.join(other)}"
    today = refused.get(letter.offset)
    # Another reason is that of the destination, or of an earlier decode or transform.
    same = today is not None and letter.reason.startswith(today.reason[:_COMPARED])
    known = {today.stage, DISCARDED} if today is not None and same else _STAGES
    return "" if letter.stage in known else f"its dead letter has another stage: {letter.stage}"
