"""The files sink: tasks write files that are not visible; one Kafka transaction publishes them.

Manifest messages, extended schemas, dead letters, ledger records and offsets take effect together,
by the publisher's transactional id, as in a batch commit into topics (docs/decisions/0012)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from oncely.core.batch import Batch, Staged
from oncely.core.claim import Claim, Fence, Opened, Takeover
from oncely.decode.avro_schema import arrow_schema_of, schema_id, storable
from oncely.decode.merging import CannotMerge, merge
from oncely.errors import Fenced, TableMismatch, check
from oncely.kafka import topics
from oncely.kafka.properties import checked_producer
from oncely.kafka.sender import Sender
from oncely.kafka.transaction import Message
from oncely.kinds.data_file import (
    FileFormat,
    Format,
    Receipt,
    Scope,
    SourceRange,
    WrittenFile,
    encode,
    read_receipt,
)
from oncely.kinds.files import topics as own_topics
from oncely.kinds.files.manifest import Contents, Manifest, ManifestClaim
from oncely.kinds.files.records import ManifestFile, ScopeSchema, path_key, schema_key
from oncely.kinds.files.topics import Owner, ScopeSchemas, claim, owner_of, require
from oncely.kinds.partitions import check_types
from oncely.kinds.staged_files import FilesTask, clock, refuse_old
from oncely.kinds.topic_publishing import InTime, Load, Publisher
from oncely.per_process import PerProcess
from oncely.stores.objects.store import Store, StoredFile
from oncely.stores.topic.cluster import Cluster, PipelineTopics
from oncely.stores.topic.compare_and_set import compare_and_set
from oncely.stores.topic.ledger import TopicLedger


@dataclass
class FilesSink:
    """Files below a root, listed in the manifest topic.

    Attributes:
        pipeline_topics: cluster, pipeline, group and ledger topic.
        store: the store of the files.
        form: the format of the files.
        topics: the topics of the manifest and of the schemas.
        rejects_topic: the topic of dead letters, written in the same transaction.
        create: create the topics if they are missing.
        max_staging_age: seconds that a file may wait to be published.
        run: a unique name of this run, which identifies it in the ledger.
    """

    pipeline_topics: PipelineTopics
    store: Store
    form: FileFormat
    topics: FilesTopics
    rejects_topic: str
    create: bool = True
    max_staging_age: float = 3600.0
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _limits: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _schemas: ScopeSchemas = field(
        default_factory=ScopeSchemas, init=False, repr=False, compare=False
    )
    _began: float = field(default_factory=clock, init=False, repr=False, compare=False)
    _leases: StagingLeases | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ledger": self.ledger, "_leases": None}

    @cached_property
    def ledger(self) -> TopicLedger:
        """Epochs and positions, in the ledger topic and the group; the driver moves them all."""
        target = self.target
        return TopicLedger(
            self.pipeline_topics, "batch", target, self._claimed, self.create, self.run
        )

    @property
    def cluster(self) -> Cluster:
        """The clients of this process."""
        return self.ledger.cluster

    def close(self) -> None:
        """Close the clients; the next call creates new ones."""
        self._manifest.close()
        self.ledger.close()

    @property
    def manifest(self) -> Manifest:
        """The reader of the two topics in this process."""
        return self._manifest.get()

    @cached_property
    def _manifest(self) -> PerProcess[Manifest]:
        topics_ = self.topics
        make = partial(Manifest, self.pipeline_topics, topics_.manifest, topics_.schema)
        return PerProcess(make, Manifest.close)

    @property
    def needs(self) -> frozenset[str]:
        """Nothing in addition to the decoder's columns."""
        return frozenset()

    # -- the driver: before and between batches --------------------------------------------

    def check(self) -> None:
        """Check the present settings, root and topics; no topic is created.

        Raises:
            ConfigError: a problem of the root, a topic or a setting; also a root that belongs to
                another manifest, or a manifest that belongs to another root.
        """
        checked_producer(self.pipeline_topics.producer)
        self._check_columns()
        self.store.check()
        names = self.topics.manifest, self.topics.schema
        own_topics.check_topics(self.cluster.admin, *names, create=self.create)
        if not self.create:
            topics.require_topics(self.cluster.admin, [self.rejects_topic])
        self._check_owner()

    def bind(self) -> FilesSink:
        """Check everything, and create missing topics, if permitted."""
        self.check()
        self._require_topics(create=self.create)
        names = [self.topics.manifest, self.topics.schema, self.rejects_topic]
        self._limits = topics.largest_batch(self.cluster.admin, names)
        return self

    def prepare(self) -> None:
        """Create missing topics, claim root and manifest, and read the schemas."""
        self.bind()
        self._claimed()
        self._claim_manifest()
        self._read_schemas()

    def open(self, takeover: Takeover) -> Opened:
        """Take the ledger over, then manifest and schemas.

        Raises:
            TableMismatch: the manifest topic was recreated, or the columns do not fit the files.
        """
        moved = takeover.reset is not None
        if moved:
            self._require_topics(create=self.create)
            with self._claim() as claim_:
                claim_.check(moved=True)
        else:
            self.bind()
        done = self.ledger.open(takeover)
        # Only now: the previous run is fenced, and its open transaction hides no messages.
        self._claim_manifest(moved=moved)
        if not moved:  # all schemas that it has published are visible
            self._read_schemas()
        return done

    def replace_schema(
        self, scope: Scope, learned: Callable[[Contents], str | None], fence: Fence
    ) -> None:
        """Replace the published schema of a scope, in one transaction.

        ``init`` ends and fences every run that was about to publish. A run that opens from here on
        initialises the same id before it reads the schemas: it reads this schema, or fences this
        transaction.

        Args:
            scope: the scope.
            learned: computes the schema from the contents of the topics; None: the scope begins
                empty.
            fence: the epoch that was taken for it.

        Raises:
            Fenced: a newer run has opened; nothing was published.
            Unavailable: an old run has tried to publish, or there was no answer; it can be
                repeated.
        """
        size, publisher = (
            self._largest([self.topics.schema]).values(),
            self.pipeline_topics.keys.publisher,
        )

        def still_held() -> None:
            now = self.cluster.settled().pipeline
            if now is None or now.epoch != fence.epoch:
                raise Fenced(fence.pipeline, fence.epoch, now.epoch if now else 0)

        with compare_and_set(self.cluster, publisher, still_held, size) as (writer, _):
            avro = learned(self.manifest.settled())
            value = avro and encode(ScopeSchema(schema_id(avro), scope, avro))
            writer.begin()
            writer.send(self.topics.schema, [Message(value or None, schema_key(scope))])
            writer.commit()

    def new_partitions(self) -> dict[str, int]:
        """None: its topics have the default, or a number of their own."""
        return {}

    @property
    def target(self) -> str:
        """The destination as stored in the ledger."""
        return f"{self.store.url} by {self.topics.manifest}"

    def begin_batch(self) -> None:
        """A batch begins: no file of it is older than this time."""
        self._began = clock()
        if self._leases is None:
            limits = LeaseLimits(self.max_staging_age, self.pipeline_topics.transaction_timeout)
            self._leases = StagingLeases(self.store, limits)
        self._leases.hold()

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> None:
        """Does nothing: unpublished files are removed by ``oncely files vacuum``, which checks
        their age."""

    # -- tasks -----------------------------------------------------------------------------

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> FilesTask:
        """Begin a task's files."""
        return FilesTask(self.store, self.form, self._schemas.known, fence, batch_id, attempt)

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Write the rows that a Spark transform has made; in an executor."""
        return self.staging(fence, batch_id, attempt).of_transform(rows)

    # -- the driver: a batch ---------------------------------------------------------------

    def agree(self, staged: Staged) -> bool:
        """Merge the schemas of a task; see :class:`oncely.kinds.base.StagesBatches`."""
        if staged.name is None:  # packets of contradicting tasks
            return False
        return self._schemas.agree(read_receipt(staged.name))

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Publish staged files, and move every position, in one transaction; in the driver."""
        publisher = Publisher(self.cluster, self.load(fence), self.rejects_topic, self._largest)
        publisher.publish(batch, fence, claim)
        self.published([read_receipt(one.name) for one in batch.staged if one.name])

    def published(self, receipts: Sequence[Receipt]) -> None:
        """Note that the schemas of these files are published."""
        for scope in {one.scope for receipt in receipts for one in receipt.files}:
            self._schemas.published[scope] = self._schemas.record(scope).id

    # -- parts -----------------------------------------------------------------------------

    def load(self, fence: Fence) -> ManifestLoad:
        """The manifest messages of a run's transaction."""
        return ManifestLoad(
            fence,
            self.topics,
            self.form.format,
            self._schemas,
            self.manifest.schemas,
            self._began,
            self.max_staging_age,
        )

    @property
    def largest(self) -> Mapping[str, int]:
        """``max.message.bytes`` of the topics, after :meth:`bind`."""
        return self._limits

    def _largest(self, names: Sequence[str]) -> dict[str, int]:
        return {name: self._limits[name] for name in names}

    def _require_topics(self, *, create: bool) -> own_topics.TopicIds:
        topics.require_topics(self.cluster.admin, [self.rejects_topic], create=create)
        manifest, schema = self.topics.manifest, self.topics.schema
        return own_topics.require_topics(self.cluster.admin, manifest, schema, create=create)

    def _read_schemas(self) -> None:
        """Read the schemas to which all present files resolve, and with a fixed schema new files,
        too.

        Raises:
            TableMismatch: the present files do not resolve to the fixed schema.
        """
        self._schemas = ScopeSchemas()
        self._schemas.take(self.manifest.schemas())
        if self.form.schema is not None:
            self._schemas.known[()] = self._fixed(self._schemas.known.get(()))

    def _claimed(self) -> dict[str, str]:
        """The ids of the two topics, if the root belongs to this manifest."""
        ids = self._require_topics(create=self.create)
        claim(self.store, Owner(self.pipeline_topics.pipeline, self.topics.manifest, ids.manifest))
        return {self.topics.manifest: ids.manifest, self.topics.schema: ids.schema}

    def _check_owner(self) -> None:
        """Refuse a root of another manifest, and a manifest of another root.

        A root or manifest without an owner is claimed by ``open``.
        """
        there = topics.identified(self.cluster.admin, self.topics.manifest)
        if owner_of(self.store) is not None:
            require(self.store, there[0] if there else "none yet")
        if there is not None:
            with self._claim() as claim_:
                claim_.check()
                self._check_known(claim_.manifest)

    def _check_known(self, manifest: Manifest) -> None:
        """Refuse a fixed schema to which the present files do not resolve."""
        absent = topics.missing(self.cluster.admin, [self.topics.schema])
        if self.form.schema is not None and len(self.form.schema) and not absent:
            known = manifest.schemas(stable=False).get(())
            self._fixed(None if known is None else arrow_schema_of(known.avro))

    def _claim_manifest(self, *, moved: bool = False) -> None:
        """Claim the manifest topic for this pipeline and root."""
        with self._claim() as claim_:
            claim_.take(moved=moved)

    @contextmanager
    def _claim(self) -> Iterator[ManifestClaim]:
        """The claim, with a separate reader that does not keep the whole manifest in memory."""
        with Manifest(self.pipeline_topics, self.topics.manifest, self.topics.schema) as manifest:
            yield ManifestClaim(self.cluster, manifest, self.store.url)

    def _check_columns(self) -> None:
        """Refuse columns that files do not support, or that cannot determine a directory.

        Raises:
            ConfigError: the error names the column.
        """
        if self.form.schema is not None and len(self.form.schema):
            storable(self.form.schema)
            check_types(self.form.schema, self.form.columns)

    def _fixed(self, known: pa.Schema | None) -> pa.Schema:
        """The schema to which old and new files resolve, if the columns are given.

        Raises:
            TableMismatch: there is no such schema.
        """
        schema = storable(self.form.schema)
        try:
            return schema if known is None else merge(known, schema)
        except CannotMerge as error:
            raise TableMismatch(
                f"{error}, and there are files with it",
                key="decode.schema",
                way_out="keep the column's type, give the new one another name, or give the"
                " pipeline a new name, root and topics",
            ) from None


