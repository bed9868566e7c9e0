"""The files of a pipeline as a table: a store, the manifest that lists them, their schemas.

A file is fetched, compared with its manifest entry, and converted to Arrow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pyarrow as pa

from oncely.artifacts import cache_directory
from oncely.errors import ConfigError, DataLost, InvariantViolation, WrongInput
from oncely.files.schemas import resolved, wanted_schema
from oncely.kinds.files.destination import FilesDestination
from oncely.kinds.files.manifest import Contents, Manifest
from oncely.kinds.files.settings import FilesSinkSettings
from oncely.lake import avro_file, parquet_file
from oncely.lake.conform import Rounding
from oncely.lake.partitions import PartitionColumn, parse_partition_by
from oncely.lake.records import Format, ManifestFile
from oncely.pipeline import Pipeline
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


def table_of(pipeline: str | Path | Pipeline) -> Table:
    """The table of a pipeline with a files sink.

    Args:
        pipeline: its file, or the pipeline itself.

    Raises:
        ConfigError: the file is invalid, or the sink has another kind.
    """
    if not isinstance(pipeline, Pipeline):
        pipeline = Pipeline.from_file(pipeline)
    destination = destination_of(pipeline)
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


def destination_of(pipeline: Pipeline) -> FilesDestination:
    """The destination of a pipeline with a files sink.

    Raises:
        ConfigError: the sink has another kind.
    """
    settings = pipeline.settings
    if not isinstance(settings.sink, FilesSinkSettings):
        raise ConfigError(
            "sink.kind",
            f"pipeline {settings.name!r} writes to {settings.sink.kind!r}, not to files",
            way_out='name the file of a pipeline with sink.kind = "files"',
        )
    return FilesDestination(settings, settings.sink, pipeline.source, pipeline.kafka_connect)


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


def listing(table: Table, where: Mapping[str, str | None] | None = None) -> Listing:
    """The files with these partition values.

    Raises:
        ConfigError: never written to, or not partitioned by these columns.
        Unavailable: the cluster does not answer.
    """
    contents = table.look()
    return Listing(tuple(table.chosen(contents, where or {})), len(contents.files))


def addresses(
    table: Table, where: Mapping[str, str | None] | None = None
) -> Iterator[dict[str, Any]]:
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
