"""A destination whose positions live in an offset store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from oncely.config import PipelineSettings
from oncely.core.batch import Reject
from oncely.errors import ConfigError
from oncely.ledgers.stores.base import OffsetStore
from oncely.pipeline.destination import Destination, Known, Replaying, SinkPlan
from oncely.pipeline.problems import Problems
from oncely.runtimes.spark.probe import Slots
from oncely.sinks.base import Sink


@dataclass(frozen=True)
class StoredDestination:
    """A destination with its positions in a store elsewhere.

    Attributes:
        settings: the pipeline's.
        inner: where records go.
        store: where positions live.
    """

    settings: PipelineSettings
    inner: Destination
    store: OffsetStore

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns that reach the sink."""
        return self.inner.row_schema(schema)

    def sink(self, schema: pa.Schema) -> Sink:
        """Where records go."""
        return self.inner.sink(schema)

    @property
    def bare_sink(self) -> Sink:
        """The sink for work that needs no columns."""
        return self.inner.bare_sink

    def look(self) -> Known:
        """Read positions where they live."""
        known, stored = self.inner.look(), self.store.load()
        return Known(
            max((one.epoch for one in stored.values()), default=0),
            next((one.cluster_id for one in stored.values()), None),
            {tp: one.position for tp, one in stored.items()},
            {tp.topic: one.topic_id for tp, one in stored.items()},
            known.rejects,
        )

    def check(self, schema: pa.Schema) -> None:
        """Refuse a destination that doesn't take the rows, and a store that does not answer."""
        self.inner.check(schema)
        self.store.load()

    def rejects(self, limit: int) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and how many there are."""
        return self.inner.rejects(limit)

    @property
    def late_delete(self) -> str | None:
        """Why a tombstone among the dead letters stays one."""
        return self.inner.late_delete

    def check_replay(self) -> None:
        """Refuse a replay where old records would do harm, or whose position has no place."""
        if self.settings.sink.kind != "sql":
            raise ConfigError(
                "offsets.store",
                "a replay keeps its position in the sink's ledger, and this pipeline has none",
                way_out="read the rejects' topic with a pipeline of its own",
            )
        self.inner.check_replay()

    def replaying(self, schema: pa.Schema) -> AbstractContextManager[Replaying]:
        """Begin a replay, exactly once whatever the pipeline's delivery is."""
        return self.inner.replaying(schema)

    def plan(
        self, schema: pa.Schema | None, findings: Problems, notes: list[str], slots: Slots | None
    ) -> SinkPlan:
        """Look at the destination, and at the store."""
        with findings.about("offsets.store"):
            self.store.load()
            if warning := self.store.warning():
                notes.append(f"{self.store.where}: {warning}")
        return self.inner.plan(schema, findings, notes, slots)
