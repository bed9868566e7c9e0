"""The files of a pipeline as a table: a store, the manifest that lists them, their schemas.

A file is fetched, compared with its manifest entry, and converted to Arrow with the requested
columns. The rules are those of Avro's schema resolution (Avro 1.11, "Schema Resolution"), column by
column in Arrow: fields are matched by name, missing fields are null, int becomes long, float or
double, and the same holds inside structs and lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

import msgspec
import pyarrow as pa

from oncely.artifacts import cache_directory
from oncely.decode.avro_schema import arrow_schema_of, storable
from oncely.decode.merging import Conflict, merge
from oncely.errors import ConfigError, DataLost, InvariantViolation, WrongInput
from oncely.kinds.conform import Rounding, conform
from oncely.kinds.data_file import Format, Scope, decoded
from oncely.kinds.files.destination import FilesDestination
from oncely.kinds.files.manifest import Contents, Manifest
from oncely.kinds.files.records import ManifestFile, ScopeSchema
from oncely.kinds.files.settings import FilesSinkSettings
from oncely.kinds.kind import Parts
from oncely.kinds.partitions import PartitionColumn, parse_partition_by
from oncely.stores.objects.store import NoSuchFile, Store
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.records import View

Where = Mapping[str, str | None]
"""Required values of partition columns; None: the column has no value."""


@dataclass(frozen=True)
class Table:
    """The location of a pipeline's files, and of their manifest.

    Attributes:
        pipeline_topics: the cluster, the pipeline's name, and its ledger.
        store: the root.
        manifest_topic, schema_topic: their names.
        format: the format of new files.
        partition_by: the value of ``sink.partition_by``.
        target_file_size: the target size of a file, in bytes.
        max_staging_age: seconds after which an unpublished file cannot be published any more.
    """

    pipeline_topics: PipelineTopics
    store: Store
    manifest_topic: str
    schema_topic: str
    format: Format = "avro"
    partition_by: tuple[str, ...] = ()
    target_file_size: int = 64 << 20
    max_staging_age: float = 3600.0

    @property
    def levels(self) -> tuple[PartitionColumn, ...]:
        """The levels of directories."""
        return parse_partition_by(self.partition_by)

    def manifest(self) -> Manifest:
        """A reader of the two topics, to be closed.

        Raises:
            ConfigError: nothing was published yet.
        """
        reader = Manifest(self.pipeline_topics, self.manifest_topic, self.schema_topic)
        reader.require()
        return reader

    def look(self) -> Contents:
        """The present files of the table; continues from the snapshot of an earlier command.

        Raises:
            ConfigError: nothing was published yet.
            Unavailable: no answer.
        """
        with self.manifest() as manifest:
            return manifest.look_cached(cache_directory() / "manifests")

    def ledger(self) -> View:
        """The present state of the pipeline in the ledger topic.

        Raises:
            Unavailable: no answer.
        """
        with closing(Cluster(self.pipeline_topics)) as cluster:
            return cluster.look()

    def chosen(self, contents: Contents, where: Where) -> Iterator[ManifestFile]:
        """The files with these partition values, by path.

        Raises:
            ConfigError: the table is not partitioned by these columns.
        """
        names = [level.name for level in self.levels]
        for name in where:
            if name not in names:
                raise ConfigError(
                    "where",
                    f"{name!r} is no partition column; there are {', '.join(names) or 'none'}",
                    way_out="filter the rows by it instead",
                )
        wanted = where.items()
        for path in sorted(contents.files):
            file = contents.files[path]
            if all(name in file.partition and file.partition[name] == v for name, v in wanted):
                yield file


def table_of(parts: Parts) -> Table:
    """The table of a pipeline with a files sink.

    Raises:
        ConfigError: the sink has another kind.
    """
    destination = destination_of(parts)
    given = destination.given
    return Table(
        destination.pipeline_topics,
        given.store,
        given.manifest_topic,
        given.schemas,
        given.format,
        given.partition_by,
        given.target_file_size,
        given.max_staging_age,
    )


def destination_of(parts: Parts) -> FilesDestination:
    """The destination of a pipeline with a files sink.

    Raises:
        ConfigError: the sink has another kind.
    """
    settings = parts.settings
    if not isinstance(settings.sink, FilesSinkSettings):
        raise ConfigError(
            "sink.kind",
            f"pipeline {settings.name!r} writes to {settings.sink.kind!r}, not to files",
            way_out='name the file of a pipeline with sink.kind = "files"',
        )
    return FilesDestination(parts)


# -- listing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """Files by path.

    Attributes:
        files: the selected files.
        total: the number of files of the whole table.
    """

    files: tuple[ManifestFile, ...]
    total: int

    @property
    def rows(self) -> int:
        """The number of rows in the listed files."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """The size of the listed files."""
        return sum(file.bytes for file in self.files)

    def as_json(self) -> dict[str, Any]:
        """JSON-able values: each file as in its manifest message."""
        return {
            "files": [msgspec.to_builtins(file) for file in self.files],
            "listed": len(self.files),
            "total": self.total,
            "rows": self.rows,
            "bytes": self.bytes,
        }


def listing(table: Table, where: Where | None = None) -> Listing:
    """The files with these partition values.

    Raises:
        ConfigError: never written to, or not partitioned by these columns.
        Unavailable: the cluster does not answer.
    """
    contents = table.look()
    return Listing(tuple(table.chosen(contents, where or {})), len(contents.files))


def addresses(table: Table, where: Where | None = None) -> Iterator[dict[str, Any]]:
    """The files with these partition values as other programs open them, as JSON-able values.

    Raises:
        ConfigError: never written to, or not partitioned by these columns.
        Unavailable: the cluster does not answer.
    """
    for file in listing(table, where).files:
        found = {
            "path": table.store.address(file.path),
            "format": file.format,
            "rows": file.rows,
            "bytes": file.bytes,
        }
        yield found | {"partition": file.partition} if file.partition else found


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def instant(text: str) -> int:
    """Microseconds since 1970 of an instant by ISO 8601; UTC without an offset."""
    at = datetime.fromisoformat(text)
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return (at - _EPOCH) // _MICROSECOND


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


def selected(
    table: Table,
    where: Where | None,
    columns: Sequence[str] | None,
    rounding: Allowed,
) -> tuple[list[ManifestFile], pa.Schema]:
    """The files with these partition values, and the columns of a query over them.

    Without files they are those of the whole table: a filter without matches is no error.
    """
    contents = table.look()
    files = list(table.chosen(contents, where or {}))
    scopes = {file.scope for file in files} or contents.schemas.keys()
    return files, wanted_schema(contents.schemas, scopes, columns, rounding=rounding == "allow")


def rows(
    table: Table,
    *,
    where: Where | None = None,
    columns: Sequence[str] | None = None,
    rounding: Allowed = "refuse",
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The columns, and the rows of one file after the other, in the order of paths.

    Args and errors are those of :func:`oncely.files.read`; errors of files are raised during the
    iteration.
    """
    files, schema = selected(table, where, columns, rounding)
    return schema, (read_as(table.store, Named.of(file), schema, rounding) for file in files)


