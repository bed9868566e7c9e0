"""Data files: Avro object container files and Parquet, by the libraries' own readers."""

from __future__ import annotations

import io
import re
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from oncely.extras import polars as pl

_ESCAPE = re.compile(r"_x([0-9A-F]{4,6})_")
_EMPTY = "_x_"


class Unreadable(Exception):
    """A file that is no file of its format: truncated, or overwritten."""


def rows_of(data: bytes, form: Literal["avro", "parquet"]) -> pa.Table:
    """All rows of a file, with the names of the columns as the pipeline has them.

    Raises:
        Unreadable: it can't be read.
    """
    try:
        if form == "parquet":
            return pq.read_table(pa.BufferReader(data))
        found = pl.read_avro(io.BytesIO(data)).to_arrow()
    except Exception as error:  # polars and pyarrow raise many classes, and panic
        raise Unreadable(f"can't be read: {type(error).__name__}: {error}"[:300]) from None
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":  # polars raises it past Exception
            raise
        raise Unreadable("can't be read") from None
    return found.rename_columns([_unescaped(name) for name in found.column_names])


def row_count(file: Any, form: Literal["avro", "parquet"]) -> int:
    """The number of rows that a file's metadata contain; reads the footer, or the blocks' heads.

    Args:
        file: a ``pyarrow.NativeFile`` that can seek.

    Raises:
        Unreadable: they can't be read.
    """
    try:
        if form == "parquet":
            return int(pq.ParquetFile(file).metadata.num_rows)
        return _avro_count(file)
    except (OSError, pa.ArrowException, IndexError, EOFError) as error:
        raise Unreadable(f"its metadata can't be read: {error}"[:300]) from None


def _avro_count(file: Any) -> int:
    """Avro 1.11, "Object Container Files": a map of metadata, a marker, and blocks."""
    size, found = file.size(), 0
    if file.read(4) != b"Obj\x01":
        raise EOFError("no Avro file")
    while count := _long(file):
        if count < 0:  # followed by the size in bytes
            _long(file)
        for _ in range(2 * abs(count)):  # key and value
            file.seek(_long(file), 1)
    file.seek(16, 1)
    while file.tell() < size:
        found += _long(file)
        file.seek(_long(file) + 16, 1)
    if file.tell() != size:
        raise EOFError("the last block is not complete")
    return found


def _long(file: Any) -> int:
    """A number in zigzag encoding."""
    value = shift = 0
    while True:
        byte = file.read(1)
        if not byte:
            raise EOFError("the file ends inside a number")
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return int((value >> 1) ^ -(value & 1))


def _unescaped(name: str) -> str:
    """The inverse of the escape of names in docs/MANIFEST.md."""

    def text(found: re.Match[str]) -> str:
        code = int(found[1], 16)
        return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else found[0]

    return "" if name == _EMPTY else _ESCAPE.sub(text, name)
