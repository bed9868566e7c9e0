"""The topics of the manifest, schemas of scopes, and the marker of a root.

Each topic has one partition, because the manifest's order is significant: a file is added, and
removed again when it is compacted or deleted. Both are compacted by path and never deleted by age,
because a file without an entry is an orphan, and orphans are deleted.

Two files mark a root: its owner, a small file that contains the id of the manifest topic, and a
notice for people who list the folder. Files that the manifest does not list are orphans, and
orphans are deleted. Two tables below one root would each treat the other's files as orphans. So a
root belongs to one manifest topic: a run claims it when it opens, and ``vacuum`` checks it.

pyarrow offers no compare-and-set of object stores. Two first runs that claim a root at the same
moment may both write; the second read below lets the loser detect it, unless its read comes before
the other's write. Then the loser detects it at its next start, and its ``vacuum`` refuses: files of
both are kept until the user moves one of the tables.

The notice is a text in the root. It is written when the root is claimed, and again by the next run
if it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import pyarrow as pa

from oncely.core.batch import StagedRowsGone
from oncely.decode.avro_schema import arrow_schema_of, avro_schema_of, schema_id
from oncely.decode.merging import CAPS, NO_CAPS, CannotMerge, Caps, merge
from oncely.errors import ConfigError, InvariantViolation
from oncely.kafka.client import KafkaAdmin
from oncely.kafka.topics import SEGMENTS, find_compacted, missing
from oncely.kinds.data_file import Receipt, Scope
from oncely.kinds.files.records import ScopeSchema
from oncely.stores.objects.store import NoSuchFile, Store

_DAY = 86_400_000  # milliseconds

SETTINGS: Mapping[str, str] = {
    # The tombstone of a removal must not disappear before a reader that began earlier gets there,
    # and `vacuum` reads from tombstones which files readers may still use (KIP-534 counts from the
    # first cleaning on).
    "delete.retention.ms": str(7 * _DAY),
    **SEGMENTS,
    # The time of a file's removal is measured by one clock, the broker's.
    "message.timestamp.type": "LogAppendTime",
}
"""Settings of created topics, beside one partition and their cleanup policy. Existing topics are
required to have those two only."""


class TopicIds(NamedTuple):
    """Kafka's ids of the two topics (KIP-516); a recreated topic has another id."""

    manifest: str
    schema: str


def check_topics(
    admin: KafkaAdmin, manifest_topic: str, schema_topic: str, *, create: bool
) -> None:
    """Refuse topics that :func:`require_topics` would refuse, without creating any.

    Raises:
        ConfigError, Unavailable: see :func:`require_topics`.
    """
    _two(manifest_topic, schema_topic)
    absent = missing(admin, [manifest_topic, schema_topic]) if create else []
    for key, name in (("manifest_topic", manifest_topic), ("schema_topic", schema_topic)):
        if name not in absent:
            _require(admin, f"sink.{key}", name, create=False)


def require_topics(
    admin: KafkaAdmin, manifest_topic: str, schema_topic: str, *, create: bool
) -> TopicIds:
    """Check both topics, or create them.

    Args:
        admin: a client of the source's cluster.
        manifest_topic, schema_topic: their names.
        create: create missing topics, with the cluster's default replication.

    Raises:
        ConfigError: a topic is missing and ``create`` is false, or it has several partitions, or is
            not compacted, or deleted by age; names ``sink.manifest_topic`` or
            ``sink.schema_topic``.
        Unavailable: no answer.
    """
    _two(manifest_topic, schema_topic)
    return TopicIds(
        _require(admin, "sink.manifest_topic", manifest_topic, create=create),
        _require(admin, "sink.schema_topic", schema_topic, create=create),
    )


def _two(manifest_topic: str, schema_topic: str) -> None:
    if manifest_topic == schema_topic:
        raise ConfigError(
            "sink.schema_topic",
            f"{schema_topic!r} is the manifest topic too; each needs one of its own",
            way_out=f"name another one, such as {manifest_topic + '.schema'!r}",
        )


def _require(admin: KafkaAdmin, key: str, name: str, *, create: bool) -> str:
    found = find_compacted(admin, name, config=SETTINGS if create else None)
    if found is None:
        raise ConfigError(
            key,
            f"topic {name!r} is missing, and sink.create is false",
            way_out="create it with one partition and cleanup.policy=compact",
        )
    if found.partitions != 1:
        raise ConfigError(
            key,
            f"topic {name!r} has {found.partitions} partitions; it needs one: several keep no "
            "common order, and a transaction does not become visible at once",
            way_out="name another topic; partitions can't be taken away",
        )
    if not found.is_compacted:
        raise ConfigError(
            key,
            f"topic {name!r} has cleanup.policy {found.policy!r}; it needs 'compact': an entry"
            " that is deleted by age turns its file into an orphan",
            way_out=f"kafka-configs --alter --entity-type topics --entity-name {name}"
            " --add-config cleanup.policy=compact, if nothing was deleted yet; or name another"
            " topic",
        )
    return found.topic_id


