"""The manifest and the schema topic: created with one partition and compacted, and checked.

One partition, because the manifest's order is significant: a file is added, and removed again when
it is compacted or deleted. Compacted by path and never deleted by age, because a file without an
entry is an orphan, and orphans are deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from oncely.errors import ConfigError
from oncely.kafka.client import KafkaAdmin
from oncely.kafka.topics import SEGMENTS, find_compacted, missing

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
