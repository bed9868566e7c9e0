"""A destination whose positions are in an offset store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from oncely.config import PipelineSettings
from oncely.core.batch import Reject
from oncely.errors import ConfigError
from oncely.ledgers.stores.base import OffsetStore
from oncely.pipeline.destination import Destination, LedgerState, SinkPlan
from oncely.pipeline.problems import Inspection
from oncely.sinks.base import (
    DiscardsDeadLetters,
    ReplaysDeadLetters,
    RewritesRecords,
    RewritesTogether,
    Sink,
)


@dataclass(frozen=True)
class StoredDestination:
    """A destination with its positions in an offset store.

    Attributes:
        settings: the pipeline's.
        inner: the destination of the records.
        store: the store of the positions.
    """

    settings: PipelineSettings
    inner: Destination
    store: OffsetStore

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns that reach the sink."""
        return self.inner.row_schema(schema)

    def sink(self, schema: pa.Schema) -> Sink:
        """The sink for rows of these columns."""
        return self.inner.sink(schema)

    @property
    def bare_sink(self) -> Sink:
        """The sink for operations without columns."""
        return self.inner.bare_sink

    def look(self) -> LedgerState:
        """Read the positions from the store."""
        known, stored = self.inner.look(), self.store.load()
        return LedgerState(
            max((one.epoch for one in stored.values()), default=0),
            next((one.cluster_id for one in stored.values()), None),
            {tp: one.position for tp, one in stored.items()},
            {tp.topic: one.topic_id for tp, one in stored.items()},
            known.rejects,
        )

    def check(self, schema: pa.Schema) -> None:
        """Refuse a destination that does not accept the rows, and a store that does not answer."""
        self.inner.check(schema)
        self.store.load()

    def rejects(self, limit: int, *, discarded: bool = False) -> tuple[Sequence[Reject], int]:
        """The first dead letters, and their total number."""
        return self.inner.rejects(limit, discarded=discarded)

    def discarding(self) -> DiscardsDeadLetters:
        """Begin a discard: dead letters are beside the records."""
        return self.inner.discarding()

    @property
    def late_delete(self) -> str | None:
        """The reason why a tombstone among the dead letters is not replayed; None if it is."""
        return self.inner.late_delete

    def check_replay(self) -> None:
        """Refuse a replay if old records would replace newer ones, or without a ledger for its
        position."""
        if self.settings.sink.kind not in ("sql", "delta"):
            raise ConfigError(
                "offsets.store",
                "a replay keeps its position in the sink's ledger, and this pipeline has none",
                way_out="read the rejects' topic with a pipeline of its own",
            )
        self.inner.check_replay()

    def replaying(self, schema: pa.Schema) -> AbstractContextManager[ReplaysDeadLetters]:
        """Begin a replay, exactly once whatever the pipeline's delivery is."""
        return self.inner.replaying(schema)

    def rewriting(
        self, schema: pa.Schema
    ) -> AbstractContextManager[RewritesRecords | RewritesTogether]:
        """Refused: positions that do not move with the rows say nothing about them."""
        del schema
        raise ConfigError(
            "offsets.store",
            "the positions do not move in the transaction of the rows: which records are committed"
            " is not certain",
            way_out='repair with offsets.store = "ledger", while the pipeline is stopped',
        )

    def plan(self, schema: pa.Schema | None, inspection: Inspection) -> SinkPlan:
        """Inspect the destination and the store."""
        with inspection.about("offsets.store"):
            self.store.load()
            if warning := self.store.warning():
                inspection.notes.append(f"{self.store.where}: {warning}")
        return self.inner.plan(schema, inspection)
