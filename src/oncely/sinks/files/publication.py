"""What the driver's one transaction says of files: their schemas, and then their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from oncely.clients.kafka.sender import Message, Sender
from oncely.core.batch import Batch, StagedRowsGone
from oncely.core.claim import Fence
from oncely.errors import check
from oncely.lake.leases import clock
from oncely.lake.records import (
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
from oncely.lake.scope_schemas import SchemaRegistry
from oncely.sinks.kafka.publishing import InTime


@dataclass(frozen=True)
class Topics:
    """Where files are named."""

    manifest: str
    schema: str


@dataclass(frozen=True)
class ManifestLoad:
    """Names the files of a publication.

    Attributes:
        topics: where.
        format: of the files.
        book: the schemas that all files of a scope resolve to, those of this batch among them.
        read: what the schema topic holds now.
        began: when the batch began to be staged, by :func:`clock`; no file is older.
        max_age: seconds; `vacuum` may take what is older than this and a transaction's timeout.
    """

    topics_: Topics
    format: Format
    book: SchemaRegistry
    read: Callable[[], Mapping[Scope, ScopeSchema]]
    began: float
    max_age: float

    def topics(self, batch: Batch) -> list[str]:
        """Manifest and schemas."""
        del batch
        return [self.topics_.manifest, self.topics_.schema]

    def ready(self) -> None:
        """Take in schemas that a replay has widened; who could do so now would fence us."""
        self.book.take(self.read())

    def send(self, writer: Sender, batch: Batch, fence: Fence, in_time: InTime) -> None:
        """Send all of it."""
        receipts = [read_receipt(one.name) for one in batch.staged if one.name]
        every = [SourceRange(*tp, r.start, r.end) for tp, r in sorted(batch.ranges.items())]
        for topic, messages in self.messages(receipts, fence, every):
            writer.send(topic, messages)
            in_time()
        rows = sum(one.rows for receipt in receipts for one in receipt.files)
        check(rows == batch.rows, f"files of {rows} rows are named, {batch.rows} were staged")

    def fresh(self) -> None:
        """Refuse files that may have been vacuumed.

        Asked when the broker has the messages, for its clock runs from the first of them, not
        from ``begin_transaction``, of which it is not told. Stopped before, we find out here;
        stopped from here on, the broker ends the transaction by its timeout, and `vacuum` takes
        no file that is younger than both together. So a file that is named is there.

        Raises:
            StagedRowsGone: too old; the batch is done again.
        """
        age = clock() - self.began
        if age > self.max_age:
            raise StagedRowsGone(
                f"files of this batch may be {age:.0f} s old, and sink.max_staging_age is"
                f" {self.max_age:g} s: they may have been vacuumed; the batch is done again"
            )

    def messages(
        self, receipts: Sequence[Receipt], fence: Fence, every: Sequence[SourceRange]
    ) -> Iterator[tuple[str, list[Message]]]:
        """Grown schemas first, then the files.

        Args:
            receipts: of the tasks.
            fence: who publishes.
            every: ranges of the batch, for rows that a Spark transform has mixed.
        """
        pages = self.pages(receipts)
        grown = [one for scope, one in pages.items() if self.book.published.get(scope) != one.id]
        yield self.topics_.schema, [Message(encode(one), schema_key(one.scope)) for one in grown]
        for receipt in receipts:
            names = [
                self._named(one, pages[one.scope], fence, receipt.batch, every)
                for one in receipt.files
            ]
            yield self.topics_.manifest, [Message(encode(one), path_key(one.path)) for one in names]

    def pages(self, receipts: Sequence[Receipt]) -> dict[Scope, ScopeSchema]:
        """The schemas of all scopes that have a file here."""
        scopes = {one.scope for receipt in receipts for one in receipt.files}
        return {scope: self.book.page(scope) for scope in sorted(scopes, key=repr)}

    def _named(
        self,
        one: WrittenFile,
        page: ScopeSchema,
        fence: Fence,
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
            schema=page.id,
            pipeline=fence.pipeline,
            epoch=fence.epoch,
            batch=batch,
        )


def _iso(micros: int) -> str:
    """Microseconds since 1970 as ISO 8601 in UTC."""
    seconds, rest = divmod(micros, 1_000_000)
    text = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)
    return text.isoformat().replace("+00:00", "Z")
