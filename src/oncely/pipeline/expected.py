"""What the records of a range become by the pipeline's decode and transform of today.

For the audit, which compares it with the destination: :class:`oncely.core.expected.Expected`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.config import PipelineSettings
from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.core.digest import STORED, Kind, Recipe, UInt64, kind_of, row_digests
from oncely.core.expected import FILTERED, REJECT, ROWS, Changes, ExpectedRecords, Span
from oncely.core.ranges import TopicPartition
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.errors import TableMismatch
from oncely.kafka.reader import Reader
from oncely.kafka.records import table_of
from oncely.kinds.delta.form import DeltaFormat, accepted
from oncely.kinds.delta.settings import DeltaSinkSettings
from oncely.kinds.kafka.form import encode
from oncely.kinds.kafka.settings import KafkaSinkSettings
from oncely.kinds.sql.form import DELETED, as_stored, prepare
from oncely.kinds.sql.settings import SqlSinkSettings
from oncely.runtimes.chunks import Bounds, Processing

if TYPE_CHECKING:
    from oncely.decode.base import Decoder
    from oncely.kinds.base import Sink
    from oncely.kinds.kafka.sink import KafkaSink
    from oncely.kinds.sql.sink import SqlSink
    from oncely.runtimes.row_transform import RowTransform

_BOUNDS = Bounds(seconds=1e9)
_NONE = np.zeros(0, dtype=bool)


class Recomputed(Protocol):
    """The parts of a pipeline by which records are recomputed."""

    @property
    def settings(self) -> PipelineSettings:
        """The pipeline file."""

    @property
    def decoder(self) -> Decoder:
        """The decoder of records."""

    @property
    def row_transform(self) -> RowTransform:
        """The row transform."""

    def row_schema(self) -> pa.Schema:
        """The columns that reach the sink."""

    def sink(self, schema: pa.Schema) -> Sink:
        """The destination, for rows of these columns."""


@dataclass
class PipelineExpected:
    """Reads records, and decodes and transforms them as a task does. Writes nothing.

    Attributes:
        pipeline: with a row transform, or none.
        unfit: the reason why the table does not accept today's rows; empty if it does.
    """

    pipeline: Recomputed
    unfit: str = field(default="", init=False)

    @property
    def recipe(self) -> str:
        """The recipe of today's rows; empty if they have no digest."""
        if self._messages is not None:
            return str(self._messages.form.recipe)
        if isinstance(self.pipeline.settings.sink, DeltaSinkSettings):
            return str(self._delta.recipe_of_rows)
        if self._table is None or self._table.target is None:
            return ""
        if self._table.target.keys:  # its rows are not those of a range: no ledger has a digest
            return str(self._all_columns)
        return str(self._table.target.recipe(self._table.keep_source))

    @property
    def others(self) -> str:
        """The recipe of the columns that the digests of ranges do not cover."""
        every = self._all_columns
        columns = tuple(one for one in every.columns if one[1].name == STORED) if every else ()
        return str(replace(every, columns=columns)) if every and columns else ""

    @property
    def keys(self) -> str:
        """The recipe of the keys of an upsert; empty if a part of them has no digest."""
        names = self._delta.keys if self._table is None else self._table.wanted.keys
        recipe = self._recipe_of_keys
        return str(recipe) if len(recipe.columns) == len(names) else ""

    @property
    def _recipe_of_keys(self) -> Recipe:
        """The recipe of the columns of an upsert's keys that have a digest."""
        if self._table is None:
            form = self._delta
            kinds = {name: kind_of(form.schema.field(name).type) for name in form.keys}
            return Recipe.of(kinds, offset=False)
        target = self._table.target
        every = target.recipe_of_rows(False, Kind(STORED)).columns if target else ()
        return Recipe(tuple(one for one in every if one[0] in self._table.wanted.keys), False)

    @property
    def _all_columns(self) -> Recipe | None:
        """All columns of a table that are written."""
        if self._table is None or self._table.target is None:
            return None
        return self._table.target.recipe_of_rows(self._table.keep_source, Kind(STORED))

    def of(self, span: Span, recipe: str) -> Iterator[ExpectedRecords]:
        """The readable records of a span, decoded and transformed."""
        wanted = Recipe.parse(recipe) if recipe else None
        for chunk in self._chunks(span):
            yield self._records(chunk, wanted)

    def refused(self, tp: TopicPartition, messages: Sequence[Any]) -> dict[int, Rejection]:
        """The rejections of some records."""
        needs = self.pipeline.decoder.needs | {"value"}
        chunk = self._again.chunk(table_of([(tp, messages)], needs))
        refused = self._made(chunk)[2]
        return {int(chunk.offset[one.record]): one for one in refused}

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
            content, _ = self._as_stored(made.rows, target.recipe_of_rows(False, Kind(STORED)))
            keys = _keys(content, target.keys, self._recipe_of_keys)
            of = _Upserted(made.rows, content, keys, made.row_record, deleted, made.rejections)
            return _changes(chunk, of, target.version, recipe)
        form = self._delta
        rows, record, deleted, refused = accepted(form, chunk)
        good = ~np.isin(record, [one.record for one in refused])
        every = [*chunk.rejections, *refused]
        rows = rows.filter(pa.array(good))
        keys = _keys(rows, form.keys, self._recipe_of_keys)
        of = _Upserted(rows, rows, keys, record[good], deleted[good], every)
        return _changes(chunk, of, form.version, recipe)

    def _chunks(self, span: Span) -> Iterator[Chunk]:
        tp, range_ = span
        starts = {tp: range_.start}
        decoder = self.pipeline.decoder
        tables = self._reader.tables({tp: range_}, decoder.needs | {"value"}, lost="skip")
        return self._again.chunks(starts, tables, _BOUNDS)

    @cached_property
    def _again(self) -> Processing:
        """The run has isolated records that crash the decoder, too."""
        crashes = partial(isolate_crashes, self.pipeline.decoder)
        return Processing(crashes, self.pipeline.row_transform)

    def close(self) -> None:
        """Close the connections."""
        if "_reader" in self.__dict__:
            self._reader.close()

    @cached_property
    def _reader(self) -> Reader:
        source = self.pipeline.settings.source
        return Reader(source.brokers, source.kafka_properties())

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
        except TableMismatch as error:
            self.unfit = " ".join(error.message.split())
            return None

    def _records(self, chunk: Chunk, recipe: Recipe | None) -> ExpectedRecords:
        rows, record, refused = self._made(chunk)
        stored_as_made = self._table is None and self._messages is None
        if stored_as_made and recipe is not None:  # a column that the rows lack is null there
            there = tuple(one for one in recipe.columns if one[0] in rows.column_names)
            recipe = replace(recipe, columns=there)
        rows, unknown = self._as_stored(rows, recipe)
        found = _records(chunk, record, refused, _digests(chunk, record, rows, recipe))
        found.rows[record[unknown]] = -1
        return found

    def _as_stored(self, rows: pa.Table, recipe: Recipe | None) -> tuple[pa.Table, list[int]]:
        """Rows with the server's texts of the columns of kind :data:`STORED`, and the rows with a
        value that it does not take, which stays as it is sent."""
        table = self._table
        if recipe is None or not rows.num_rows or table is None or table.target is None:
            return rows, []
        if not any(kind.name == STORED for _, kind in recipe.columns):
            return rows, []
        with table.ledger.looking() as look:
            return as_stored(look, table.target, rows, recipe)

    def _made(self, chunk: Chunk) -> tuple[pa.Table, IntArray, Sequence[Rejection]]:
        """The rows of a chunk in the form of the destination, their records, and the rejections."""
        if self._table is not None:
            made = prepare(chunk, self._table.target, self._table.keep_source)
            return made.rows, made.row_record, made.rejections
        if self._messages is None:
            return chunk.rows, chunk.row_record, chunk.rejections
        # What a timestamp's distance from the clock was at the time of the write is not known.
        form = replace(self._messages.form, source_timestamp=False)
        encoded = encode(chunk, form, self._messages.limits)
        written = ~np.isin(encoded.record, [one.record for one in encoded.rejections])
        rows = pa.table({"key": encoded.key, "value": encoded.value}).filter(pa.array(written))
        return rows, encoded.record[written], encoded.rejections

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
    """Rows and tombstones, as they are sent and as they are stored, the digest of each one's key,
    the record of each, and the rejected records."""

    rows: pa.Table
    content: pa.Table
    keys: UInt64
    record: IntArray
    deleted: npt.NDArray[np.bool_]
    rejections: Sequence[Rejection]


