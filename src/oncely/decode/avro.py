"""Avro records to columns: bare datums, or Confluent's wire format with a schema registry."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.avro_read import (
    BROKEN,
    Corrupt,
    Incompatible,
    Plan,
    Reader,
    compile_reader,
    explain,
    plan_of,
)
from oncely.decode.avro_schema import AvroSchema, Definition, NoSchema, to_arrow
from oncely.decode.base import Decoded, InvalidRecord
from oncely.decode.columns import (
    BytesDecoder,
    ColumnLeaf,
    Columns,
    Piece,
    Positions,
    fit,
    read_each,
)
from oncely.decode.native import read
from oncely.decode.registry import Newest, Registry, UnknownSchema
from oncely.decode.times import checked
from oncely.errors import ConfigError
from oncely.extras import native

_HEAD = 5  # a zero byte and the schema's id in four bytes, big-endian
_MOST_HEADS = 8  # that are read natively in a slice: each costs a pass over those that are left


@dataclass(frozen=True, kw_only=True)
class AvroDecoder(BytesDecoder):
    """Decodes records that consist of exactly one Avro datum each.

    Without a ``registry`` each value is a bare datum of the schema (not a container file). With one
    it begins with Confluent's header: a zero byte and the id of the writer's schema, big-endian in
    four bytes; the datum is resolved to the reader's schema ("Schema Resolution", Avro 1.11).

    A null or empty value, an id that is missing in the registry (HTTP 404) or not of an Avro
    schema, a writer's schema that cannot be resolved, invalid bytes, and bytes after the datum are
    rejections. See :mod:`oncely.decode.avro_read` for the strictness. A registry that does not
    answer is :class:`oncely.errors.Unavailable`, raised by ``decode``: no record is at fault.

    A schema id that comes for the first time is compared with the subjects from which the columns
    were derived. If one of them has a newer schema, ``decode`` raises
    :class:`oncely.errors.SchemaChanged`: the columns may lack a field of it.

    Attributes:
        definition: the reader's schema.
        registry: the registry of the writers' schemas.
        newest: the subjects from which the columns were derived.
    """

    definition: Definition
    registry: Registry | None = None
    newest: Newest = ()

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record: a row or a rejection.

        Raises:
            Unavailable: the registry does not answer.
            ConfigError: the registry refuses the login.
            SchemaChanged: the columns were derived from a schema that is no longer the newest.
        """
        decoded = super().decode(records)
        # An unknown id may be registered later; the registry is not asked in each batch.
        for schema_id in [i for i, found in self._readers.items() if isinstance(found, str)]:
            del self._readers[schema_id]
        return decoded

    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        pieces, unsure = self._natively(values)
        chosen = values if len(unsure) == len(values) else values.take(pa.array(unsure))
        rows, good, refused = read_each(chosen.to_pylist(), self._datum)
        more, misfits = fit(rows, good, self._batch)
        pieces += [(unsure[at], batch) for at, batch in more]
        return pieces, {int(unsure[at]): why for at, why in (refused | misfits).items()}

    def _natively(self, values: pa.Array) -> tuple[list[Piece], Positions]:
        """The rows that ``oncely-native`` reads with certainty, and the other positions."""
        pieces: list[Piece] = []
        unsure = np.arange(len(values))
        if native() is None:
            return pieces, unsure
        heads = [b""]
        if self.registry is not None:
            heads = pc.unique(pc.binary_slice(values, 0, _HEAD)).to_pylist()[:_MOST_HEADS]
        for head in heads:
            plan = self._plan(head)
            if plan is not None:
                chosen = values if len(unsure) == len(values) else values.take(pa.array(unsure))
                found, left = read(self.schema, chosen, lambda m: m.avro_rows, plan, head)
                pieces += [(unsure[at], batch) for at, batch in found]
                unsure = unsure[left]
        return pieces, unsure

    def _plan(self, head: bytes | None) -> Plan | None:
        if self.registry is None:
            return plan_of(self._bare)
        try:
            return plan_of(self._head(head)[0]) if head else None
        except InvalidRecord:
            return None

    def _datum(self, data: bytes | None) -> Any:
        if not data:
            raise InvalidRecord(f"the {self.column} is {'null' if data is None else 'empty'}")
        read, at = (self._bare, 0) if self.registry is None else self._head(data)
        try:
            value, end = read(data, at)
        except (Corrupt, *BROKEN) as error:
            raise InvalidRecord(f"the {self.column} is no Avro datum: {explain(error)}") from None
        except RecursionError:
            raise InvalidRecord(f"the {self.column} is nested too deeply") from None
        if end != len(data):
            raise InvalidRecord(f"the {self.column} has {len(data) - end} bytes after its datum")
        return value

    def _head(self, data: bytes) -> tuple[Reader, int]:
        if data[0] != 0 or len(data) < _HEAD:
            raise InvalidRecord(
                f"the {self.column} does not begin with a zero byte and a schema id, "
                f"but with 0x{data[:_HEAD].hex()}"
            )
        schema_id = int.from_bytes(data[1:_HEAD], "big")
        read = self._readers.get(schema_id)
        if read is None:
            read = self._readers[schema_id] = self._writer(schema_id)
        if isinstance(read, str):
            raise InvalidRecord(read)
        return read, _HEAD

    def _writer(self, schema_id: int) -> Reader | str:
        assert self.registry is not None  # noqa: S101 - only with a registry is there a head
        try:
            writer = AvroSchema.parse(self.registry.by_id(schema_id))
            self.registry.refuse_newer(schema_id, self.newest)
            return compile_reader(writer, self._reader)
        except UnknownSchema as error:
            return str(error)
        except NoSchema as error:
            return f"schema id {schema_id} is no Avro schema: {error}"
        except Incompatible as error:
            return f"schema id {schema_id} can't be read as the columns' schema: {error}"

    @cached_property
    def _readers(self) -> dict[int, Reader | str]:
        """By schema id: the reader of its datums, or the reason why they cannot be read."""
        return {}

    @cached_property
    def _reader(self) -> AvroSchema:
        return AvroSchema.parse(self.definition)

    @cached_property
    def _bare(self) -> Reader:
        return compile_reader(self._reader, self._reader)

    def _batch(self, rows: Any) -> pa.RecordBatch:
        lists = [[row[index] for row in rows] for index in range(len(self.schema))]
        return _BY_INDEX.batch(self.schema, lists)


