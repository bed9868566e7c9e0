"""The manifest and the schema topic: made with one partition, compacted, and checked to be so.

One partition, because the manifest's order is part of its meaning: a file comes in, and goes
out again when it is compacted or deleted. Compacted by path and never deleted by age, because a
file whose entry is gone is an orphan, and orphans are deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from oncely.clients.kafka.client import KafkaAdmin
from oncely.clients.kafka.topics import SEGMENTS, find_compacted, missing
from oncely.errors import ConfigError

_DAY = 86_400_000  # milliseconds

SETTINGS: Mapping[str, str] = {
    # A reader that began before a removal must not find the tombstone gone before it gets there,
    # and `vacuum` learns from tombstones which files readers may still hold (KIP-534 counts from
    # the first cleaning on).
    "delete.retention.ms": str(7 * _DAY),
    **SEGMENTS,
    # When a file was removed is told by one clock, the broker's.
    "message.timestamp.type": "LogAppendTime",
}
"""What the topics are created with, beside one partition and their cleanup policy. Only those
two are demanded of a topic that is there already."""


class TopicIds(NamedTuple):
    """Kafka's ids of the two topics (KIP-516); a topic that is made again gets another one."""

    manifest: str
    schema: str


def check_topics(
    asker: KafkaAdmin, manifest_topic: str, schema_topic: str, *, create: bool
) -> None:
    """Refuse topics that :func:`require_topics` would refuse; nothing is created.

    Raises:
        ConfigError, Unavailable: as there.
    """
    _two(manifest_topic, schema_topic)
    absent = missing(asker, [manifest_topic, schema_topic]) if create else []
    for key, name in (("manifest_topic", manifest_topic), ("schema_topic", schema_topic)):
        if name not in absent:
            _require(asker, f"sink.{key}", name, create=False)


def require_topics(
    asker: KafkaAdmin, manifest_topic: str, schema_topic: str, *, create: bool
) -> TopicIds:
    """Find both topics, or create them.

    Args:
        asker: of the cluster that the source is on.
        manifest_topic, schema_topic: their names.
        create: create what is missing, with the cluster's own replication.

    Raises:
        ConfigError: naming ``sink.manifest_topic`` or ``sink.schema_topic``: one is missing with
            ``create`` false, or has several partitions, or is not compacted, or deleted by age.
        Unavailable: no answer.
    """
    _two(manifest_topic, schema_topic)
    return TopicIds(
        _require(asker, "sink.manifest_topic", manifest_topic, create=create),
        _require(asker, "sink.schema_topic", schema_topic, create=create),
    )


def _two(manifest_topic: str, schema_topic: str) -> None:
    if manifest_topic == schema_topic:
        raise ConfigError(
            "sink.schema_topic",
            f"{schema_topic!r} is the manifest topic too; each needs one of its own",
            way_out=f"name another one, such as {manifest_topic + '.schema'!r}",
        )


def _require(asker: KafkaAdmin, key: str, name: str, *, create: bool) -> str:
    found = find_compacted(asker, name, config=SETTINGS if create else None)
    if found is None:
        raise ConfigError(
            key,
            f"topic {name!r} is missing, and sink.create is false",
            way_out="create it with one partition and cleanup.policy=compact",
        )
    if found.partitions != 1:
        raise ConfigError(
            key,
            f"topic {name!r} has {found.partitions} partitions; it needs one: over several no"
            " order is kept, and a transaction does not become visible at once",
            way_out="name another topic; partitions can't be taken away",
        )
    if not found.fits:
        raise ConfigError(
            key,
            f"topic {name!r} has cleanup.policy {found.policy!r}; it needs 'compact': an entry"
            " that is deleted by age makes an orphan of its file",
            way_out=f"kafka-configs --alter --entity-type topics --entity-name {name}"
            " --add-config cleanup.policy=compact, if nothing was deleted yet; or name another"
            " topic",
        )
    return found.topic_id
