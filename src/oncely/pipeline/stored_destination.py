"""A destination whose positions are in an offset store."""

from __future__ import annotations

import logging
from typing import NoReturn

import pyarrow as pa

from oncely.config import PipelineSettings
from oncely.config.source import (
    FileOffsets,
    KafkaOffsets,
    RedisOffsets,
    SqlOffsets,
    ZooKeeperOffsets,
)
from oncely.core.change import RewriteKind
from oncely.errors import ConfigError, OncelyError
from oncely.extras import require
from oncely.kafka.source import KafkaSource
from oncely.kinds.destination import (
    LOST_WAY_OUT,
    Destination,
    Inspection,
    LedgerState,
    SinkPlan,
)
from oncely.kinds.kind import kind_of
from oncely.stores.offsets.base import OffsetStore

log = logging.getLogger(__name__)


def lost(store: OffsetStore, evidence: str) -> str:
    """The text about an empty store of a pipeline that has run before."""
    return f"{store.where} is empty, and {evidence}: this is no first start"


class StoredDestination:
    """A destination with its positions in an offset store.

    Args:
        settings: the pipeline's.
        inner: the destination of the records, which does alone what concerns no position.
        store: the store of the positions.
        source: the topics.
        group: the group to which positions are mirrored; None if they are not.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        inner: Destination,
        store: OffsetStore,
        source: KafkaSource,
        group: str | None,
    ) -> None:
        self.settings, self.inner, self.store = settings, inner, store
        self.source, self.group = source, group
        self.row_schema, self.sink, self.form = inner.row_schema, inner.sink, inner.form
        self.rejects, self.discarding, self.wrote = inner.rejects, inner.discarding, inner.wrote
        self.late_delete, self.replaying = inner.late_delete, inner.replaying

    def look(self) -> LedgerState:
        """Read the positions from the store."""
        known, stored = self.inner.look(), self.store.load()
        return LedgerState(
            max((one.epoch for one in stored.values()), default=0),
            next((one.cluster_id for one in stored.values()), None),
            {tp: one.position for tp, one in stored.items()},
            {tp.topic: one.topic_id for tp, one in stored.items()},
            known.rejects,
            lost="" if stored else self._lost(known),
            time_limits=known.time_limits,
        )

    def _lost(self, known: LedgerState) -> str:
        """Why the empty store is not that of a first start.

        A run mirrors its positions to a group as soon as it has saved them. Other evidence is
        needed where the group has expired, or there is none.
        """
        found = "the sink's own ledger has positions" if known.positions else self.inner.wrote()
        if not found and self.group is not None:
            try:
                found = f"group {self.group} has offsets" * bool(self.source.mirrored(self.group))
            except OncelyError as error:  # no permission: it was not mirrored, either
                log.warning("group %s can't be read: %s", self.group, error.message)
        return lost(self.store, found) if found else ""

    def check(self, schema: pa.Schema) -> None:
        """Refuse a destination that does not accept the rows, and a store that does not answer, or
        was lost."""
        self.inner.check(schema)
        if lost := self.look().lost:
            raise ConfigError("offsets.store", lost, way_out=LOST_WAY_OUT)

    def check_replay(self) -> None:
        """Refuse a replay if old records would replace newer ones, or without a ledger for its
        position."""
        if not kind_of(self.settings.sink.kind).replays_beside_store:
            raise ConfigError(
                "offsets.store",
                "a replay keeps its position in the sink's ledger, and this pipeline has none",
                way_out="read the rejects' topic with a pipeline of its own",
            )
        self.inner.check_replay()

    def check_rewrite(self, schema: pa.Schema, kind: RewriteKind) -> NoReturn:
        """Refused: positions that do not move with the rows say nothing about them."""
        del schema, kind
        raise ConfigError(
            "offsets.store",
            "the positions do not move in the transaction of the rows: which records are committed"
            " is not certain",
            way_out='repair with offsets.store = "ledger", while the pipeline is stopped',
        )

    def rewriting(self, schema: pa.Schema, kind: RewriteKind) -> NoReturn:
        """Refused."""
        self.check_rewrite(schema, kind)

    def plan(self, schema: pa.Schema, inspection: Inspection) -> SinkPlan:
        """Inspect the destination and the store."""
        with inspection.about("offsets.store"):
            self.store.load()
            if warning := self.store.warning():
                inspection.notes.append(f"{self.store.where}: {warning}")
        return self.inner.plan(schema, inspection)


# -- the store -----------------------------------------------------------------------------


def store_of(
    offsets: KafkaOffsets | FileOffsets | SqlOffsets | RedisOffsets | ZooKeeperOffsets,
    name: str,
    source: KafkaSource,
) -> OffsetStore:
    """The store of the settings, not connected.

    The module of the chosen store alone is imported.

    Args:
        offsets: ``[offsets]``.
        name: the name of the pipeline.
        source: its partitions, and the cluster for ``store = "kafka"``.

    Raises:
        ConfigError: the client's package is not installed (``offsets.store``).
    """
    match offsets:
        case KafkaOffsets():
            from oncely.stores.offsets.kafka import KafkaStore

            group = offsets.group_of(name)
            return KafkaStore(
                source.brokers, group, name, source.partitions, source.kafka, source.timeout
            )
        case FileOffsets():
            from oncely.stores.offsets.file import FileStore

            return FileStore(offsets.path, name)
        case SqlOffsets():
            from oncely.stores.offsets.sql import SqlStore

            return SqlStore(offsets.url.get_secret_value(), name, offsets.table)
        case RedisOffsets():
            from oncely.stores.offsets.redis import RedisStore

            require("redis", "offsets.store", "redis")
            return RedisStore(offsets.url.get_secret_value(), name)
        case ZooKeeperOffsets():
            from oncely.stores.offsets.zookeeper import ZooKeeperStore

            require("zookeeper", "offsets.store", "zookeeper")
            return ZooKeeperStore(offsets.hosts, name, offsets.path)
