"""The files sink: tasks write files that nobody reads; one Kafka transaction names them.

Manifest messages, grown schemas, dead letters, ledger records and offsets take effect together,
by the publisher's transactional id, as in a batch commit into topics (docs/decisions/0012).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from oncely.core.ledger import Entry
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.decode.avro_names import arrow_schema_of, schema_id, storable
from oncely.decode.merging import CannotMerge, merge
from oncely.errors import Fenced, InvariantViolation, TableMismatch, Unavailable, check
from oncely.sinks.base import (
    Chunk,
    Fence,
    Opened,
    Publication,
    RangeKind,
    Reset,
    Staged,
    Written,
)
from oncely.sinks.files import topics as own_topics
from oncely.sinks.files.book import Book
from oncely.sinks.files.form import Form
from oncely.sinks.files.leases import Limits, StagingLeases
from oncely.sinks.files.manifest import Contents, Manifest
from oncely.sinks.files.manifest_owner import ManifestClaim
from oncely.sinks.files.owner import Owner, claim, owner_of, require
from oncely.sinks.files.partitions import check_types
from oncely.sinks.files.publication import ManifestLoad, Topics, clock
from oncely.sinks.files.store import Store
from oncely.sinks.files.task import FilesTask
from oncely.sinks.files.words import Scope, ScopeSchema, encode, read_receipt, schema_key
from oncely.sinks.kafka import settings, topics
from oncely.sinks.kafka.cluster import Cluster, Place
from oncely.sinks.kafka.ledger import LedgerInTopic
from oncely.sinks.kafka.publishing import Publisher
from oncely.sinks.kafka.transaction import Message
from oncely.sinks.kafka.words import Mode

_TRIES = 5


@dataclass
class FilesSink(LedgerInTopic):
    """Files below a root, named by the manifest topic.

    Attributes:
        place: cluster, pipeline, group and ledger topic.
        store: where the files lie.
        form: what they are.
        topics: where they and their schemas are named.
        rejects_topic: where dead letters go, in the same transaction.
        create: create the topics when they are missing.
        max_staging_age: seconds that a file may wait to be named.
        run: a name of this run's own, by which it finds itself in the ledger.
    """

    place: Place
    store: Store
    form: Form
    topics: Topics
    rejects_topic: str
    create: bool = True
    max_staging_age: float = 3600.0
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _cluster: tuple[int, Cluster] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _limits: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _book: Book = field(default_factory=Book, init=False, repr=False, compare=False)
    _manifest: tuple[int, Manifest] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _began: float = field(default_factory=clock, init=False, repr=False, compare=False)
    _leases: StagingLeases | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_manifest": None, "_leases": None}

    def close(self) -> None:
        """Close the clients; the next call makes new ones."""
        if self._manifest is not None and self._manifest[0] == os.getpid():
            self._manifest[1].close()
        self._manifest = None
        super().close()

    @property
    def manifest(self) -> Manifest:
        """The two topics, as this process reads them."""
        if self._manifest is None or self._manifest[0] != os.getpid():
            topics_ = self.topics
            self._manifest = os.getpid(), Manifest(self.place, topics_.manifest, topics_.schema)
        return self._manifest[1]

    @property
    def mode(self) -> Mode:
        """The driver moves all positions."""
        return "batch"

    @property
    def needs(self) -> frozenset[str]:
        """Nothing beside what the decoder reads."""
        return frozenset()

    @property
    def one_store(self) -> bool:
        """Files stay when a topic loses records."""
        return False

    @property
    def timed(self) -> bool:
        """Positions move with the records."""
        return False

    # -- the driver: before and between batches --------------------------------------------

    def check(self) -> None:
        """Look at settings, root and topics as they are now; no topic is created.

        Raises:
            ConfigError: naming what is wrong with the root, a topic or a key; also a root that
                belongs to another manifest, or a manifest that belongs to another root.
        """
        settings.checked(self.place.producer)
        self._check_columns()
        self.store.check()
        names = self.topics.manifest, self.topics.schema
        own_topics.check_topics(self.cluster.asker, *names, create=self.create)
        if not self.create:
            topics.require_topics(self.cluster.asker, [self.rejects_topic])
        self._check_owner()

    def bind(self) -> FilesSink:
        """Look at everything, and create the topics that are missing and may be."""
        self.check()
        self._require_topics(create=self.create)
        names = [self.topics.manifest, self.topics.schema, self.rejects_topic]
        self._limits = topics.largest_batch(self.cluster.asker, names)
        return self

    def prepare(self) -> None:
        """Create the topics that are missing, claim root and manifest, and read the schemas."""
        self.bind()
        self._claimed()
        self._claim_manifest()
        self._read_book()

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None = None,
    ) -> Opened:
        """Take the next epoch and settle a position for every partition; see the port.

        Raises:
            Stopped: the pipeline has written before, and its position is nowhere to be found.
            TableMismatch: the manifest topic was made again, or the columns don't fit the files.
        """
        self.bind()
        outputs = self._claimed()
        done = self.take_over(source, self.target, start, earliest, expected, outputs=outputs)
        # Only now: the run before is fenced, and what it left open does not hide anything.
        self._claim_manifest()
        # The schemas that it has published are all there.
        self._read_book()
        return done

    def reset(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """Take the next epoch and put positions elsewhere; see the port."""
        self._require_topics(create=self.create)
        with self._claim() as claim_:
            claim_.check(moved=True)
        outputs = self._claimed()
        done = self.take_over(source, self.target, start, earliest, None, positions, outputs)
        self._claim_manifest(moved=True)
        return done

    def replace_schema(
        self, scope: Scope, learned: Callable[[Contents], str | None], fence: Fence
    ) -> None:
        """Publish another schema for a scope in place of the one that it has, in one transaction.

        ``init`` ends and fences whoever was about to publish. A run that opens from here on
        initialises the same id before it reads the schemas: it reads this one, or ends us.

        Args:
            scope: whose.
            learned: makes the schema of what the topics hold; None: the scope begins anew.
            fence: of the epoch that was taken for it.

        Raises:
            Fenced: a newer run has opened; nothing was published.
            Unavailable: nobody knows; it can be repeated.
        """
        size = self._largest([self.topics.schema]).values()
        for left in reversed(range(_TRIES)):
            try:
                with self.cluster.transaction(self.place.words.publisher, size) as writer:
                    writer.init()
                    now = self.cluster.settled().pipeline
                    if now is None or now.epoch != fence.epoch:
                        raise Fenced(fence.pipeline, fence.epoch, now.epoch if now else 0)
                    avro = learned(self.manifest.settled())
                    value = avro and encode(ScopeSchema(schema_id(avro), scope, avro))
                    writer.begin()
                    writer.send(self.topics.schema, [Message(value or None, schema_key(scope))])
                    writer.commit()
            except Unavailable:  # an old run has tried to publish, or no answer came
                if not left:
                    raise
                continue
            return

    @property
    def target(self) -> str:
        """Where it writes, in a word."""
        return f"{self.store.url} by {self.topics.manifest}"

    def in_hand(self, ranges: Mapping[TopicPartition, OffsetRange]) -> FilesSink:  # noqa: ARG002
        """A batch begins: no file of it is older than this moment."""
        self._began = clock()
        if self._leases is None:
            limits = Limits(self.max_staging_age, self.place.transaction_timeout)
            self._leases = StagingLeases(self.store, limits)
        self._leases.hold()
        return self

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:  # noqa: ARG002
        """Nothing: what was staged in vain is for ``oncely files vacuum``, which knows its age."""
        return 0

    # -- tasks -----------------------------------------------------------------------------

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> FilesTask:
        """Begin a task's files."""
        return FilesTask(self.store, self.form, self._book.known, fence, batch_id, attempt)

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Write the rows that a Spark transform has made; in an executor.

        Raises:
            Stopped: a row can't be written, and no single record answers for it.
            Unavailable: the store does not take them.
        """
        task = self.staging(fence, batch_id, attempt)
        try:
            for table in rows:
                task.add_rows(table)
            return task.finish()
        except BaseException:
            task.abandon()
            raise

    # -- the driver: a batch ---------------------------------------------------------------

    def agree(self, staged: Staged) -> bool:
        """Merge the schemas that a task has found; see :class:`oncely.sinks.base.RangeSink`."""
        if staged.name is None:  # packets of contradicting tasks
            return False
        return self._book.agree(read_receipt(staged.name), self.form.caps)

    def publish(
        self, what: Publication, entries: Mapping[TopicPartition, Entry], fence: Fence
    ) -> None:
        """Name staged files, and move every position, in one transaction; in the driver.

        Raises:
            PositionMoved: nothing was published; read the ledger and decide again.
            StagedRowsGone: nothing was published; the batch can be repeated.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """
        self._publisher().publish(what, entries, fence)
        self._note_published(what)

    def write_staged(self, what: Publication, fence: Fence) -> None:
        """Name staged files without moving a position."""
        self._publisher().write(what, fence)
        self._note_published(what)

    def move(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],
        kind: RangeKind,
    ) -> None:
        """Move positions alone; see the port."""
        empty = Publication(ranges, written, (), ())
        self._publisher().publish(empty, entries, fence, kind)

    def commit(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        max_rejects: int | None = None,  # noqa: ARG002 - the port's
        kind: RangeKind = "data",
    ) -> dict[TopicPartition, Written]:
        """Move over holes and gaps; records are staged and published, never committed by tasks."""
        check(not chunk.records, "a files sink writes records by publishing them")
        nothing = dict.fromkeys(chunk.ranges, Written(0, 0, 0, 0))
        self.move(chunk.ranges, entries, fence, nothing, kind)
        return nothing

    def write(
        self,
        chunk: Chunk,  # noqa: ARG002 - the port's
        fence: Fence,  # noqa: ARG002
        max_rejects: int | None = None,  # noqa: ARG002
    ) -> dict[TopicPartition, Written]:
        """Never asked for: see :meth:`commit`."""
        raise InvariantViolation("a files sink writes records by publishing them")

    # -- parts -----------------------------------------------------------------------------

    @property
    def load(self) -> ManifestLoad:
        """What a transaction says of files."""
        return ManifestLoad(
            self.topics,
            self.form.format,
            self._book,
            self.manifest.schemas,
            self._began,
            self.max_staging_age,
        )

    def _publisher(self) -> Publisher:
        return Publisher(self.cluster, self.load, self.rejects_topic, self._largest)

    def _largest(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self._limits[name] for name in names}

    def _note_published(self, what: Publication) -> None:
        receipts = [read_receipt(one.name) for one in what.staged if one.name]
        for scope in {one.scope for receipt in receipts for one in receipt.files}:
            self._book.published[scope] = self._book.page(scope).id

    def _require_topics(self, *, create: bool) -> own_topics.TopicIds:
        topics.require_topics(self.cluster.asker, [self.rejects_topic], create=create)
        manifest, schema = self.topics.manifest, self.topics.schema
        return own_topics.require_topics(self.cluster.asker, manifest, schema, create=create)

    def _read_book(self) -> None:
        """What all files so far resolve to, and in a fixed schema what they will.

        Raises:
            TableMismatch: a fixed schema that the files so far don't resolve to.
        """
        self._book = Book()
        self._book.take(self.manifest.schemas())
        self._book.as_of_today(self.form.scope_columns)
        if self.form.schema is not None:
            self._book.known[()] = self._fixed(self._book.known.get(()))

    def _claimed(self) -> dict[str, str]:
        """The ids of the two topics, when the root is this manifest's."""
        ids = self._require_topics(create=self.create)
        claim(self.store, Owner(self.place.pipeline, self.topics.manifest, ids.manifest))
        return {self.topics.manifest: ids.manifest, self.topics.schema: ids.schema}

    def _check_owner(self) -> None:
        """Refuse a root that is another manifest's, and a manifest that is another root's.

        What has no owner is claimed by ``open``.
        """
        there = topics.identified(self.cluster.asker, self.topics.manifest)
        if owner_of(self.store) is not None:
            require(self.store, there[0] if there else "none yet")
        if there is not None:
            with self._claim() as claim_:
                claim_.check()
                self._check_known(claim_.manifest)

    def _check_known(self, manifest: Manifest) -> None:
        """Refuse a fixed schema that the files so far don't resolve to."""
        absent = topics.missing(self.cluster.asker, [self.topics.schema])
        if self.form.schema is not None and len(self.form.schema) and not absent:
            known = manifest.schemas(stable=False).get(())
            self._fixed(None if known is None else arrow_schema_of(known.avro))

    def _claim_manifest(self, *, moved: bool = False) -> None:
        """Have the manifest topic name this pipeline and root."""
        with self._claim() as claim_:
            claim_.take(moved=moved)

    @contextmanager
    def _claim(self) -> Iterator[ManifestClaim]:
        """With a reader of its own, which does not keep the whole manifest in memory."""
        names = self.topics.manifest, self.topics.schema
        with Manifest(self.place, *names, self.store) as manifest:
            yield ManifestClaim(self.cluster, manifest, self.store.url)

    def _check_columns(self) -> None:
        """Refuse columns that files can't hold, or that choose no directory.

        Raises:
            ConfigError: naming the column.
        """
        if self.form.schema is not None and len(self.form.schema):
            storable(self.form.schema)
            check_types(self.form.schema, self.form.columns)

    def _fixed(self, known: pa.Schema | None) -> pa.Schema:
        """What old and new files resolve to, when the columns are given.

        Raises:
            TableMismatch: they have no such schema.
        """
        schema = storable(self.form.schema)
        try:
            return schema if known is None else merge(known, schema)
        except CannotMerge as error:
            raise TableMismatch(
                f"decode.schema: {error}, and there are files with it",
                way_out="keep the column's type, give the new one another name, or give the"
                " pipeline a new name, root and topics",
            ) from None
