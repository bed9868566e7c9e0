"""The manifest and the schemas, as stored in two topics, and their snapshots in the user's cache.

A reader sees a prefix of the manifest topic. Each prefix must be a consistent table: several
producers may write at the same time (a run publishes, a compaction rewrites), so that a prefix may
contain the first half of a committed transaction, whose other half follows the first record of a
transaction that is still open. For a run's publication this means a batch that is not complete yet.
For a compaction it could mean rows twice, or no rows. So the message of a rewritten file contains
the paths that it ``replaces``: a reader of the new file's message drops the old files because of
this one message, and their tombstones are needed only by Kafka's own compaction. Where several new
files replace old ones at once, the first message contains all of them (``along``), and is written
once more without them at the end: Kafka's compaction then keeps each file under its own key only.

Schemas are read after the manifest. A transaction's marker reaches one topic before the other: a
file may be visible whose schema is not, although it is in the schema topic already. When a file
refers to an unknown schema, that topic is read again, settled, which waits for the marker.

Named files are replaced by others in one transaction of the manifest: compactions and rewrites.

New files are written first, under new unique names. Then one Kafka transaction names them, and
takes the old names out. All such transactions of a pipeline share one transactional id, and each
has a producer instance of its own; its order is the compare-and-set, as everywhere:

1. ``init_transactions``: an earlier transaction ends, and its process is fenced.
2. The manifest is read, settled, and compared. Only transactions of this id remove files (a run
   only adds some), and only this instance can commit one now. So a file that is named here is named
   until our commit, or we are fenced and commit nothing.
3. Begin, send, and wait until the broker has the messages: from here on the coordinator's clock
   runs, and the transaction ends within its timeout. Only then the age of the new files is checked.
   A process that is paused before has the age refused; for a process that is paused after it, the
   broker aborts. ``vacuum`` cannot intervene between them: see there.
4. Commit.

A manifest topic belongs to a pipeline and a root. The root names its manifest
(:mod:`oncely.kinds.files.topics`); this is the inverse. Two roots with one manifest break both
tables: each reads the other's entries, whose files it does not have.

A run that opens a manifest topic without an owner writes its record there. Each pipeline has a key
of its own, and the first record in the log is valid: two runs that write at the same moment both
see the same first record, and the other run removes its own.

Kafka's compaction bounds the history of removed files, but the entries of live files are read by
each command: 300,000 of them take many seconds. So the next command continues from a snapshot,
which is only a copy. It is used if all of the
following hold; otherwise the topics are read from their first offset:

- Its topics have the same ids as before (a recreated topic has another id), and end at the
  snapshot's end or later.
- The last message that it contains is still at its offset, or was compacted away.
- It is younger than half of the topics' ``delete.retention.ms``. A tombstone is kept at least that
  long, so every removal since then is still in the log.
- The file belongs to this user, is complete, and was written by a version with the same fields.

Commands that delete or rewrite files (``vacuum``, ``compact``) and that check them (``verify``)
read the topics from the beginning.

In memory, too, the hundreds of thousands of entries of a table are packed into bytes. A decoded
:class:`ManifestFile` takes 1.8 kB, mostly for its Python objects. As MessagePack, with its path as
the key, it takes less than a third of that, and is decoded in two microseconds at each access.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import confluent_kafka as ck
import msgspec

from oncely.errors import ConfigError, DataLost, OlderFormat, SourceMismatch, Stopped
from oncely.kafka.client import ErrorState, KafkaAdmin
from oncely.kafka.topics import TopicLog, configured, identified, largest_batch
from oncely.kafka.transaction import Message, Transaction
from oncely.kinds.data_file import Scope, encode
from oncely.kinds.files.records import (
    ManifestFile,
    ManifestOwner,
    ScopeSchema,
    owner_key,
    path_key,
    read_manifest,
    read_owner,
    read_schema,
    schema_key,
)
from oncely.stores.objects.root import shown_url
from oncely.stores.objects.store import Store
from oncely.stores.topic.cluster import READER, Cluster, PipelineTopics
from oncely.stores.topic.compare_and_set import compare_and_set

_OWN_ONES = "give every pipeline a manifest topic, a schema topic and a root of its own"


@dataclass(frozen=True)
class ManifestClaim:
    """A manifest topic, claimed for a pipeline and its root.

    Attributes:
        cluster: the open clients.
        manifest: reads the topic.
        url: the URL of the root.
    """

    cluster: Cluster
    manifest: Manifest
    url: str

    @property
    def wanted(self) -> ManifestOwner:
        """The record of this pipeline and root."""
        return ManifestOwner(self.cluster.pipeline_topics.pipeline, shown_url(self.url))

    def check(self, *, moved: bool = False) -> None:
        """Refuse a topic that belongs to another pipeline or root; writes nothing.

        Args:
            moved: the user states that the root has moved (a reset): only the pipeline is compared.

        Raises:
            ConfigError: it does; the error names the owner.
            OlderFormat: it has entries, and no owner.
        """
        if self.manifest.first_owner() != self.wanted:
            self._compare(self.manifest.look(), moved=moved)

    def take(self, *, moved: bool = False) -> None:
        """Write the record if there is none, and check that it is the valid one.

        Raises:
            ConfigError: the topic belongs to another pipeline or root.
            OlderFormat: it has entries, and no owner.
            Unavailable: no answer.
        """
        if self.manifest.first_owner() == self.wanted:
            return
        contents = self.manifest.settled()
        self._compare(contents, moved=moved)
        if contents.owner != self.wanted:
            self._write(contents.owners)
            self._look_again()

    def _compare(self, contents: Contents, *, moved: bool) -> None:
        owner, wanted = contents.owner, self.wanted
        if owner is None:
            return
        if owner == wanted or (moved and owner.pipeline == wanted.pipeline):
            return
        topic = self.manifest.manifest_topic
        if owner.pipeline != wanted.pipeline:
            raise ConfigError(
                "sink.manifest_topic",
                f"{topic!r} belongs to pipeline {owner.pipeline!r} with the root {owner.root}:"
                " readers of each would find entries of files that they don't have",
                way_out=_OWN_ONES,
            )
        raise ConfigError(
            "sink.url",
            f"it is {wanted.root}, and the manifest topic {topic!r} names files below {owner.root}",
            way_out="restore sink.url. If all files were moved to the new root, `oncely "
            "offsets reset FILE --shift-by 0 --execute` confirms it",
        )

    def _write(self, owners: Iterable[ManifestOwner]) -> None:
        """Write the record, and remove those of runs that came second and died."""
        gone = [Message(None, owner_key(one.pipeline)) for one in owners]
        self._send([*gone, Message(encode(self.wanted), owner_key(self.wanted.pipeline))])

    def _look_again(self) -> None:
        """Read again: another run may have claimed the topic at the same moment, and be first."""
        contents = self.manifest.settled()
        if contents.owner not in (None, self.wanted):
            self._send([Message(None, owner_key(self.wanted.pipeline))])
            self._compare(contents, moved=False)

    def _send(self, messages: list[Message]) -> None:
        topic = self.manifest.manifest_topic
        sizes = largest_batch(self.cluster.admin, [topic])
        with self.cluster.plain(sizes.values()) as writer:
            writer.send(topic, messages)
            writer.finish()


_WORTH_KEEPING = 20_000  # number of messages after which a command keeps a snapshot


@dataclass(frozen=True)
class Contents:
    """The table at one point in time.

    Attributes:
        files: its files by path, in the order in which they were added.
        removed: the time of a file's removal, milliseconds since 1970 by the broker's clock (by the
            producer's, if the topic has ``message.timestamp.type=CreateTime``). Only while the
            topic still contains the tombstone, or the message that replaced the file.
        schemas: the newest schema of each scope.
        owners: the claims of the topic, in the order of the log; the first one is valid.
    """

    files: Mapping[str, ManifestFile] = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)
    schemas: Mapping[Scope, ScopeSchema] = field(default_factory=dict)
    owners: Sequence[ManifestOwner] = ()

    @property
    def owner(self) -> ManifestOwner | None:
        """The pipeline and the root to which the topic belongs."""
        return self.owners[0] if self.owners else None


class _OwnerFound(Exception):
    """Ends the reading of a log at the first owner."""

    def __init__(self, owner: ManifestOwner) -> None:
        super().__init__(owner.pipeline)
        self.owner = owner


class Manifest:
    """Reads both topics incrementally. Safe for several threads.

    Args:
        topics: brokers, group and connection. The group is not used: nothing is committed to it.
        manifest_topic, schema_topic: their names.
    """

    def __init__(self, topics: PipelineTopics, manifest_topic: str, schema_topic: str) -> None:
        self._pipeline_topics = topics
        self.manifest_topic, self.schema_topic = manifest_topic, schema_topic
        self._admin = KafkaAdmin(topics.brokers, topics.kafka, min(10.0, topics.timeout))
        self._lock = threading.RLock()
        self._consumer: Any = None
        self._files = LiveFiles()
        self._owners: dict[str, ManifestOwner] = {}
        self._taken = 0  # number of messages of the manifest
        self._removed: dict[str, int] = {}
        self._schemas: dict[bytes, ScopeSchema] = {}
        self._seen: set[str] = set()  # the ids of all schemas that were read
        self._named: set[str] = set()  # schema ids of files since the last reading
        self._manifest = self._log(
            manifest_topic, "the manifest topic", self._take_file, self._forget_files
        )
        self._schema = self._log(
            schema_topic, "the schema topic", self._take_schema, self._forget_schemas
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the next reading reconnects."""
        self._admin.close()
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None

    def look(self) -> Contents:
        """The table as visible to committed readers now.

        Raises:
            Unavailable: no answer.
            InvariantViolation: a topic contains foreign messages.
            OlderFormat: the manifest topic names files, and no owner.
        """
        return self._read(stable=False)

    def settled(self) -> Contents:
        """The table with all messages that are in the topics now; waits for open transactions.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
            InvariantViolation: a topic contains foreign messages.
            OlderFormat: the manifest topic names files, and no owner.
        """
        return self._read(stable=True)

    def look_cached(self, folder: Path) -> Contents:
        """Like :meth:`look`, but continues from a snapshot if there is one, and saves one.

        Args:
            folder: the folder of snapshots; see :mod:`oncely.kinds.files.manifest`.
        """
        ids = self.require()
        began = time.time()
        with self._lock:
            self._restore(load(folder, ids, self._retention()))
            contents = self.look()
            if self._taken >= _WORTH_KEEPING:
                self._keep(folder, ids, began)
            return contents

    def _retention(self) -> float:
        """Seconds for which both topics keep tombstones."""
        found = configured(self._admin, [self.manifest_topic, self.schema_topic])
        return min(int(one["delete.retention.ms"]) for one in found.values()) / 1000

    def _restore(self, found: TopicsSnapshot | None) -> None:
        if found is None or found.manifest.last is None or found.schema.last is None:
            return
        self._files, self._removed = LiveFiles(found.files), found.removed
        self._owners = {one.pipeline: one for one in found.owners}
        self._schemas = {schema_key(one.scope): one for one in found.schemas}
        self._seen = set(found.seen)
        self._manifest.resume(found.manifest.last)
        self._schema.resume(found.schema.last)

    def _keep(self, folder: Path, ids: tuple[str, str], began: float) -> None:
        manifest, schema = (
            ReadSoFar(id_, log.mark())
            for id_, log in zip(ids, (self._manifest, self._schema), strict=True)
        )
        save(
            folder,
            TopicsSnapshot(
                began,
                manifest,
                schema,
                self._files.packed,
                self._removed,
                list(self._schemas.values()),
                sorted(self._seen),
                FIELDS,
                list(self._owners.values()),
            ),
        )

    def schemas(self, *, stable: bool = True) -> Mapping[Scope, ScopeSchema]:
        """The newest schema of each scope; ``stable`` waits for open transactions.

        Raises the errors of :meth:`look`.
        """
        with self._lock:
            self._schema.read(self._connected, stable=stable)
            return {one.scope: one for one in self._schemas.values()}

    def first_owner(self) -> ManifestOwner | None:
        """The first owner record that is visible to committed readers; reads no further than that.

        It may have been removed since then; :meth:`look` reads the rest.

        Raises:
            Unavailable: no answer.
        """

        def take(message: Any) -> None:
            known = read_owner(message.key(), message.value())
            if known is not None and known[1] is not None:
                raise _OwnerFound(known[1])

        with self._lock:
            log = self._log(self.manifest_topic, "the manifest topic", take, lambda: None)
            try:
                log.read(self._connected, stable=False)
            except _OwnerFound as found:
                return found.owner
            return None

    def require(self) -> tuple[str, str]:
        """Refuse a pipeline that has never run.

        Returns:
            The ids of both topics.

        Raises:
            ConfigError: one of the topics does not exist.
        """
        ids = []
        for key, name in (("manifest_topic", self.manifest_topic),
                          ("schema_topic", self.schema_topic)):  # fmt: skip
            found = identified(self._admin, name)
            if found is None:
                raise ConfigError(
                    f"sink.{key}",
                    f"there is no topic {name!r}: nothing was published yet",
                    way_out="run the pipeline first, or correct the name",
                )
            ids.append(found[0])
        return ids[0], ids[1]

    def require_whole(self, topic_id: str) -> None:
        """Refuse a manifest that may have lost entries: files would be treated as orphans.

        Args:
            topic_id: the id of the manifest topic when the pipeline registered.

        Raises:
            SourceMismatch: it is another topic of the same name.
            DataLost: its log does not start at 0.
        """
        found = identified(self._admin, self.manifest_topic)
        if found is None or found[0] != topic_id:
            now = f"now it has {found[0]}" if found else "now it is gone"
            raise SourceMismatch(
                f"the manifest topic {self.manifest_topic!r} had id {topic_id} when the pipeline"
                f" wrote to it, {now}: files of the old topic would look like orphans",
                way_out="give the pipeline a new name, topics and root to begin again",
            )
        first, _ = self._manifest.bounds(stable=True)
        if first != 0:
            raise DataLost(
                f"the manifest topic {self.manifest_topic!r} begins at offset {first}, not at 0:"
                " entries were deleted, and their files would look like orphans",
                way_out="was its cleanup.policy changed, or were records deleted? The files are"
                " there still: publish their entries again, or begin again with another name",
            )

    # -- reading ---------------------------------------------------------------------------

    def _read(self, *, stable: bool) -> Contents:
        with self._lock:
            self._manifest.read(self._connected, stable=stable)
            self._schema.read(self._connected, stable=stable)
            if self._named - self._seen and not stable:
                self._schema.read(self._connected, stable=True)
            self._seen |= self._named  # read now, or compacted away long ago
            self._named.clear()
            schemas = {one.scope: one for one in self._schemas.values()}
            owners = tuple(self._owners.values())
            if self._files and not owners:
                what = f"the manifest topic {self.manifest_topic!r}, which has no owner,"
                raise OlderFormat(what)
            return Contents(self._files.copy(), dict(self._removed), schemas, owners)

    def _take_file(self, message: Any) -> None:
        self._taken += 1
        if (owner := read_owner(message.key(), message.value())) is not None:
            self._take_owner(*owner)
            return
        path, found = read_manifest(message.key(), message.value())
        _, at = message.timestamp()
        for gone in [path] if found is None else found.replaces:
            # The first message counts: the tombstone follows the message that replaces the file.
            if self._files.remove(gone) or gone not in self._removed:
                self._removed[gone] = at
        if found is not None:
            for one in (found, *(found.along or ())):
                self._put(one)

    def _put(self, file: ManifestFile) -> None:
        self._files.put(file)
        self._named.add(file.schema)
        self._removed.pop(file.path, None)

    def _take_owner(self, pipeline: str, owner: ManifestOwner | None) -> None:
        self._owners.pop(pipeline, None)  # a rewritten record moves to the end
        if owner is not None:
            self._owners[pipeline] = owner

    def _take_schema(self, message: Any) -> None:
        found = read_schema(message.key(), message.value())
        if found is None:
            self._schemas.pop(message.key() or b"", None)
            return
        self._schemas[schema_key(found.scope)] = found
        self._seen.add(found.id)

    def _forget_files(self) -> None:
        self._files, self._removed, self._named = LiveFiles(), {}, set()
        self._owners = {}

    def _forget_schemas(self) -> None:
        self._schemas, self._seen = {}, set()

    def _log(self, topic: str, what: str, take: Any, forget: Any) -> TopicLog:
        topics = self._pipeline_topics
        return TopicLog(topic, what, self._admin, brokers=topics.brokers, timeout=topics.timeout,
                        take=take, forget=forget)  # fmt: skip

    def _connected(self) -> Any:
        if self._consumer is None:
            topics = self._pipeline_topics
            self._consumer = topics.connect(
                ck.Consumer,
                topics.brokers,
                topics.kafka,
                ErrorState(topics.brokers),
                **{**READER, "group.id": topics.group},
            )
        return self._consumer


_FRAME = 1_000  # bytes of a batch and a record around key and value


@dataclass(frozen=True)
class Replacing:
    """Replaces named files of one pipeline.

    Attributes:
        cluster: open clients.
        manifest: reads the manifest, and names its topic.
        store: the root of the files.
        max_staging_age: seconds after which new files are too old to be named.
        largest: ``max.message.bytes`` of the manifest topic.
    """

    cluster: Cluster
    manifest: Manifest
    store: Store
    max_staging_age: float
    largest: int

    @contextmanager
    def compared(self, sizes: Collection[int] = ()) -> Iterator[tuple[Transaction, Contents]]:
        """An initialised transaction, and the files that are named until its commit.

        Args:
            sizes: ``max.message.bytes`` of other topics of the transaction.
        """
        identity = f"oncely/{self.cluster.pipeline_topics.pipeline}//compact"
        with compare_and_set(
            self.cluster, identity, self.manifest.settled, [self.largest, *sizes]
        ) as found:
            yield found

    def commit(
        self,
        transaction: Transaction,
        messages: Mapping[str, Sequence[Message]],
        since: datetime,
    ) -> None:
        """Send messages by topic, and commit.

        Args:
            since: the store's time before the first new file was written.

        Raises:
            Stopped: the new files are too old; nothing was published.
        """
        transaction.begin()
        for topic, own in messages.items():
            transaction.send(topic, own)
        transaction.flush(self.cluster.pipeline_topics.timeout)
        age = self.store.now() - since
        if age > timedelta(seconds=self.max_staging_age):
            raise Stopped(
                f"writing took {age}, longer than sink.max_staging_age: a vacuum may have "
                "removed the files, so nothing is published",
                way_out="run it again; or raise sink.max_staging_age",
            )
        transaction.commit()

    def together(self, made: Sequence[ManifestFile], gone: Sequence[str]) -> list[Message]:
        """Messages by which some files replace others at once.

        A reader may see only the first of them: it contains all. The others repeat it, each file
        under its own key, so that Kafka's compaction keeps exactly the files that are named.

        Raises:
            Stopped: the first message would be too large.
        """
        dead = [Message(None, path_key(path)) for path in gone]
        if not made:
            return dead
        first, *rest = made
        first = msgspec.structs.replace(first, replaces=list(gone))
        whole = msgspec.structs.replace(first, along=rest)
        if len(encode(whole)) > self.largest - _FRAME:
            raise Stopped(
                f"{len(made):,} files would replace {len(gone):,} at once, and the message that"
                f" names them exceeds max.message.bytes of {self.manifest.manifest_topic!r}"
                f" ({self.largest:,})",
                way_out="raise max.message.bytes of the topic",
            )
        again = [first] if rest else []
        named = [Message(encode(one), path_key(one.path)) for one in (whole, *rest)]
        return [*named, *dead, *(Message(encode(one), path_key(one.path)) for one in again)]


# -- snapshots ------------------------------------------------------------------------------

# The path is the first field, and the key. The last one, other files of the message, is not kept.
_KEPT = msgspec.structs.fields(ManifestFile)[1:-1]
_VALUES: Any = tuple[tuple(one.type for one in _KEPT)]  # type: ignore[misc]
FIELDS = [one.name for one in _KEPT]
"""The fields of a packed entry, in order."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_VALUES)


class LiveFiles(Mapping[str, ManifestFile]):
    """Files by path, in the order of insertion. Each access decodes a file again."""

    def __init__(self, packed: dict[str, bytes] | None = None) -> None:
        self._packed: dict[str, bytes] = {} if packed is None else packed

    def __getitem__(self, path: str) -> ManifestFile:
        return ManifestFile(path, *_decoder.decode(self._packed[path]))

    def __contains__(self, path: object) -> bool:
        return path in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, file: ManifestFile) -> None:
        """Add a file, or replace the one with its path."""
        self._packed[file.path] = _encoder.encode(msgspec.structs.astuple(file)[1:-1])

    def remove(self, path: str) -> bool:
        """Remove a file; True if it was present."""
        return self._packed.pop(path, None) is not None

    def copy(self) -> LiveFiles:
        """A copy that later changes do not affect; the packed entries are shared."""
        return LiveFiles(self._packed.copy())

    @property
    def packed(self) -> dict[str, bytes]:
        """The packed entries; see :data:`FIELDS`."""
        return self._packed


_logger = logging.getLogger("oncely.kinds.files")
_CHECKSUM = 32  # bytes


class ReadSoFar(msgspec.Struct, frozen=True):
    """The progress of reading one of the topics.

    Attributes:
        topic_id: Kafka's topic id.
        last: offset and digest of the last message; None if there was none.
    """

    topic_id: str
    last: tuple[int, bytes] | None


class TopicsSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of both topics.

    Attributes:
        taken: seconds since 1970 when the reading began.
        manifest, schema: the progress of reading.
        files: packed, by path.
        removed, schemas, seen: state of the manifest's reader.
        fields: the fields of a packed file.
        owners: the owner records, in the order of the log.
    """

    taken: float
    manifest: ReadSoFar
    schema: ReadSoFar
    files: dict[str, bytes]
    removed: dict[str, int]
    schemas: list[ScopeSchema]
    seen: list[str]
    fields: list[str]
    owners: list[ManifestOwner]


def load(folder: Path, ids: tuple[str, str], retention: float) -> TopicsSnapshot | None:
    """The snapshot of two topics; None if there is no valid one.

    Args:
        folder: the folder of snapshots.
        ids: the present ids of manifest and schema topic.
        retention: seconds for which the topics keep tombstones.
    """
    path = _path(folder, ids)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            checksum, data = file.read(_CHECKSUM), file.read()
        if hashlib.sha256(data).digest() != checksum:
            return None
        found = msgspec.msgpack.decode(data, type=TopicsSnapshot)
    except (OSError, msgspec.DecodeError):
        return None
    age = time.time() - found.taken
    fits = (found.manifest.topic_id, found.schema.topic_id) == ids and found.fields == FIELDS
    return found if fits and 0 <= age < retention / 2 else None


def save(folder: Path, snapshot: TopicsSnapshot) -> None:
    """Replace the snapshot of these topics. An unwritable cache is no error."""
    path = _path(folder, (snapshot.manifest.topic_id, snapshot.schema.topic_id))
    data = msgspec.msgpack.encode(snapshot)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=folder)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(made, path)
        except OSError:
            os.unlink(made)
            raise
    except OSError as error:
        _logger.debug("no snapshot of the manifest is kept: %s", error)


def _path(folder: Path, ids: tuple[str, str]) -> Path:
    return folder / f"{hashlib.sha256('/'.join(ids).encode()).hexdigest()[:32]}.msgpack"
