"""Statements about the ledger, the rows and the dead letters, of every SQL database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from oncely.audit.evidence import PRESENT, Claims, Committed, Span
from oncely.audit.report import Undecided
from oncely.audit.stored.sql_ledger import AMENDMENTS, PIPELINES, RANGES, REJECTS, LedgerTables
from oncely.audit.stored.topic_ledger import Letter, content_of
from oncely.core.claim import SKIPPED
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition, stored_range
from oncely.errors import WrongInput

TOPIC, PARTITION, OFFSET = "kafka_topic", "kafka_partition", "kafka_offset"
_LETTERS = 500  # dead letters that are in memory with their values
_WHOLE = f"CAST({OFFSET} AS BIGINT)"
OF_ROWS = (TOPIC, PARTITION, f"CASE WHEN {_WHOLE} = {OFFSET} THEN {_WHOLE} END")
"""The place of a row. A column that holds other numbers, too, may hold one that is no offset."""
OF_REJECTS = ("topic", '"partition"', '"offset"')
_UNTOLD = (
    "the position is beyond these offsets, and the ledger's history does not tell what became of"
    " them: it was changed, or a reset has passed them over"
)


def present(lines: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Lines in the form of :data:`PRESENT`."""
    columns = list(zip(*lines, strict=True)) if lines else [()] * len(PRESENT)
    return pa.record_batch(columns, schema=PRESENT)


@dataclass(frozen=True)
class Ledger:
    """The ledger of the pipeline; see :class:`oncely.audit.evidence.Snapshot`."""

    source: SourceIdentity
    positions: Mapping[TopicPartition, Position]
    started: Mapping[TopicPartition, Position]
    committed: Sequence[Committed]
    claims: Claims
    kept: Callable[[], Iterator[Letter]]
    untold: Sequence[Undecided]


@dataclass
class Tables(LedgerTables):
    """The ledger, the rows and the dead letters in one snapshot."""

    def require_tables(self) -> None:
        """Raises WrongInput if a table is missing, OlderFormat for those of an early version."""
        self.require_known()
        missing = self.missing(self.all)
        if missing:
            raise WrongInput(
                f"{self.dialect.endpoint}: there is no table {', '.join(missing)}",
                way_out="check sink.url and sink.table; a pipeline that never ran has nothing to"
                " compare",
            )

    @cached_property
    def rows(self) -> str:
        """The destination table, for statements that read its rows."""
        (facts,) = self.dialect.facts(self.session, [self.table])
        return facts.relation.rows

    def close(self) -> None:
        """End the session."""
        with suppress(Exception):
            self.session.execute("ROLLBACK")
        self.session.close()

    def ledger(self) -> Ledger:
        """Positions, and the history and amendments in force.

        Raises:
            WrongInput: there is no such pipeline.
        """
        registered = self.registered()
        if registered is None:
            raise WrongInput(
                f"{self.table.sibling(PIPELINES)} has no pipeline {self.pipeline!r}",
                way_out="check the name: a pipeline that never ran has nothing to compare",
            )
        held, entries = self.held(), list(self.entries(RANGES))
        started = {tp: one.position for tp, one in held.items()}
        for tp, at in started.items():
            stored_range(tp, 0, at)
        known: dict[TopicPartition, list[OffsetRange]] = {tp: [] for tp in held}
        for one in entries:
            if one.partition in held:
                if one.kind != SKIPPED:
                    started[one.partition] = min(started[one.partition], one.range.start)
                known[one.partition].append(one.range)
        return Ledger(
            SourceIdentity(registered[0], {tp.topic: one.topic_id for tp, one in held.items()}),
            {tp: one.position for tp, one in held.items()},
            started,
            [
                Committed(Span(one.partition, one.range), one.kind, one.counts, one.epoch, one.at)
                for one in (*entries, *self.entries(AMENDMENTS))
                if not one.superseded
            ],
            self.claims(),
            self.letters_kept,
            # A reset supersedes the whole range that it cuts, also the part that is not read again.
            [
                Undecided(tp, gap, _UNTOLD)
                for tp, one in sorted(held.items())
                for gap in OffsetRange(started[tp], one.position).minus(known[tp])
            ],
        )

    # -- rows and dead letters -------------------------------------------------------------

    def rejects_of(self, spans: Sequence[Span]) -> Iterator[tuple[TopicPartition, int]]:
        """The dead letters of spans."""
        for where, params in conditions(spans, OF_REJECTS):
            rows = self.session.query(
                f"SELECT {', '.join(OF_REJECTS)} FROM {self.name(REJECTS)} WHERE pipeline = %s"
                f" AND ({where})",
                (self.pipeline, *params),
            )
            for topic, number, offset in rows:
                yield TopicPartition(topic, int(number)), int(offset)

    def letters_kept(self) -> Iterator[Letter]:
        """All dead letters, by partition and offset."""
        after: tuple[object, ...] = ("", -1, -1)
        place = ", ".join(OF_REJECTS)
        while rows := self.session.query(
            f'SELECT {place}, stage, reason, timestamp_ms, "key", "value", headers'
            f" FROM {self.name(REJECTS)} WHERE pipeline = %s AND ({place}) > (%s, %s, %s)"
            f" ORDER BY {place} LIMIT {_LETTERS}",
            (self.pipeline, *after),
        ):
            for topic, number, offset, stage, reason, at, key, value, headers in rows:
                content = content_of(at, key, value, headers)
                of = TopicPartition(topic, int(number))
                yield Letter(of, int(offset), stage, reason, content)
            after = rows[-1][:3]

    def rows_outside(self, spans: Sequence[Span]) -> list[tuple[Any, ...]]:
        """Topic, partition, offset and number of other rows."""
        where, params = _outside(spans, OF_ROWS)
        return self.session.query(
            f"SELECT {', '.join(OF_ROWS)}, COUNT(*) FROM {self.rows}"
            f" WHERE {where} GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
            params,
        )

    def rejects_outside(self, spans: Sequence[Span]) -> list[tuple[Any, ...]]:
        """Topic, partition, offset and 1 of other dead letters."""
        where, params = _outside(spans, OF_REJECTS)
        return self.session.query(
            f"SELECT {', '.join(OF_REJECTS)}, 1 FROM {self.name(REJECTS)} WHERE pipeline = %s"
            f" AND ({where}) ORDER BY 1, 2, 3",
            (self.pipeline, *params),
        )


def conditions(
    spans: Sequence[Span], names: tuple[str, str, str], at_once: int = 100
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Conditions that select some spans each, with their parameters."""
    topic, partition, offset = names
    one = f"({topic} = %s AND {partition} = %s AND {offset} >= %s AND {offset} < %s)"
    for at in range(0, len(spans), at_once):
        some = spans[at : at + at_once]
        params = [v for tp, range_ in some for v in (*tp, range_.start, range_.end)]
        yield " OR ".join([one] * len(some)), tuple(params)


def _outside(spans: Sequence[Span], names: tuple[str, str, str]) -> tuple[str, tuple[object, ...]]:
    """The condition that selects all but these spans, also where a column is null."""
    if not spans:
        return "1 = 1", ()
    ((inside, params),) = conditions(spans, names, len(spans))
    return f"({inside}) IS NOT TRUE", params
