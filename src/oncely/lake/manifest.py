"""The manifest and the schemas as the two topics tell them.

A reader sees a prefix of the manifest topic. That each prefix is a table needs a word: several
producers may write at the same time (a run publishes, a compaction rewrites), so that a prefix may
hold the first half of a committed transaction, whose other half stands behind the first record of
a transaction that is still open. For what a run publishes this means a batch that is not complete
yet. For a compaction it could mean rows twice, or none. So the message of a file that was
rewritten names the paths it ``replaces``: whoever sees the new file knows that the old ones are
out, by one message, and their tombstones are left for Kafka's own compaction to act on.

Schemas are read after the manifest. A transaction's marker reaches one topic before the other: a
file may be visible whose schema is not, although it is in the schema topic already. When a file
names a schema that was never seen, that topic is read again, settled, which waits for the marker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import confluent_kafka as ck

from oncely.clients.files.store import Store
from oncely.clients.kafka.client import ErrorState, KafkaAdmin
from oncely.clients.kafka.compacted_topic import TopicLog
from oncely.clients.kafka.topics import configured, identified
from oncely.errors import ConfigError, DataLost, SourceMismatch
from oncely.lake import snapshot
from oncely.lake.live_files import FIELDS, LiveFiles
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
from oncely.ledgers.topic.cluster import READER, PipelineTopics

_logger = logging.getLogger("oncely.sinks.files")
_SAMPLE = 3  # files of another pipeline that are looked for below the root
_WORTH_KEEPING = 20_000  # messages that a command had to read


@dataclass(frozen=True)
class Contents:
    """The table at one moment.

    Attributes:
        files: that are part of it, by path, in the order in which they came in.
        removed: when a file was taken out, milliseconds since 1970 by the broker's clock (by the
            producer's, where the topic has ``message.timestamp.type=CreateTime``). Only while the
            topic still holds the tombstone, or the message that replaced the file.
        schemas: the newest of each scope.
        others: entries of other pipelines, whose files are below another root.
        owners: who has claimed the topic, in the order of the log; the first one counts.
    """

    files: Mapping[str, ManifestFile] = field(default_factory=dict)
    removed: Mapping[str, int] = field(default_factory=dict)
    schemas: Mapping[Scope, ScopeSchema] = field(default_factory=dict)
    others: Mapping[str, ManifestFile] = field(default_factory=dict)
    owners: Sequence[ManifestOwner] = ()

    @property
    def owner(self) -> ManifestOwner | None:
        """The pipeline and the root that the topic belongs to."""
        return self.owners[0] if self.owners else None


class _OwnerFound(Exception):
    """Ends the reading of a log."""

    def __init__(self, owner: ManifestOwner) -> None:
        super().__init__(owner.pipeline)
        self.owner = owner


class Manifest:
    """Reads both topics; what was read once is kept. Safe for several threads.

    Args:
        place: brokers, group and connection. The group is only named: nothing is committed to it.
        manifest_topic, schema_topic: their names.
        store: the root. Entries of other pipelines than the place's own count only if their files
            are there: earlier versions have let two roots write to one manifest. Without it all
            entries count.
    """

    def __init__(
        self,
        place: PipelineTopics,
        manifest_topic: str,
        schema_topic: str,
        store: Store | None = None,
    ) -> None:
        self._place, self._store = place, store
        self.manifest_topic, self.schema_topic = manifest_topic, schema_topic
        self._asker = KafkaAdmin(place.brokers, place.kafka, min(10.0, place.timeout))
        self._lock = threading.RLock()
        self._consumer: Any = None
        self._files = LiveFiles()
        self._others: dict[str, LiveFiles] = {}  # by pipeline, where there is a store
        self._owners: dict[str, ManifestOwner] = {}
        self._told: set[str] = set()  # other pipelines that the log has been told of
        self._taken = 0  # messages of the manifest
        self._removed: dict[str, int] = {}
        self._schemas: dict[bytes, ScopeSchema] = {}
        self._seen: set[str] = set()  # the ids of all schemas that were ever read
        self._named: set[str] = set()  # ids that files have named since the last reading
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
        """Close the connection; the next reading opens one again."""
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None

    def look(self) -> Contents:
        """The table as committed readers see it now.

        Raises:
            Unavailable: no answer.
            InvariantViolation: a topic holds what is not ours.
        """
        return self._read(stable=False)

    def settled(self) -> Contents:
        """The table with all that was in the topics when asked; waits for open transactions.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
            InvariantViolation: a topic holds what is not ours.
        """
        return self._read(stable=True)

    def look_cached(self, folder: Path) -> Contents:
        """As :meth:`look`, reading on from a snapshot where there is one, and keeping one.

        Args:
            folder: where snapshots are kept; see :mod:`oncely.lake.snapshot`.
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
        found = configured(self._asker, [self.manifest_topic, self.schema_topic])
        return min(int(one["delete.retention.ms"]) for one in found.values()) / 1000

    def _restore(self, found: snapshot.Snapshot | None) -> None:
        if found is None or found.manifest.last is None or found.schema.last is None:
            return
        if found.pipeline != self._place.pipeline:
            return
        self._files, self._removed = LiveFiles(found.files), found.removed
        self._others = {name: LiveFiles(own) for name, own in found.others.items()}
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
                self._place.pipeline,
                {name: own.packed for name, own in self._others.items()},
                list(self._owners.values()),
            ),
        )

    def schemas(self, *, stable: bool = True) -> Mapping[Scope, ScopeSchema]:
        """The newest schema of each scope; ``stable`` waits for open transactions.

        Raises as above.
        """
        with self._lock:
            self._schema.read(self._connected, stable=stable)
            return {one.scope: one for one in self._schemas.values()}

    def first_owner(self) -> ManifestOwner | None:
        """The first record of an owner that committed readers see; reads no further than that.

        It may have been taken back since: :meth:`look` knows.

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
            ConfigError: one of the topics is not there.
        """
        ids = []
        for key, name in (("manifest_topic", self.manifest_topic),
                          ("schema_topic", self.schema_topic)):  # fmt: skip
            found = identified(self._asker, name)
            if found is None:
                raise ConfigError(
                    f"sink.{key}",
                    f"there is no topic {name!r}: nothing was ever published",
                    way_out="run the pipeline first, or mend the name",
                )
            ids.append(found[0])
        return ids[0], ids[1]

    def require_whole(self, topic_id: str) -> None:
        """Refuse a manifest that may have lost entries: files would be taken for orphans.

        Args:
            topic_id: that the manifest topic had when the pipeline registered.

        Raises:
            SourceMismatch: it is another topic by the same name.
            DataLost: its log does not start at 0, where it was created.
        """
        found = identified(self._asker, self.manifest_topic)
        if found is None or found[0] != topic_id:
            now = f"now it has {found[0]}" if found else "now it is gone"
            raise SourceMismatch(
                f"the manifest topic {self.manifest_topic!r} had id {topic_id} when the pipeline"
                f" wrote to it, {now}: files of the old one would look like orphans",
                way_out="give the pipeline a new name, topics and root to begin anew",
            )
        first, _ = self._manifest.bounds(stable=True)
        if first != 0:
            raise DataLost(
                f"the manifest topic {self.manifest_topic!r} begins at offset {first}, not at 0:"
                " entries were deleted, and their files would look like orphans",
                way_out="was its cleanup.policy changed, or were records deleted? The files are"
                " there still: publish their entries again, or begin anew with another name",
            )

    # -- reading ---------------------------------------------------------------------------

    def _read(self, *, stable: bool) -> Contents:
        with self._lock:
            self._manifest.read(self._connected, stable=stable)
            self._schema.read(self._connected, stable=stable)
            if self._named - self._seen and not stable:
                self._schema.read(self._connected, stable=True)
            self._seen |= self._named  # seen now, or compacted away long ago
            self._named.clear()
            schemas = {one.scope: one for one in self._schemas.values()}
            ours, others = self._divided()
            owners = tuple(self._owners.values())
            return Contents(ours, dict(self._removed), schemas, others, owners)

    def _divided(self) -> tuple[LiveFiles, LiveFiles]:
        """The entries whose files are below the root, and those of other pipelines."""
        ours, others = self._files.copy(), LiveFiles()
        for pipeline, files in self._others.items():
            if not files or self._below_root(files):
                ours.packed.update(files.packed)
                continue
            others.packed.update(files.packed)
            if pipeline not in self._told:
                self._told.add(pipeline)
                _logger.warning(
                    "the manifest topic %r has %s entries of pipeline %r with another root:"
                    " passed over", self.manifest_topic, len(files), pipeline,
                )  # fmt: skip
        return ours, others

    def _below_root(self, files: LiveFiles) -> bool:
        """Whether files of another pipeline are in the store: names are unique."""
        return self._store is None or any(map(self._store.exists, list(files)[-_SAMPLE:]))

    def _take_file(self, message: Any) -> None:
        self._taken += 1
        if (owner := read_owner(message.key(), message.value())) is not None:
            self._take_owner(*owner)
            return
        path, found = read_manifest(message.key(), message.value())
        _, at = message.timestamp()
        for gone in [path] if found is None else found.replaces:
            # The first word on it counts: the tombstone follows the message that replaces.
            if self._remove(gone) or gone not in self._removed:
                self._removed[gone] = at
        if found is not None:
            if self._store is None or found.pipeline == self._place.pipeline:
                self._files.put(found)
            else:
                self._others.setdefault(found.pipeline, LiveFiles()).put(found)
            self._named.add(found.schema)
            self._removed.pop(path, None)

    def _remove(self, path: str) -> bool:
        return any(one.remove(path) for one in (self._files, *self._others.values()))

    def _take_owner(self, pipeline: str, owner: ManifestOwner | None) -> None:
        self._owners.pop(pipeline, None)  # written again it stands where it was written last
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
        self._others, self._owners = {}, {}

    def _forget_schemas(self) -> None:
        self._schemas, self._seen = {}, set()

    def _log(self, topic: str, what: str, take: Any, forget: Any) -> TopicLog:
        place = self._place
        return TopicLog(topic, what, self._asker, brokers=place.brokers, timeout=place.timeout,
                        take=take, forget=forget)  # fmt: skip

    def _connected(self) -> Any:
        if self._consumer is None:
            place = self._place
            self._consumer = place.connect(
                ck.Consumer,
                place.brokers,
                place.kafka,
                ErrorState(place.brokers),
                **{**READER, "group.id": place.group},
            )
        return self._consumer
