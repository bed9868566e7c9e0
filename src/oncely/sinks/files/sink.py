"""The files sink: tasks write files that nobody reads; one Kafka transaction names them.

Manifest messages, grown schemas, dead letters, ledger records and offsets take effect together,
by the publisher's transactional id, as in a batch commit into topics (docs/decisions/0012).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from oncely.clients.files.store import Store
from oncely.clients.kafka import producer_settings as settings
from oncely.clients.kafka import topics
from oncely.clients.kafka.transaction import Message
from oncely.core.batch import Batch, Staged
from oncely.core.claim import Claim, Fence, Opened, Takeover
from oncely.decode.avro_names import arrow_schema_of, schema_id, storable
from oncely.decode.merging import CannotMerge, merge
from oncely.errors import Fenced, TableMismatch, Unavailable
from oncely.lake import topics as own_topics
from oncely.lake.file_format import FileFormat
from oncely.lake.leases import Limits, StagingLeases, clock
from oncely.lake.manifest import Contents, Manifest
from oncely.lake.manifest_owner import ManifestClaim
from oncely.lake.partitions import check_types
from oncely.lake.records import Scope, ScopeSchema, encode, read_receipt, schema_key
from oncely.lake.root_marker import Owner, claim, owner_of, require
from oncely.lake.scope_schemas import SchemaRegistry
from oncely.ledgers.topic.cluster import Cluster, PipelineTopics
from oncely.ledgers.topic.compare_and_set import compare_and_set
from oncely.ledgers.topic.ledger import TopicLedger
from oncely.sinks.files.publication import ManifestLoad, Topics
from oncely.sinks.files.task import FilesTask
from oncely.sinks.kafka.publishing import Publisher

_TRIES = 5


@dataclass
class FilesSink:
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

    place: PipelineTopics
    store: Store
    form: FileFormat
    topics: Topics
    rejects_topic: str
    create: bool = True
    max_staging_age: float = 3600.0
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _limits: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _book: SchemaRegistry = field(
        default_factory=SchemaRegistry, init=False, repr=False, compare=False
    )
    _manifest: tuple[int, Manifest] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _began: float = field(default_factory=clock, init=False, repr=False, compare=False)
    _leases: StagingLeases | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ledger": self.ledger, "_manifest": None, "_leases": None}

    @cached_property
    def ledger(self) -> TopicLedger:
        """Epochs and positions, in the ledger topic and the group; the driver moves them all."""
        target = self.target
        return TopicLedger(self.place, "batch", target, self._claimed, self.create, self.run)

    @property
    def cluster(self) -> Cluster:
        """The clients of this process."""
        return self.ledger.cluster

    def close(self) -> None:
        """Close the clients; the next call makes new ones."""
        if self._manifest is not None and self._manifest[0] == os.getpid():
            self._manifest[1].close()
        self._manifest = None
        self.ledger.close()

    @property
    def manifest(self) -> Manifest:
        """The two topics, as this process reads them."""
        if self._manifest is None or self._manifest[0] != os.getpid():
            topics_ = self.topics
            self._manifest = os.getpid(), Manifest(self.place, topics_.manifest, topics_.schema)
        return self._manifest[1]

    @property
    def needs(self) -> frozenset[str]:
        """Nothing beside what the decoder reads."""
        return frozenset()

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

    def open(self, takeover: Takeover) -> Opened:
        """Take the ledger over, then manifest and schemas.

        Raises:
            TableMismatch: the manifest topic was made again, or the columns don't fit the files.
        """
        moved = takeover.reset is not None
        if moved:
            self._require_topics(create=self.create)
            with self._claim() as claim_:
                claim_.check(moved=True)
        else:
            self.bind()
        done = self.ledger.open(takeover)
        # Only now: the run before is fenced, and what it left open does not hide anything.
        self._claim_manifest(moved=moved)
        if not moved:  # the schemas that it has published are all there
            self._read_book()
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
        size, publisher = self._largest([self.topics.schema]).values(), self.place.words.publisher

        def still_held() -> None:
            now = self.cluster.settled().pipeline
            if now is None or now.epoch != fence.epoch:
                raise Fenced(fence.pipeline, fence.epoch, now.epoch if now else 0)

        for left in reversed(range(_TRIES)):
            try:
                with compare_and_set(self.cluster, publisher, still_held, size) as (writer, _):
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

    def begin_batch(self) -> None:
        """A batch begins: no file of it is older than this moment."""
        self._began = clock()
        if self._leases is None:
            limits = Limits(self.max_staging_age, self.place.transaction_timeout)
            self._leases = StagingLeases(self.store, limits)
        self._leases.hold()

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
        """Merge the schemas that a task has found; see :class:`oncely.sinks.base.StagesRanges`."""
        if staged.name is None:  # packets of contradicting tasks
            return False
        return self._book.agree(read_receipt(staged.name), self.form.caps)

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Name staged files, and move every position, in one transaction; in the driver."""
        publisher = Publisher(self.cluster, self.load, self.rejects_topic, self._largest)
        publisher.publish(batch, fence, claim)
        receipts = [read_receipt(one.name) for one in batch.staged if one.name]
        for scope in {one.scope for receipt in receipts for one in receipt.files}:
            self._book.published[scope] = self._book.page(scope).id

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

    def _largest(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self._limits[name] for name in names}

    def _require_topics(self, *, create: bool) -> own_topics.TopicIds:
        topics.require_topics(self.cluster.asker, [self.rejects_topic], create=create)
        manifest, schema = self.topics.manifest, self.topics.schema
        return own_topics.require_topics(self.cluster.asker, manifest, schema, create=create)

    def _read_book(self) -> None:
        """What all files so far resolve to, and in a fixed schema what they will.

        Raises:
            TableMismatch: a fixed schema that the files so far don't resolve to.
        """
        self._book = SchemaRegistry()
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
