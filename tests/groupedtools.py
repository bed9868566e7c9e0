"""What tests of grouped evidence share: topics and recomputed records that tests write down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.audit.compare import Rules
from oncely.audit.content import GroupComparison, GroupedEvidence, Result
from oncely.audit.evidence import Bounds, IntArray, Readable, Span, runs_of
from oncely.audit.report import Finding
from oncely.core.batch import Rejection
from oncely.core.digest import Recipe, row_digests
from oncely.core.expected import ExpectedRecords
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from tests.sinktools import SCHEMA, SOURCE, Rec
from tests.storedtools import Message


def offsets_of(runs: IntArray) -> list[int]:
    """The inverse of :func:`oncely.audit.evidence.runs_of`."""
    return [offset for first, end in runs.tolist() for offset in range(first, end)]


Records = Mapping[TopicPartition, Sequence[Rec]]


@dataclass
class Topic:
    """The records of the source: what a reader gets, and what each of them becomes.

    Attributes:
        records: the readable records; an offset that is left out is a hole.
        first: the first offset that the topic still holds.
        last: the end of a partition, if it is behind the last record.
        schema: the columns of rows.
    """

    records: Records
    first: Mapping[TopicPartition, int] = field(default_factory=dict)
    last: Mapping[TopicPartition, int] = field(default_factory=dict)
    schema: pa.Schema = SCHEMA
    asked: list[Span] = field(default_factory=list)
    """The spans that were recomputed."""

    def change(self, tp: TopicPartition, offset: int, **parts: Any) -> None:
        """Change a record; what was committed of it stays."""
        own = [replace(r, **parts) if r.offset == offset else r for r in self.records[tp]]
        self.records = {**self.records, tp: own}

    def _of(self, span: Span) -> list[Rec]:
        held = self.first.get(span.partition, 0)
        own = self.records.get(span.partition, ())
        return [one for one in own if one.offset in span.range and one.offset >= held]

    # -- as a Log --------------------------------------------------------------------------

    def identity(self) -> SourceIdentity:
        return SOURCE

    def bounds(self) -> Mapping[TopicPartition, Bounds]:
        return {
            tp: Bounds(
                self.first.get(tp, 0),
                self.last.get(tp, max((r.offset + 1 for r in own), default=0)),
            )
            for tp, own in self.records.items()
        }

    def compacted(self) -> frozenset[str]:
        return frozenset()

    def readable(self, spans: Sequence[Span]) -> Iterator[Readable]:
        for span in spans:
            runs = runs_of([one.offset for one in self._of(span)])
            yield Readable(span, runs, self.first.get(span.partition, 0))

    def messages(self, tp: TopicPartition, offsets: Sequence[int]) -> dict[int, Message]:
        spans = [Span(tp, OffsetRange(offset, offset + 1)) for offset in offsets]
        return {
            one.offset: Message(one.offset, one.key, one.value, one.headers)
            for span in spans
            for one in self._of(span)
        }

    def refused(self, tp: TopicPartition, messages: Sequence[Message]) -> dict[int, Rejection]:
        bad = {one.offset: one.bad for one in self.records.get(tp, ()) if one.bad}
        there = (one.offset() for one in messages)
        return {at: Rejection(0, "decode", bad[at]) for at in there if at in bad}

    def offsets_at(self, at: datetime) -> Mapping[TopicPartition, Position]:
        raise NotImplementedError

    def times(
        self, around: Mapping[TopicPartition, Position]
    ) -> Mapping[TopicPartition, tuple[datetime | None, datetime | None]]:
        return dict.fromkeys(around, (None, None))

    def close(self) -> None:
        """Nothing is open."""

    recipe: str = ""
    others: str = ""

    # -- as Expected -----------------------------------------------------------------------

    def of(self, span: Span, recipe: str) -> Iterator[ExpectedRecords]:
        self.asked.append(span)
        columns, own = Recipe.parse(recipe), self._of(span)
        digests = [self._digest(one, columns) for one in own]
        yield ExpectedRecords(
            np.array([one.offset for one in own], np.int64),
            np.array([1 if one.bad else 0 if one.rows else 2 for one in own], np.int8),
            np.array([len(one.rows) for one in own], np.int64),
            np.array(digests, np.uint64),
        )

    def _digest(self, one: Rec, recipe: Recipe) -> int:
        return self.digest_of(list(one.rows), one.offset, recipe, self.schema)

    @staticmethod
    def digest_of(
        given: Sequence[Mapping[str, object]],
        offset: int,
        recipe: Recipe,
        schema: pa.Schema | None = None,
    ) -> int:
        """The digest of a record's rows."""
        if not given:
            return 0
        rows = pa.Table.from_pylist([dict(one) for one in given], schema=schema)
        there = tuple(c for c in recipe.columns if c[0] in rows.column_names)
        offsets = np.full(len(given), offset) if recipe.offset else None
        found = row_digests(rows, offsets, Recipe(there, recipe.offset))
        return sum(map(int, found)) % (1 << 64)


@dataclass
class Compared:
    """The results of all groups together."""

    results: list[Result]
    unexpected: Sequence[Finding]

    @property
    def records(self) -> int:
        return sum(sum(one.records.values()) for one in self.results)

    @property
    def holes(self) -> int:
        return sum(sum(one.holes.values()) for one in self.results)

    @property
    def is_clean(self) -> bool:
        return all(one.is_clean for one in self.results) and not self.unexpected

    @property
    def findings(self) -> list[tuple[str, TopicPartition | None, int | None]]:
        """Kind, partition and offset, sorted."""
        found = [f for one in self.results for f, _ in one.findings] + list(self.unexpected)
        each: list[tuple[str, TopicPartition | None, int | None]]
        each = [(one.kind, one.partition, one.offset) for one in found]
        return sorted(each, key=lambda one: (one[0], one[1] or (), one[2] or 0))

    @property
    def details(self) -> str:
        found = [f.detail for one in self.results for f, _ in one.findings]
        found += [one.detail for one in self.unexpected]
        return "\n".join(found)

    @property
    def numbers(self) -> dict[str, int]:
        """Records by kind of damage."""
        found: dict[str, int] = {}
        for one in self.results:
            for finding, number in one.findings:
                found[finding.kind] = found.get(finding.kind, 0) + number
        return found

    @property
    def notes(self) -> list[str]:
        return [note for one in self.results for note in one.notes]

    @property
    def reasons(self) -> str:
        return "\n".join(u.reason for one in self.results for u in one.undecided)


def compare(
    evidence: GroupedEvidence,
    topic: Topic,
    rules: Rules = Rules(),  # noqa: B008 - immutable
    *,
    expected: bool = True,
) -> Compared:
    """The results of the evidence's groups; the evidence is closed."""
    try:
        found = GroupComparison(evidence, topic, rules, topic if expected else None)
        return Compared(list(map(found.compare, evidence.groups)), evidence.unexpected)
    finally:
        evidence.close()
