"""Files, and the topics that list them, as a pipeline's destination."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial

import pyarrow as pa

from oncely.config import JsonDecode
from oncely.core.change import RewriteKind
from oncely.kinds.data_file import FileFormat
from oncely.kinds.destination import NO_COLUMNS, PROBED, Inspection, SinkFacts, SinkPlan
from oncely.kinds.files.change import FilesRewrites, replay_into_files
from oncely.kinds.files.settings import FilesSinkSettings
from oncely.kinds.files.sink import FilesSink, FilesTopics
from oncely.kinds.kind import Parts
from oncely.kinds.partitions import parse_partition_by
from oncely.kinds.rows import Form
from oncely.kinds.staged_files import sampled
from oncely.kinds.topic_destination import TopicDestination
from oncely.kinds.topic_publishing import TopicReplay
from oncely.stores.objects.store import connect

_NESTED = (
    "sink.partition_by: a point in a name is taken as part of it; members of objects can't be"
    " partitioned by"
)


class FilesDestination(TopicDestination[FilesSink]):
    """A root for files, and topics on the source's cluster."""

    given: FilesSinkSettings

    output_key = "sink.manifest_topic"
    target_key = "sink.url"
    late_delete: str | None = None  # files contain rows, and a record without a value is none

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._store = replace(self.given.store, connect=parts.files_connect or connect)

    @property
    def outputs(self) -> list[str]:
        """Manifest and schemas."""
        return [self.given.manifest_topic, self.given.schemas]

    @property
    def compacted(self) -> list[str]:
        """All but dead letters."""
        return [*self.outputs, self.given.ledger_topic]

    @property
    def read_back(self) -> list[str]:
        """All."""
        return [*self.outputs, self.given.rejects]

    def sink(self, schema: pa.Schema = NO_COLUMNS) -> FilesSink:
        """The sink for rows of these columns; inferred columns are not known in advance."""
        given = self.given
        form = FileFormat(
            given.format,
            parse_partition_by(given.partition_by),
            None if self._inferred else schema,
            given.target_file_size,
        )
        return FilesSink(
            self.pipeline_topics,
            self._store,
            form,
            FilesTopics(given.manifest_topic, given.schemas),
            given.rejects,
            create=given.create,
            max_staging_age=given.max_staging_age,
        )

    def form(self, schema: pa.Schema) -> Form:
        """Rows; the columns of a sample are inferred as by a task that knows no schema yet."""
        return Form(sampled=partial(sampled, self.sink(schema).form))

    def check_replay(self) -> None:
        """Nothing to refuse: old records are harmless in files."""

    def replaying(self, schema: pa.Schema) -> closing[TopicReplay]:
        """Begin a replay into new files."""
        sink = self.sink(schema)
        sink.prepare()
        return closing(replay_into_files(sink))

    def check_rewrite(self, schema: pa.Schema, kind: RewriteKind) -> Mapping[str, str]:
        """Nothing to refuse: what can't be rewritten is told of each group of files."""
        del schema, kind
        return {}

    def rewriting(self, schema: pa.Schema, kind: RewriteKind) -> closing[FilesRewrites]:
        """Begin a rewrite of whole files."""
        del kind
        sink = self.sink(schema)
        sink.prepare()
        return closing(FilesRewrites(sink))

    def plan(self, schema: pa.Schema, inspection: Inspection) -> SinkPlan:
        """Inspect root, topics and columns."""
        found = super().plan(schema, inspection)
        inspection.notes.append(PROBED)
        columns = parse_partition_by(self.given.partition_by)
        if self._inferred and any("." in one.column for one in columns):
            inspection.notes.append(_NESTED)
        return found

    def facts(self, sink: FilesSink, schema: pa.Schema, absent: Collection[str]) -> SinkFacts:
        """Root, manifest and columns."""
        given, shown = self.given, () if self._inferred else schema
        columns = tuple((one.name, str(one.type), given.format) for one in shown)
        there = sink.topics.manifest not in absent
        return SinkFacts("files", given.url, given.manifest_topic, there, columns)

    # -- parts -----------------------------------------------------------------------------

    @property
    def _inferred(self) -> bool:
        decode = self.settings.decode
        return isinstance(decode, JsonDecode) and decode.inferred
