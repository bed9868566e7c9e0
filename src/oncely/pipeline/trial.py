"""``oncely plan --sample N``: what decode and transform make of real records. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely.config import JsonDecode
from oncely.core.batch import Chunk, Rejection
from oncely.decode.base import InvalidRecord
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.decode.reference import parse_object
from oncely.decode.schema import type_name
from oncely.errors import RejectSample, RejectSummary
from oncely.kafka.source import sample
from oncely.pipeline.proposal import proposed_type
from oncely.runtimes.chunks import Processing
from oncely.runtimes.row_transform import Unchanged

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts

_ROWS = 3


@dataclass(frozen=True)
class Unnamed:
    """A member of JSON objects that the schema does not name.

    Attributes:
        path: names joined by points, ``[]`` for the items of an array.
        values: the number of values.
        type: a type that would hold the values.
    """

    path: str
    values: int
    type: str


@dataclass(frozen=True)
class SampledColumn:
    """A column of the rows: name, type, and the texts of the first rows."""

    name: str
    type: str
    values: Sequence[str | None]


@dataclass(frozen=True)
class Trial:
    """The outcome of a sample of records.

    Attributes:
        records: the number of records.
        rows: the number of rows.
        tombstones: the number of records that delete.
        filtered: the number of records of which no row is left.
        rejected: the number of rejects.
        reasons: the most frequent reasons of rejects, with their numbers.
        examples: a rejected record of each reason.
        columns: the columns of the rows.
        unnamed: members that the schema does not name, the most frequent first.
        note: a remark on what was not tried, or empty.
    """

    records: int
    rows: int
    tombstones: int
    filtered: int
    rejected: int
    reasons: Sequence[tuple[str, int]] = ()
    examples: Sequence[str] = ()
    columns: Sequence[SampledColumn] = ()
    unnamed: Sequence[Unnamed] = ()
    note: str = ""


def trial(pipeline: Parts, count: int) -> Trial:
    """Decode and transform a sample of the source's records.

    Raises:
        ConfigError: the broker or the registry refuses the client.
        Unavailable: a server does not answer.
    """
    records = sample(pipeline.source, count)
    if not records.num_rows:
        return Trial(0, 0, 0, 0, 0, note="the topics have no committed records")
    by_spark = pipeline.spark_path is not None
    transform = Unchanged() if by_spark else pipeline.row_transform
    again = Processing(partial(isolate_crashes, pipeline.decoder), transform)
    values = records["value"].to_pylist()
    chunk = again.chunk(records)
    decode = pipeline.settings.decode
    if isinstance(decode, JsonDecode) and decode.inferred:
        chunk = pipeline.destination.form(pipeline.row_schema()).sampled(chunk)
    found = outcome(chunk, values)
    note = "decoded only: a Spark transform sees whole batches" if by_spark else ""
    return replace(found, unnamed=tuple(unnamed(pipeline, values)), note=note)


def outcome(chunk: Chunk, values: Sequence[bytes | None]) -> Trial:
    """What a chunk's records have become.

    Args:
        chunk: all records of the sample.
        values: their values.
    """
    rejected = {one.record for one in chunk.rejections}
    made = {*chunk.row_record.tolist(), *chunk.delete_record.tolist()} - rejected
    summary = RejectSummary.of(
        [one.reason for one in chunk.rejections],
        partial(_samples, chunk, chunk.rejections, values),
    )
    return Trial(
        records=chunk.records,
        rows=len(chunk.row_record),
        tombstones=len(chunk.delete_record),
        filtered=chunk.records - len(made) - len(rejected),
        rejected=len(rejected),
        reasons=summary.reasons,
        examples=tuple(map(str, summary.records[: len(summary.reasons)])),
        columns=tuple(_columns(chunk.rows)),
    )


def _samples(
    chunk: Chunk, of: Sequence[Rejection], values: Sequence[bytes | None], at: Sequence[int]
) -> Iterator[RejectSample]:
    for one in (of[index] for index in at):
        tp = chunk.partitions[int(chunk.partition[one.record])]
        offset = int(chunk.offset[one.record])
        yield RejectSample(*tp, offset, one.stage, one.reason, values[one.record])


def _columns(rows: pa.Table) -> Iterator[SampledColumn]:
    first = rows.slice(0, _ROWS)
    for field, column in zip(first.schema, first.columns, strict=True):
        texts = [None if one is None else _text(one) for one in column.to_pylist()]
        yield SampledColumn(field.name, type_name(field.type), texts)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def unnamed(pipeline: Parts, values: Sequence[bytes | None]) -> list[Unnamed]:
    """The members of JSON values that the schema does not name, the most frequent first."""
    decode = pipeline.settings.decode
    if not isinstance(decode, JsonDecode) or decode.inferred:
        return []
    schema = pa.struct(list(pipeline.decoder.schema))
    found: dict[str, list[Any]] = {}
    for one in values:
        try:
            given = parse_object(one)
        except InvalidRecord:
            continue
        whole = given if decode.unwrap is None else given.get(decode.unwrap)
        for path, value in _unnamed(whole, schema, ""):
            found.setdefault(path, []).append(value)
    missing = [
        Unnamed(path, len(some), proposed_type(path, some)[0]) for path, some in found.items()
    ]
    return sorted(missing, key=lambda one: (-one.values, one.path))


def _unnamed(value: Any, arrow: pa.DataType, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of each member that a type does not name."""
    if pa.types.is_list(arrow) and isinstance(value, list):
        for one in value:
            yield from _unnamed(one, arrow.value_type, f"{path}[]")
    elif pa.types.is_map(arrow) and isinstance(value, dict):
        for one in value.values():
            yield from _unnamed(one, arrow.item_type, f"{path}[]")
    elif pa.types.is_struct(arrow) and isinstance(value, dict):
        types = {field.name: field.type for field in arrow}
        for name, one in value.items():
            below = f"{path}.{name}" if path else name
            if name in types:
                yield from _unnamed(one, types[name], below)
            elif one is not None:
                yield below, one