# -- columns of a query ----------------------------------------------------------------------


def wanted_schema(
    schemas: Mapping[Scope, ScopeSchema],
    scopes: Iterable[Scope],
    columns: Sequence[str] | None,
    *,
    rounding: bool = False,
) -> pa.Schema:
    """The columns of a query over several scopes.

    Args:
        schemas: the published schemas.
        scopes: the scopes that are read.
        columns: the requested columns, in this order; None for all.
        rounding: allow large whole numbers of one scope to become floating-point numbers because of
            another.

    Raises:
        ConfigError: a column has incompatible types in two scopes; or no scope has a requested
            column.
    """
    _check(columns)
    found, seen = pa.schema([]), list[Scope]()
    for scope, published in _distinct(schemas, scopes).items():
        own = arrow_schema_of(published.avro)
        if rounding:
            own = storable(own)  # drops the marks of large numbers
        if columns is not None:
            own = pa.schema([field for field in own if field.name in columns])
        try:
            found = merge(found, own)
        except Conflict as conflict:
            raise ConfigError(
                "columns",
                f"{_shown(scope)} and {_of_them(seen)} before it differ: {conflict}",
                way_out="read some of them by `where`, or name the other columns by `columns`",
            ) from None
        seen.append(scope)
    if columns is None:
        return found
    for name in columns:
        if name not in found.names:
            raise ConfigError(
                "columns", f"no file that is read has a column {name!r}", way_out="check the name"
            )
    return pa.schema([found.field(name) for name in columns])


def resolved(rows: pa.Table, schema: pa.Schema, *, rounding: bool = False) -> pa.Table:
    """A file's rows with these columns, in this order; other columns are left out.

    Raises:
        Rounding: a whole number would be rounded, and ``rounding`` is false.
        InvariantViolation: a column's values cannot be converted.
    """
    found = rows.select([name for name in rows.column_names if name in schema.names])
    return conform(found, schema, rounding=rounding)


def _check(columns: Sequence[str] | None) -> None:
    if columns is None:
        return
    if isinstance(columns, str):
        raise ConfigError("columns", "found a text", way_out=f"write [{columns!r}]")
    if not columns:
        raise ConfigError("columns", "none is named", way_out="name one, or leave it out for all")
    if len(set(columns)) < len(columns):
        raise ConfigError("columns", "one is named twice", way_out="name each once")


def _distinct(
    schemas: Mapping[Scope, ScopeSchema], scopes: Iterable[Scope]
) -> dict[Scope, ScopeSchema]:
    """One scope for each schema: ten thousand users may share one."""
    found: dict[str, Scope] = {}
    for scope in sorted(set(scopes), key=lambda one: [part or "" for part in one]):
        if scope not in schemas:
            raise InvariantViolation(f"the manifest has files of {_shown(scope)} without a schema")
        found.setdefault(schemas[scope].id, scope)
    return {scope: schemas[scope] for scope in found.values()}


def _shown(scope: Scope) -> str:
    return f"scope {list(scope)}" if scope else "the table"


def _of_them(scopes: Sequence[Scope]) -> str:
    shown = ", ".join(str(list(scope)) for scope in scopes[:3])
    return shown if len(scopes) <= 3 else f"{shown} and {len(scopes) - 3} more"