@dataclass(frozen=True)
class FilesTopics:
    """The topics of the manifest and of the schemas."""

    manifest: str
    schema: str


@dataclass(frozen=True)
class ManifestLoad(Load):
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
    topics_: FilesTopics
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
        refuse_old(self.began, self.max_age)

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


FOLDER = "_oncely/staging"
"""The folder below the root, beside the owner's file."""

_NAME = re.compile(
    re.escape(FOLDER) + r"/age(\d{1,12}\.\d{3})-timeout(\d{1,12}\.\d{3})-[0-9a-f]{16}"
)


@dataclass(frozen=True)
class LeaseLimits:
    """Limits of the time between staging and publication of a file.

    Attributes:
        max_staging_age: seconds from the beginning of its batch to the check of its age.
        transaction_timeout: seconds after which the broker ends the transaction that publishes it.
    """

    max_staging_age: float
    transaction_timeout: float

    @property
    def valid(self) -> timedelta:
        """The time for which a lease with these limits is valid."""
        return timedelta(seconds=2 * self.max_staging_age + self.transaction_timeout)


@dataclass
class StagingLeases:
    """The leases that one process writes: the limits by which it stages files, kept below the root.

    ``vacuum`` removes an unpublished file when no process can publish it any more. A process
    publishes files up to its own ``max_staging_age``, which it has read from the pipeline file
    at its start. The pipeline file may have been changed since, so ``vacuum`` cannot rely on
    the file alone. Every process that stages files (a run, a replay of dead letters, a
    compaction) therefore writes a lease before the first file of a batch, and ``vacuum`` uses
    the largest limits among its own and those of all valid leases.

    A lease is an empty file whose name contains the limits. A batch may begin up to
    ``max_staging_age`` after its lease was written; then the process writes the next lease. The
    files of a batch are published up to ``max_staging_age`` and the transaction timeout after
    the batch began, or never. So a lease is valid for twice the age and the timeout, by the
    store's clock, and need not be revoked: it also covers a process that was fenced while it
    was paused. An expired lease is an orphan.

    Each lease has a name of its own, so two processes never write the same file: pyarrow offers
    no compare-and-set of object stores.

    Attributes:
        store: the root.
        limits: the limits of this process.
    """

    store: Store
    limits: LeaseLimits
    _written: float | None = field(default=None, init=False)

    def hold(self) -> None:
        """Ensure a valid lease; called before the first file of a batch is staged.

        Raises:
            Unavailable: the store cannot write it.
        """
        now, limits = clock(), self.limits
        if self._written is not None and now - self._written <= limits.max_staging_age:
            return
        age, timeout = max(0.0, limits.max_staging_age), limits.transaction_timeout
        name = f"age{age:.3f}-timeout{timeout:.3f}-{uuid.uuid4().hex[:16]}"
        self.store.write(f"{FOLDER}/{name}", b"")
        self.store.durable()
        self._written = now


def limits_of(path: str) -> LeaseLimits | None:
    """The limits of a lease; None if the path is not that of a lease."""
    found = _NAME.fullmatch(path)
    return LeaseLimits(float(found[1]), float(found[2])) if found else None


def valid_leases(stored: Iterable[StoredFile], at: datetime) -> dict[str, LeaseLimits]:
    """The leases that are valid at a time of the store's clock, by path."""
    found = ((one, limits_of(one.path)) for one in stored)
    return {
        one.path: limits
        for one, limits in found
        if limits is not None and one.modified + limits.valid >= at
    }
