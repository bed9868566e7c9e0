"""One file: fetched, compared with what the manifest says of it, turned into Arrow."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import pyarrow as pa

from oncely.errors import DataLost, InvariantViolation
from oncely.files.schemas import resolved
from oncely.sinks.files import avro_file, parquet_file
from oncely.sinks.files.store import NoSuchFile, Store
from oncely.sinks.files.words import Format, ManifestFile


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


def decoded(data: bytes, form: Format) -> pa.Table:
    """A file's bytes as rows, with the file's own columns.

    Raises:
        InvariantViolation: they are none that Oncely has written.
    """
    return avro_file.read(data) if form == "avro" else parquet_file.read(data)


def rows_of(store: Store, file: Named, schema: pa.Schema) -> pa.Table:
    """A file's rows with these columns.

    Raises:
        DataLost: it is gone, or no longer what was published.
        InvariantViolation: its own columns don't resolve to these.
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
    try:
        return resolved(decoded(data, file.format), schema)
    except InvariantViolation as error:
        raise InvariantViolation(f"{file.path}: {error.message}") from None
