"""Reading of one file: fetched, compared with its manifest entry, converted to Arrow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa

from oncely.clients.files.store import NoSuchFile, Store
from oncely.errors import DataLost, InvariantViolation, WrongInput
from oncely.files.schemas import resolved, wanted_schema
from oncely.files.table import Table
from oncely.lake import avro_file, parquet_file
from oncely.lake.conform import Rounding
from oncely.lake.manifest import Format, ManifestFile


class Named(NamedTuple):
    """The data needed to read a file, and to check that it is the published one.

    Attributes:
        path: the path below the root.
        format: the format of the file.
        sha256: the SHA-256 of its bytes, in hex.
    """

    path: str
    format: Format
    sha256: str

    @classmethod
    def of(cls, file: ManifestFile) -> Named:
        """The data from a manifest entry."""
        return cls(file.path, file.format, file.sha256)


def decoded(data: bytes, form: Format) -> pa.Table:
    """A file's bytes as rows, with the file's own columns.

    Raises:
        InvariantViolation: they are not a file of Oncely.
    """
    return avro_file.read(data) if form == "avro" else parquet_file.read(data)


Allowed = Literal["refuse", "allow"]
"""Permission of rounding for a reader."""


def read_as(store: Store, file: Named, schema: pa.Schema, rounding: Allowed) -> pa.Table:
    """A file's rows for a reader.

    Raises:
        WrongInput: a whole number would be rounded, and ``rounding`` refuses it. Other errors: see
            :func:`rows_of`.
    """
    try:
        return rows_of(store, file, schema, rounding=rounding == "allow")
    except Rounding as error:
        raise WrongInput(
            error.message,
            way_out='leave the column out by `columns`, or read with rounding = "allow": then it'
            " becomes the nearest number of that type",
        ) from None


def own_rows(store: Store, file: Named) -> pa.Table:
    """A file's rows with the file's own columns. Raises the errors of :func:`rows_of`."""
    return decoded(_fetched(store, file), file.format)


def rows_of(store: Store, file: Named, schema: pa.Schema, *, rounding: bool = False) -> pa.Table:
    """A file's rows with these columns.

    Args:
        store: the store of the file.
        file: the file.
        schema: the columns.
        rounding: allow a whole number to become the nearest floating-point number.

    Raises:
        Rounding: a whole number would be rounded, and ``rounding`` is false.
        DataLost: it is missing, or differs from the published one.
        InvariantViolation: its own columns do not resolve to these.
        Unavailable: the store does not answer.
    """
    data = _fetched(store, file)
    try:
        return resolved(decoded(data, file.format), schema, rounding=rounding)
    except Rounding as error:
        raise Rounding(f"{file.path}: {error.message}") from None
    except InvariantViolation as error:
        raise InvariantViolation(f"{file.path}: {error.message}") from None


def _fetched(store: Store, file: Named) -> bytes:
    try:
        data = store.read(file.path)
    except NoSuchFile as error:
        raise DataLost(
            f"{file.path}: the manifest lists it, and the store does not have it: {error.message}",
            way_out="if it was compacted away and vacuumed during the read, read again; "
            "otherwise `oncely files verify` shows other missing files",
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise DataLost(
            f"{file.path}: its SHA-256 is {found}, and {file.sha256} was published: it was changed",
            way_out="restore it from a copy; `oncely files verify` shows other changed files",
        )
    return data


# -- rows ----------------------------------------------------------------------------------


def rows(
    table: Table,
    *,
    where: Mapping[str, str | None] | None = None,
    columns: Sequence[str] | None = None,
    rounding: Allowed = "refuse",
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The columns, and the rows of one file after the other, in the order of paths.

    Args and errors are those of :func:`oncely.files.read`; errors of files are raised during the
    iteration.
    """
    contents = table.look()
    files = list(table.chosen(contents, where or {}))
    scopes = {file.scope for file in files} or contents.schemas.keys()
    schema = wanted_schema(contents.schemas, scopes, columns, rounding=rounding == "allow")
    return schema, (read_as(table.store, Named.of(file), schema, rounding) for file in files)
