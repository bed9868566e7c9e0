"""One file: fetched, compared with what the manifest says of it, turned into Arrow."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from oncely.decode.avro_binary import Corrupt, read_long
from oncely.decode.avro_form import arrow_schema_of
from oncely.errors import DataLost, InvariantViolation
from oncely.files.schemas import Clash, resolved
from oncely.sinks.files.store import NoSuchFile, Store
from oncely.sinks.files.words import Format, ManifestFile

_MAGIC = b"Obj\x01"


class Named(NamedTuple):
    """What must be known of a file to read it, and to know that it is the one that was published.

    Attributes:
        path: below the root.
        format: of the file.
        sha256: of its bytes, in hex.
    """

    path: str
    format: Format
    sha256: str

    @classmethod
    def of(cls, file: ManifestFile) -> Named:
        """As the manifest has it."""
        return cls(file.path, file.format, file.sha256)


def rows_of(store: Store, file: Named) -> pa.Table:
    """A file's rows with the file's own columns.

    Raises:
        DataLost: it is gone, or no longer what was published.
        Unavailable: the store does not answer.
    """
    try:
        data = store.read(file.path)
    except NoSuchFile as error:
        raise DataLost(
            f"{file.path}: the manifest names it, and the store does not have it: {error.message}",
            way_out="was it compacted away and vacuumed while you were reading? Then read again."
            " Otherwise `oncely files verify` tells what else is missing",
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise DataLost(
            f"{file.path}: its SHA-256 is {found}, and {file.sha256} was published: it was changed",
            way_out="restore it from a copy; `oncely files verify` tells what else was changed",
        )
    return decoded(data, file.format)


def decoded(data: bytes, form: Format) -> pa.Table:
    """A file's bytes as rows, with the file's own columns.

    Raises:
        InvariantViolation: they are no such file, or none that Oncely has written.
    """
    if form == "parquet":
        try:
            return pq.read_table(pa.BufferReader(data))
        except (pa.ArrowInvalid, OSError) as error:
            raise InvariantViolation(f"no Parquet file: {error}") from None
    import polars as pl

    schema = arrow_schema_of(own_avro(data))
    try:
        found = pl.read_avro(io.BytesIO(data)).to_arrow()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InvariantViolation(f"no Avro file: {error}") from None
    # By position: Avro's names are not always the columns'.
    columns = [
        pa.chunked_array([_named(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(found.columns, schema, strict=True)
    ]
    return pa.table(columns, schema)


def own_avro(data: bytes) -> str:
    """The schema at the head of an Avro file (Avro 1.11, "Object Container Files").

    Raises:
        InvariantViolation: it has none.
    """
    try:
        return dict(_metadata(data))["avro.schema"].decode()
    except (Corrupt, KeyError, IndexError, UnicodeDecodeError) as error:
        raise InvariantViolation(f"no Avro file: {error!r}") from None


def read_all(store: Store, file: Named, schema: pa.Schema) -> pa.Table:
    """A file's rows with these columns.

    Raises:
        DataLost: it is gone, or no longer what was published.
        InvariantViolation: its own columns don't resolve to these.
    """
    try:
        return resolved(rows_of(store, file), schema)
    except Clash as clash:
        raise InvariantViolation(f"{file.path}: {clash}") from None


def _metadata(data: bytes) -> Iterator[tuple[str, bytes]]:
    if data[:4] != _MAGIC:
        raise Corrupt("it does not begin as one")
    at = 4
    while True:
        count, at = read_long(data, at)
        if count == 0:
            return
        if count < 0:
            _, at = read_long(data, at)
        for _ in range(abs(count)):
            key, at = _bytes(data, at)
            value, at = _bytes(data, at)
            yield key.decode(), value


def _bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_long(data, at)
    if size < 0 or at + size > len(data):
        raise Corrupt("its head is cut off")
    return data[at : at + size], at + size


def _named(array: pa.Array, to: pa.DataType) -> pa.Array:
    """The same values under the names of ``to``; nothing is moved but offsets of lists."""
    if pa.types.is_struct(to):
        fields = [to.field(i) for i in range(to.num_fields)]
        children = [_named(array.field(i), f.type) for i, f in enumerate(fields)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if pa.types.is_list(to):
        narrow = array.cast(pa.list_(array.type.value_type))  # polars has 64-bit offsets
        items = _named(narrow.values, to.value_type)
        mask = narrow.is_null() if narrow.null_count else None
        return pa.ListArray.from_arrays(narrow.offsets, items, to, mask=mask)
    return array.cast(to)
