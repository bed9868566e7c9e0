"""Creates the offset store from ``[offsets]`` of the pipeline file."""

from __future__ import annotations

from oncely.config.offsets import (
    FileOffsets,
    KafkaOffsets,
    LedgerOffsets,
    OffsetsSettings,
    RedisOffsets,
    SqlOffsets,
    ZooKeeperOffsets,
)
from oncely.extras import require
from oncely.ledgers.stores.base import OffsetStore
from oncely.ledgers.stores.file import FileStore
from oncely.ledgers.stores.kafka import KafkaStore
from oncely.ledgers.stores.redis import RedisStore
from oncely.ledgers.stores.sql import SqlStore
from oncely.ledgers.stores.zookeeper import ZooKeeperStore
from oncely.sources.kafka import KafkaSource


def store_of(offsets: OffsetsSettings, name: str, source: KafkaSource) -> OffsetStore | None:
    """The store of the settings, not connected; None for the sink's own ledger.

    Args:
        offsets: ``[offsets]``.
        name: the name of the pipeline.
        source: its partitions, and the cluster for ``store = "kafka"``.

    Raises:
        ConfigError: the client's package is not installed (``offsets.store``).
    """
    match offsets:
        case LedgerOffsets():
            return None
        case KafkaOffsets():
            group = offsets.group_of(name)
            return KafkaStore(
                source.brokers, group, name, source.partitions, source.kafka, source.timeout
            )
        case FileOffsets():
            return FileStore(offsets.path, name)
        case SqlOffsets():
            return SqlStore(offsets.url.get_secret_value(), name, offsets.table)
        case RedisOffsets():
            require("redis", "offsets.store", "redis")
            return RedisStore(offsets.url.get_secret_value(), name)
        case ZooKeeperOffsets():
            require("zookeeper", "offsets.store", "zookeeper")
            return ZooKeeperStore(offsets.hosts, name, offsets.path)
