"""The messages of the driver's transaction about files: their schemas, and then their entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from oncely.clients.kafka.sender import Message, Sender
from oncely.core.batch import Batch, StagedRowsGone
from oncely.core.claim import Fence
from oncely.errors import check
from oncely.lake.leases import clock
from oncely.lake.manifest import (
    Format,
    ManifestFile,
    Receipt,
    Scope,
    ScopeSchema,
    SourceRange,
    WrittenFile,
    encode,
    path_key,
    read_receipt,
    schema_key,
)
from oncely.lake.scope_schemas import ScopeSchemas
from oncely.sinks.kafka.publishing import InTime


@dataclass(frozen=True)
class Topics:
    """The topics of the manifest and of the schemas."""

    manifest: str
    schema: str


@dataclass(frozen=True)
class ManifestLoad:
    """The manifest messages of a publication.

    Attributes:
        fence: the publishing run.
        topics_: manifest and schema topic.
        format: the format of the files.
        schemas: the schemas to which all files of a scope resolve, including those of this batch.
        read: the present schemas of the schema topic.
        began: the time when the staging of the batch began, by :func:`clock`; no file is older.
        max_age: seconds; `vacuum` may remove files that are older than this and a transaction's
            timeout.
    """

    fence: Fence
    topics_: Topics
    format: Format
    schemas: ScopeSchemas
    read: Callable[[], Mapping[Scope, ScopeSchema]]
    began: float
    max_age: float

    def topics(self, batch: Batch) -> list[str]:
        """Manifest and schemas."""
        del batch
        return [self.topics_.manifest, self.topics_.schema]

    def ready(self) -> None:
        """Merge schemas that a replay has extended; a later change would fence this transaction."""
        self.schemas.take(self.read())

    def send(self, writer: Sender, batch: Batch, in_time: InTime) -> None:
        """Send all messages."""
        receipts = [read_receipt(one.name) for one in batch.staged if one.name]
        every = [SourceRange(*tp, r.start, r.end) for tp, r in sorted(batch.ranges.items())]
        for topic, messages in self.messages(receipts, every):
            writer.send(topic, messages)
            in_time()
        rows = sum(one.rows for receipt in receipts for one in receipt.files)
        check(rows == batch.rows, f"files of {rows} rows are named, {batch.rows} were staged")

    def fresh(self) -> None:
        """Refuse files that may have been vacuumed.

        Called when the broker has the messages, because its clock starts with the first of them,
        not with ``begin_transaction``, which is not sent to it. A pause before this call is
        detected here; after a later pause the broker ends the transaction by its timeout, and
        `vacuum` removes no file that is younger than both together. So a published file exists.

        Raises:
            StagedRowsGone: the files are too old; the batch is repeated.
        """
        age = clock() - self.began
        if age > self.max_age:
            raise StagedRowsGone(
                f"files of this batch may be {age:.0f} s old, and sink.max_staging_age is"
                f" {self.max_age:g} s: they may have been vacuumed; the batch is repeated"
            )

    def messages(
        self, receipts: Sequence[Receipt], every: Sequence[SourceRange]
    ) -> Iterator[tuple[str, list[Message]]]:
        """Extended schemas first, then the files.

        Args:
            receipts: the receipts of the tasks.
            every: all ranges of the batch, for rows that a Spark transform has mixed.
        """
        yield self.topics_.schema, self.grown(receipts)
        for receipt in receipts:
            names = self.names([receipt], every)
            yield self.topics_.manifest, [Message(encode(one), path_key(one.path)) for one in names]

    def grown(self, receipts: Sequence[Receipt]) -> list[Message]:
        """The schemas that the files of this publication extend."""
        needed, published = self.schemas_of(receipts), self.schemas.published
        grown = [one for scope, one in needed.items() if published.get(scope) != one.id]
        return [Message(encode(one), schema_key(one.scope)) for one in grown]

    def names(
        self, receipts: Sequence[Receipt], every: Sequence[SourceRange] = ()
    ) -> list[ManifestFile]:
        """The entries of all files."""
        needed = self.schemas_of(receipts)
        return [
            self._named(one, needed[one.scope], receipt.batch, every)
            for receipt in receipts
            for one in receipt.files
        ]

    def schemas_of(self, receipts: Sequence[Receipt]) -> dict[Scope, ScopeSchema]:
        """The schemas of all scopes that have a file in this publication."""
        scopes = {one.scope for receipt in receipts for one in receipt.files}
        return {scope: self.schemas.record(scope) for scope in sorted(scopes, key=repr)}

    def _named(
        self,
        one: WrittenFile,
        schema: ScopeSchema,
        batch: int,
        every: Sequence[SourceRange],
    ) -> ManifestFile:
        """The entry of a file; rows that a Spark transform has mixed come from all ranges."""
        first_last = one.event_time and (_iso(one.event_time[0]), _iso(one.event_time[1]))
        return ManifestFile(
            path=one.path,
            format=self.format,
            rows=one.rows,
            bytes=one.bytes,
            sha256=one.sha256,
            partition=one.partition,
            event_time=first_last,
            ranges=one.ranges or list(every),
            scope=one.scope,
            schema=schema.id,
            pipeline=self.fence.pipeline,
            epoch=self.fence.epoch,
            batch=batch,
        )


def _iso(micros: int) -> str:
    """Microseconds since 1970 as ISO 8601 in UTC."""
    seconds, rest = divmod(micros, 1_000_000)
    text = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)
    return text.isoformat().replace("+00:00", "Z")
