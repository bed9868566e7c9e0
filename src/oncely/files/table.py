"""The files of a pipeline as a table: a store, the manifest that lists them, their schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from oncely.artifacts import cache_directory
from oncely.clients.files.store import Store
from oncely.config import FilesSinkSettings
from oncely.errors import ConfigError
from oncely.lake.manifest import Contents, Format, Manifest, ManifestFile
from oncely.lake.partitions import PartitionColumn, parse_partition_by
from oncely.ledgers.topic.cluster import Cluster, PipelineTopics
from oncely.ledgers.topic.records import View
from oncely.pipeline import Pipeline
from oncely.pipeline.files_destination import FilesDestination

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