def _changes(chunk: Chunk, made: _Upserted, version: str | None, recipe: Recipe) -> Changes:
    """Rows and tombstones in the order of their records."""
    rejected = sorted({one.record for one in made.rejections})
    offset = chunk.offset[made.record].astype(np.int64)
    none = np.zeros(0, dtype=np.uint64)
    nothing = not len(made.record)
    return Changes(
        chunk.offset.astype(np.int64),
        chunk.offset[np.array(rejected, dtype=np.int64)].astype(np.int64),
        offset,
        made.keys,
        made.deleted,
        None if nothing or version is None else _version(made, version),
        none if nothing else row_digests(made.content, offset if recipe.offset else None, recipe),
    )


def _version(made: _Upserted, name: str) -> pa.ChunkedArray:
    """The versions as they are stored, which are compared: they may have been rounded. In the type
    in which they are sent, as texts have another order."""
    sent, stored = made.rows.column(name), made.content.column(name)
    try:
        return stored if stored.type == sent.type else stored.cast(sent.type)
    except pa.ArrowInvalid:  # such as infinity
        return sent


def _keys(rows: pa.Table, names: Sequence[str], recipe: Recipe) -> UInt64:
    """The digest of each key; values without a kind by their text. The rows are as they are stored:
    one key may be sent in several forms."""
    if not rows.num_rows:
        return np.zeros(0, dtype=np.uint64)
    known = dict(recipe.columns)
    columns = {
        name: rows.column(name) if name in known else _text(rows.column(name)) for name in names
    }
    whole = Recipe.of({name: known.get(name, Kind("text")) for name in names}, offset=False)
    return row_digests(pa.table(columns), None, whole)


def _text(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([None if one is None else str(one) for one in column.to_pylist()], pa.string())
