"""A destination whose records and positions are written apart: the weaker semantics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from oncely.config import PipelineSettings
from oncely.delivery.apart import Apart
from oncely.delivery.positions import LedgerPositions, StorePositions
from oncely.delivery.timed import Timed
from oncely.errors import ConfigError
from oncely.pipeline.destination import Destination, Known, Replaying, SinkPlan
from oncely.pipeline.findings import Findings
from oncely.runtimes.probe import Slots
from oncely.sinks.base import Halves, Reject
from oncely.stores.base import OffsetStore

_TIMER = 5.0  # seconds; what a consumer's auto.commit.interval.ms is


class DestinationOfHalves(Destination, Protocol):
    """A destination whose sink can be used in halves."""

    def sink(self, schema: pa.Schema) -> Halves:
        """The sink for rows of these columns."""


@dataclass(frozen=True)
class StoredDestination:
    """A destination with its positions in the ledger, or in a store elsewhere.

    Attributes:
        settings: the pipeline's.
        inner: where records go.
        store: where positions live; None for the sink's own ledger.
    """

    settings: PipelineSettings
    inner: DestinationOfHalves
    store: OffsetStore | None

    def row_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns that reach the sink."""
        return self.inner.row_schema(schema)

    def sink(self, schema: pa.Schema) -> Apart:
        """The two halves in the order that ``delivery`` says."""
        records = self.inner.sink(schema)
        positions = (
            LedgerPositions(records)
            if self.store is None
            else StorePositions(self.store, self.settings.name)
        )
        delivery, interval = self.settings.delivery, self.settings.commit_interval
        if delivery != "none":
            return Apart(records, positions, delivery == "at_most_once")
        if interval is None:
            return Timed(records, positions, position_first=False, seconds=_TIMER)
        return Timed(
            records,
            positions,
            position_first=False,
            seconds=interval.seconds,
            offsets=interval.records,
        )

    @property
    def ledger(self) -> Apart:
        """For work on the positions alone."""
        return self.sink(pa.schema([]))

    def look(self) -> Known:
        """Read positions where they live."""
        known = self.inner.look()
        if self.store is None:
            return known
        stored = self.store.load()
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
        if self.store is not None:
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
        if self.store is not None and self.settings.sink.kind != "sql":
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
        self, schema: pa.Schema | None, findings: Findings, notes: list[str], slots: Slots | None
    ) -> SinkPlan:
        """Look at the destination, and at the store."""
        if self.store is not None:
            with findings.about("offsets.store"):
                self.store.load()
                if warning := self.store.warning():
                    notes.append(f"{self.store.where}: {warning}")
        return self.inner.plan(schema, findings, notes, slots)
