"""From what the pipeline file says under ``offsets`` to the store."""

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
from oncely.sources.kafka import KafkaSource
from oncely.stores.base import OffsetStore
from oncely.stores.file import FileStore
from oncely.stores.kafka import KafkaStore
from oncely.stores.redis import RedisStore, import_redis
from oncely.stores.sql import SqlStore
from oncely.stores.zookeeper import ZooKeeperStore, import_kazoo


def store_of(offsets: OffsetsSettings, name: str, source: KafkaSource) -> OffsetStore | None:
    """The store that the settings describe, not connected; None for the sink's own ledger.

    Args:
        offsets: ``[offsets]``.
        name: the pipeline's.
        source: whose partitions, and whose cluster for ``store = "kafka"``.

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
            import_redis()
            return RedisStore(offsets.url.get_secret_value(), name)
        case ZooKeeperOffsets():
            import_kazoo()
            return ZooKeeperStore(offsets.hosts, name, offsets.path)
