"""What the records of a range become by the pipeline's decode and transform of today.

For the audit, which compares it with the destination: :class:`oncely.core.expected.Expected`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from oncely.config import PipelineSettings
from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.core.digest import Kind, Recipe, UInt64, row_digests
from oncely.core.expected import FILTERED, REJECT, ROWS, Changes, ExpectedRecords, Span
from oncely.core.ranges import TopicPartition
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.errors import TableMismatch
from oncely.kafka.reader import RecordReader
from oncely.kafka.records import table_of
from oncely.kinds.rows import DELETED, Form
from oncely.runtimes.chunks import ChunkBounds, Processing

if TYPE_CHECKING:
    from oncely.decode.base import Decoder
    from oncely.kinds.destination import Destination
    from oncely.runtimes.row_transform import RowTransform

_BOUNDS = ChunkBounds(seconds=1e9)
_NO_DIGESTS = np.zeros(0, dtype=np.uint64)


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

    @property
    def destination(self) -> Destination:
        """The destination."""

    def row_schema(self) -> pa.Schema:
        """The columns that reach the sink."""


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
        return str(self._form.recipe or "")

    @property
    def others(self) -> str:
        """The recipe of the columns that the digests of ranges do not cover."""
        return str(self._form.others or "")

    @property
    def keys(self) -> str:
        """The recipe of the keys of an upsert; empty if a part of them has no digest."""
        recipe = self._recipe_of_keys
        return str(recipe) if len(recipe.columns) == len(self._form.keys) else ""

    @property
    def replaces(self) -> bool:
        """True if later rows and tombstones replace the rows of their keys."""
        return bool(self._form.keys)

    @property
    def _recipe_of_keys(self) -> Recipe:
        """The recipe of the columns of an upsert's keys that have a digest."""
        every = self._form.recipe.columns if self._form.recipe else ()
        return Recipe(tuple(one for one in every if one[0] in self._form.keys), False)

    def of(self, span: Span, recipe: str) -> Iterator[ExpectedRecords]:
        """The readable records of a span, decoded and transformed."""
        wanted = Recipe.parse(recipe) if recipe else None
        for chunk in self._chunks(span):
            yield self._records(chunk, wanted)

    def refused(self, tp: TopicPartition, messages: Sequence[Any]) -> dict[int, Rejection]:
        """The rejections of some records."""
        needs = self.pipeline.decoder.needs | {"value"}
        chunk = self._again.chunk(table_of([(tp, messages)], needs))
        refused = self._form.of(chunk).rejections
        return {int(chunk.offset[one.record]): one for one in refused}

    def changes(self, span: Span) -> Iterator[Changes]:
        """The rows and tombstones of an upsert."""
        if not self.recipe:
            return
        for chunk in self._chunks(span):
            yield self.changes_of(chunk)

    def changes_of(self, chunk: Chunk) -> Changes:
        """The rows and tombstones of a chunk."""
        formed, version, nothing = self._form.of(chunk), self._form.version, _NO_DIGESTS
        recipe = Recipe.parse(self.recipe)
        rejected = sorted({one.record for one in formed.rejections})
        offset = chunk.offset[formed.row_record].astype(np.int64)
        found = Changes(
            chunk.offset.astype(np.int64),
            chunk.offset[np.array(rejected, dtype=np.int64)].astype(np.int64),
            offset, nothing, np.zeros(0, dtype=bool), None, nothing,
        )  # fmt: skip
        if not len(offset):
            return found
        sent = formed.rows
        stored, _ = self._form.stored(sent, recipe)
        return found._replace(
            key=_keys(stored, self._form.keys, self._recipe_of_keys),
            deleted=sent.column(DELETED).to_numpy() == 1,
            version=None if version is None else _version(sent, stored, version),
            digest=row_digests(stored, offset if recipe.offset else None, recipe),
        )

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
    def _reader(self) -> RecordReader:
        source = self.pipeline.settings.source
        return RecordReader(source.brokers, source.kafka_properties())

    @cached_property
    def _form(self) -> Form:
        """That of the destination; of one that does not accept the rows what they are by now."""
        schema = self.pipeline.row_schema()
        try:
            return self.pipeline.destination.form(schema)
        except TableMismatch as error:
            self.unfit = " ".join(error.message.split())
            return Form()

    def _records(self, chunk: Chunk, recipe: Recipe | None) -> ExpectedRecords:
        formed, unknown = self._form.of(chunk), list[int]()
        rows, record = formed.rows, formed.row_record
        if recipe is not None and self._form.lacks_are_null:
            there = tuple(one for one in recipe.columns if one[0] in rows.column_names)
            recipe = replace(recipe, columns=there)
        if recipe is not None and rows.num_rows:
            rows, unknown = self._form.stored(rows, recipe)
        digests = _digests(chunk, record, rows, recipe)
        found = _records(chunk, record, formed.rejections, digests)
        found.rows[record[unknown]] = -1
        return found


def _digests(
    chunk: Chunk, record: IntArray, rows: pa.Table, recipe: Recipe | None
) -> UInt64 | None:
    """The digests of rows by a recipe, which may be of an earlier table or transform."""
    if recipe is None:
        return None
    if not len(record):
        return _NO_DIGESTS
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


def _version(rows: pa.Table, as_stored: pa.Table, name: str) -> pa.ChunkedArray:
    """The versions as they are stored, which are compared: they may have been rounded. In the type
    in which they are sent, as texts have another order."""
    sent, stored = rows.column(name), as_stored.column(name)
    try:
        return stored if stored.type == sent.type else stored.cast(sent.type)
    except pa.ArrowInvalid:  # such as infinity
        return sent


def _keys(rows: pa.Table, names: Sequence[str], recipe: Recipe) -> UInt64:
    """The digest of each key; values without a kind by their text. The rows are as they are stored:
    one key may be sent in several forms."""
    known = dict(recipe.columns)
    columns = {
        name: rows.column(name) if name in known else _text(rows.column(name)) for name in names
    }
    whole = Recipe.of({name: known.get(name, Kind("text")) for name in names}, offset=False)
    return row_digests(pa.table(columns), None, whole)


def _text(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([None if one is None else str(one) for one in column.to_pylist()], pa.string())
