"""What the records of a range become by the pipeline's decode and transform of today.

For the audit, which compares it with the destination: :class:`oncely.core.expected.Expected`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.clients.kafka.range_reader import RangeReader
from oncely.config import DeltaSinkSettings, KafkaSinkSettings, SqlSinkSettings
from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.core.digest import Recipe, UInt64, kind_of, row_digests
from oncely.core.expected import FILTERED, REJECT, ROWS, Changes, ExpectedRecords, Span
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.errors import TableMismatch
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.messages import table_of
from oncely.runtimes.reprocess import Reprocessing
from oncely.sinks.delta.task import DeltaFormat, accepted
from oncely.sinks.kafka.messages import encode
from oncely.sinks.sql.prepare import DELETED, prepare

if TYPE_CHECKING:
    from oncely.pipeline.pipeline import Pipeline
    from oncely.sinks.kafka.sink import KafkaSink
    from oncely.sinks.sql.sink import SqlSink

_BOUNDS = Bounds(seconds=1e9)
_NONE = np.zeros(0, dtype=bool)


@dataclass
class PipelineExpected:
    """Reads records, and decodes and transforms them as a task does. Writes nothing.

    Attributes:
        pipeline: with a row transform, or none.
    """

    pipeline: Pipeline

    @property
    def recipe(self) -> str:
        """The recipe of today's rows; empty if they have no digest."""
        if self._messages is not None:
            return str(self._messages.form.recipe)
        if isinstance(self.pipeline.settings.sink, DeltaSinkSettings):
            return str(self._delta.recipe_of_rows)
        if self._table is None or self._table.target is None:
            return ""
        # The target has none for an upsert: its rows are not those of a range.
        target = replace(self._table.target, keys=())
        return str(target.recipe(self._table.keep_source) or "")

    def of(self, span: Span, recipe: str) -> Iterator[ExpectedRecords]:
        """The readable records of a span, decoded and transformed."""
        wanted = Recipe.parse(recipe) if recipe else None
        for chunk in self._chunks(span):
            yield self._records(chunk, wanted)

    def changes(self, span: Span) -> Iterator[Changes]:
        """The rows and tombstones of an upsert."""
        if not self.recipe:
            return
        for chunk in self._chunks(span):
            yield self.changes_of(chunk)

    def changes_of(self, chunk: Chunk) -> Changes:
        """The rows and tombstones of a chunk."""
        recipe = Recipe.parse(self.recipe)
        if self._table is not None and self._table.target is not None:
            target = self._table.target
            made = prepare(chunk, target, self._table.keep_source)
            deleted = made.rows.column(DELETED).to_numpy() == 1 if len(made.row_record) else _NONE
            of = _Upserted(made.rows, made.row_record, deleted, made.rejections)
            return _changes(chunk, of, target.keys, target.version, recipe)
        form = self._delta
        rows, record, deleted, refused = accepted(form, chunk)
        good = ~np.isin(record, [one.record for one in refused])
        every = [*chunk.rejections, *refused]
        of = _Upserted(rows.filter(pa.array(good)), record[good], deleted[good], every)
        return _changes(chunk, of, form.keys, form.version, recipe)

    def _chunks(self, span: Span) -> Iterator[Chunk]:
        tp, range_ = span
        starts = {tp: range_.start}
        decoder = self.pipeline.decoder
        tables = (table_of({tp: some}, decoder.needs) for some in self._reader.read(tp, range_))
        # The run has isolated records that crash the decoder, too.
        again = Reprocessing(partial(isolate_crashes, decoder), self.pipeline.row_transform)
        return again.chunks(starts, tables, _BOUNDS)

    def close(self) -> None:
        """Close the connections."""
        if "_reader" in self.__dict__:
            self._reader.close()

    @cached_property
    def _reader(self) -> RangeReader:
        source = self.pipeline.settings.source
        return RangeReader(source.brokers, source.kafka_properties())

    @cached_property
    def _delta(self) -> DeltaFormat:
        """The rows of a Delta table."""
        sink: Any = self.pipeline.sink(self.pipeline.row_schema())
        return sink.form  # type: ignore[no-any-return]

    @cached_property
    def _table(self) -> SqlSink | None:
        """The sink bound to its table; None if it is no table, or does not accept the rows."""
        if not isinstance(self.pipeline.settings.sink, SqlSinkSettings):
            return None
        sink: Any = self.pipeline.sink(self.pipeline.row_schema())
        try:
            return sink.bind()  # type: ignore[no-any-return]
        except TableMismatch:
            return None

    def _records(self, chunk: Chunk, recipe: Recipe | None) -> ExpectedRecords:
        rows, record, refused = chunk.rows, chunk.row_record, chunk.rejections
        if self._table is not None:
            prepared = prepare(chunk, self._table.target, self._table.keep_source)
            rows, record, refused = prepared.rows, prepared.row_record, prepared.rejections
        elif self._messages is not None:
            encoded = encode(chunk, self._messages.form, self._messages.largest)
            refused = encoded.rejections
            written = ~np.isin(encoded.record, [one.record for one in refused])
            rows = pa.table({"key": encoded.key, "value": encoded.value}).filter(pa.array(written))
            record = encoded.record[written]
        elif recipe is not None:  # a column that the rows lack is null in the destination
            there = tuple(one for one in recipe.columns if one[0] in rows.column_names)
            recipe = replace(recipe, columns=there)
        return _records(chunk, record, refused, _digests(chunk, record, rows, recipe))

    @cached_property
    def _messages(self) -> KafkaSink | None:
        """The sink of messages; None if it is another one."""
        if not isinstance(self.pipeline.settings.sink, KafkaSinkSettings):
            return None
        return self.pipeline.sink(self.pipeline.row_schema())  # type: ignore[return-value]


