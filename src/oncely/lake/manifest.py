"""The manifest and the schemas, as stored in two topics.

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
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import confluent_kafka as ck

from oncely.clients.kafka.client import ErrorState, KafkaAdmin
from oncely.clients.kafka.compacted_topic import TopicLog
from oncely.clients.kafka.topics import configured, identified
from oncely.errors import ConfigError, DataLost, OlderFormat, SourceMismatch
from oncely.lake import snapshot
from oncely.lake.records import (
    ManifestFile,
    ManifestOwner,
    Scope,
    ScopeSchema,
    read_manifest,
    read_owner,
    read_schema,
    schema_key,
)
from oncely.lake.snapshot import FIELDS, LiveFiles
from oncely.ledgers.topic.cluster import READER, PipelineTopics

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
            folder: the folder of snapshots; see :mod:`oncely.lake.snapshot`.
        """
        ids = self.require()
        began = time.time()
        with self._lock:
            self._restore(snapshot.load(folder, ids, self._retention()))
            contents = self.look()
            if self._taken >= _WORTH_KEEPING:
                self._keep(folder, ids, began)
            return contents

    def _retention(self) -> float:
        """Seconds for which both topics keep tombstones."""
        found = configured(self._admin, [self.manifest_topic, self.schema_topic])
        return min(int(one["delete.retention.ms"]) for one in found.values()) / 1000

    def _restore(self, found: snapshot.Snapshot | None) -> None:
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
            snapshot.ReadSoFar(id_, log.mark())
            for id_, log in zip(ids, (self._manifest, self._schema), strict=True)
        )
        snapshot.save(
            folder,
            snapshot.Snapshot(
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