@dataclass
class ScopeSchemas:
    """The schema to which all files of a scope resolve; kept by the driver.

    Attributes:
        known: schemas, those of staged files among them.
        published: the ids of schemas that are in the schema topic.
    """

    known: dict[Scope, pa.Schema] = field(default_factory=dict)
    published: dict[Scope, str] = field(default_factory=dict)

    def agree(self, receipt: Receipt) -> bool:
        """Merge the schemas of a task.

        Returns:
            False if a schema contradicts a known one: then none is merged, since the task's records
                will be checked again, and a rejected record must not affect the schema.
        """
        found = {id_: arrow_schema_of(avro) for id_, avro in receipt.schemas.items()}
        try:
            self.known |= {
                scope: _merged(self.known.get(scope), found[id_], CAPS)
                for scope, id_ in receipt.grown
            }
        except CannotMerge:
            return False
        return True

    def take(self, schemas: Mapping[Scope, ScopeSchema]) -> None:
        """Merge the present schemas of the schema topic.

        Raises:
            StagedRowsGone: another writer has published a schema that contradicts our files.
        """
        for scope, schema in schemas.items():
            if self.published.get(scope) == schema.id:
                continue
            try:
                self.known[scope] = _merged(arrow_schema_of(schema.avro), self.known.get(scope))
            except CannotMerge as error:
                self.known[scope] = arrow_schema_of(schema.avro)
                raise StagedRowsGone(
                    f"the schema of {scope} was extended meanwhile: {error}; the batch is repeated"
                ) from None
            self.published[scope] = schema.id

    def record(self, scope: Scope) -> ScopeSchema:
        """A scope's schema, for the schema topic."""
        avro = avro_schema_of(self.known[scope])
        return ScopeSchema(schema_id(avro), scope, avro)


def _merged(known: pa.Schema | None, found: pa.Schema | None, caps: Caps = NO_CAPS) -> pa.Schema:
    if known is None or found is None:
        return found if known is None else known
    return merge(known, found, caps)


PATH = "_oncely/owner.json"
"""The path below the root. An underscore hides it from tools that read directories."""

NOTICE = "_READ_THE_MANIFEST.txt"
"""The path of the notice below the root; the underscore has the same purpose."""

_NOTICE = """\
This folder contains the files of a table, and files that are not part of it: files of attempts that
were never committed, and files that a compaction or a repair has replaced. A reader that lists the
folder reads rows twice, and rows that were never committed. Partition folders do not change that.

The list of the table's files is the Kafka topic {manifest_topic}, the manifest
of pipeline {pipeline}. With the pipeline's file:

  oncely files paths FILE     the files, as JSON lines for DuckDB, polars, Spark and others
  oncely files read FILE      the rows, compared with their checksums
  oncely files verify FILE    compares each file with the manifest
  oncely files vacuum FILE    removes files that are not part of the table

Delete nothing here by hand: `oncely files vacuum` knows which files a run may still publish.
"""


class Owner(msgspec.Struct, frozen=True):
    """The content of the file.

    Attributes:
        pipeline: its name, for people.
        manifest_topic: its name, for people.
        topic_id: its id, which distinguishes it from topics of the same name, also on other
            clusters.
    """

    pipeline: str
    manifest_topic: str
    topic_id: str


def claim(store: Store, owner: Owner) -> None:
    """Claim the root for this manifest, or check that it is its owner; write a missing notice.

    Raises:
        ConfigError: it belongs to another manifest.
    """
    if owner_of(store) is None:
        store.write(PATH, msgspec.json.encode(owner))
        store.durable()
    require(store, owner.topic_id)
    if not store.exists(NOTICE):
        text = _NOTICE.format(manifest_topic=owner.manifest_topic, pipeline=owner.pipeline)
        # Another run of the pipeline may write it at the same moment.
        with suppress(InvariantViolation):
            store.write(NOTICE, text.encode())


def require(store: Store, topic_id: str) -> None:
    """Refuse a root that does not belong to this manifest.

    Raises:
        ConfigError: it belongs to another manifest, or has no known owner.
    """
    found = owner_of(store)
    if found is None:
        raise ConfigError(
            "sink.url",
            f"{store!r} has no {PATH}: it is not known whose files are below it",
            way_out="run the pipeline once: it claims the root when it starts",
        )
    if found.topic_id != topic_id:
        raise ConfigError(
            "sink.url",
            f"{store!r} belongs to pipeline {found.pipeline!r} with manifest topic"
            f" {found.manifest_topic!r} of id {found.topic_id}, and this one has id {topic_id}:"
            " each would treat the other's files as orphans",
            way_out="give every pipeline a root of its own",
        )


def owner_of(store: Store) -> Owner | None:
    """The owner of the root, or None.

    Raises:
        ConfigError: the file exists and is invalid.
    """
    try:
        data = store.read(PATH)
    except NoSuchFile:
        return None
    try:
        return msgspec.json.decode(data, type=Owner)
    except msgspec.DecodeError as error:
        raise ConfigError(
            "sink.url", f"{store!r}: {PATH} is not ours: {error}", way_out="name another root"
        ) from None