def _digests(
    chunk: Chunk, record: IntArray, rows: pa.Table, recipe: Recipe | None
) -> UInt64 | None:
    """The digests of rows by a recipe, which may be of an earlier table or transform."""
    if recipe is None:
        return None
    if not len(record):
        return np.zeros(0, dtype=np.uint64)
    try:
        return row_digests(rows, chunk.offset[record] if recipe.offset else None, recipe)
    except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _records(
    chunk: Chunk, record: IntArray, refused: Sequence[Rejection], digests: UInt64 | None
) -> ExpectedRecords:
    rows = np.bincount(record, minlength=chunk.records).astype(np.int64)
    outcome = np.where(rows > 0, ROWS, FILTERED).astype(np.int8)
    outcome[np.array([one.record for one in refused], dtype=np.int64)] = REJECT
    digest = None
    if digests is not None:
        digest = np.zeros(chunk.records, dtype=np.uint64)
        np.add.at(digest, record, digests)
    return ExpectedRecords(chunk.offset.astype(np.int64), outcome, rows, digest)


class _Upserted(NamedTuple):
    """Rows and tombstones, the record of each, and the rejected records."""

    rows: pa.Table
    record: IntArray
    deleted: npt.NDArray[np.bool_]
    rejections: Sequence[Rejection]


def _changes(
    chunk: Chunk, made: _Upserted, keys: Sequence[str], version: str | None, recipe: Recipe
) -> Changes:
    """Rows and tombstones in the order of their records, with the digests of their keys."""
    rejected = sorted({one.record for one in made.rejections})
    rows, record = made.rows, made.record
    offset = chunk.offset[record].astype(np.int64)
    none = np.zeros(0, dtype=np.uint64)
    nothing = not len(record)
    return Changes(
        chunk.offset.astype(np.int64),
        chunk.offset[np.array(rejected, dtype=np.int64)].astype(np.int64),
        offset,
        none if nothing else _keys(rows, keys),
        made.deleted,
        None if nothing or version is None else rows.column(version),
        none if nothing else row_digests(rows, offset if recipe.offset else None, recipe),
    )


def _keys(rows: pa.Table, keys: Sequence[str]) -> UInt64:
    """A digest of each key; values without a kind by their text."""
    columns = {
        name: rows.column(name) if kind_of(rows.column(name).type) else _text(rows.column(name))
        for name in keys
    }
    recipe = Recipe.of({name: kind_of(one.type) for name, one in columns.items()}, offset=False)
    return row_digests(pa.table(columns), None, recipe)


def _text(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([None if one is None else str(one) for one in column.to_pylist()], pa.string())