def avro_decoder(
    definition: Definition,
    *,
    registry: Registry | None = None,
    column: str = "value",
    key: str = "decode.schema",
) -> AvroDecoder:
    """Make a decoder whose rows are the columns of ``definition``.

    Args:
        definition: the reader's schema, a record.
        registry: the registry of the writers' schemas, if records contain schema ids.
        column: ``value`` or ``key``.
        key: the key of the pipeline file that errors name.

    Raises:
        ConfigError: it is no Avro schema, or it has no columns.
    """
    try:
        parsed = AvroSchema.parse(definition)
    except NoSchema as error:
        raise ConfigError(key, f"this is no Avro schema: {error}") from None
    return AvroDecoder(
        schema=to_arrow(parsed, key=key),
        column=column,
        definition=definition,
        registry=registry,
    )


def latest_avro_decoder(
    registry: Registry, topics: Sequence[str], *, column: str = "value", key: str = "decode.schema"
) -> AvroDecoder:
    """Make a decoder of the newest schema of each topic's subject, ``<topic>-<column>``.

    Raises:
        ConfigError: a subject is missing, or two subjects have different columns.
        Unavailable: the registry does not answer.
    """
    way_out = f"give {key}, the path of a schema file (.avsc)"
    decoders: dict[str, AvroDecoder] = {}
    for subject in (f"{topic}-{column}" for topic in topics):
        try:
            latest = registry.latest(subject)
        except UnknownSchema as error:
            raise ConfigError(key, str(error), way_out=way_out) from None
        decoders[subject] = avro_decoder(latest, registry=registry, column=column, key=key)
    if not decoders:
        raise ConfigError(key, "without topics no subject", way_out=way_out)
    (subject, first), *others = decoders.items()
    for other, decoder in others:
        if decoder.schema != first.schema:
            problem = f"subjects {subject} and {other} have different columns"
            raise ConfigError(key, problem, way_out=way_out)
    newest = tuple((subject, decoder.definition) for subject, decoder in decoders.items())
    return replace(first, newest=newest)


_RANGED = ColumnLeaf(lambda values, arrow: checked(pa.array(values, arrow)))
_BY_INDEX = Columns(
    pick=lambda index, _: operator.itemgetter(index),
    leaves={arrow.id: _RANGED for arrow in (pa.date32(), pa.timestamp("us"), pa.time64("us"))},
)
