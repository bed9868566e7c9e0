"""What tests of the Delta sink share: tables on a folder, and the outcome seen by plain readers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from oncely.core.batch import Batch, BudgetSpent, Chunk
from oncely.core.claim import Claim, Counts, Fence
from oncely.core.ranges import TopicPartition
from oncely.decode.avro_schema import storable
from oncely.kinds.delta.form import DeltaFormat
from oncely.kinds.delta.sink import DeltaSink
from oncely.stores.delta import DeltaConnect, connect
from oncely.stores.objects.store import Connect, Store
from oncely.stores.objects.store import connect as connect_files
from tests.sinktools import SCHEMA


@dataclass(frozen=True)
class DeltaPlace:
    """The folder of one test. Picklable."""

    root: Path
    name: str = "p"

    def sink(
        self,
        schema: pa.Schema = SCHEMA,
        *,
        partition_by: Sequence[str] = (),
        keys: Sequence[str] = (),
        version: str | None = None,
        delta: DeltaConnect = connect,
        files: Connect = connect_files,
        run: str | None = None,
        **more: Any,
    ) -> DeltaSink:
        """A sink as the driver makes it."""
        form = DeltaFormat(storable(schema), tuple(partition_by), tuple(keys), version)
        store = self.store(files)
        sink = DeltaSink(self.name, store, form, connect=delta, **more)
        return replace(sink, run=run) if run else sink

    def store(self, files: Connect = connect_files) -> Store:
        """Of the root."""
        return Store(self.root.as_uri(), connect=files)

    @property
    def table(self) -> Any:
        """As an outsider loads it."""
        from deltalake import DeltaTable

        return DeltaTable(self.root)

    def rows(self) -> list[dict[str, Any]]:
        """All rows, by an outside reader, in order."""
        found = self.table.to_pyarrow_table().to_pylist()
        return sorted(found, key=lambda row: [str(value) for value in row.values()])

    def ids(self) -> list[int]:
        """Their ids, sorted."""
        return sorted(row["id"] for row in self.rows())

    def told(self) -> list[dict[str, Any]]:
        """What the pipeline's commits say of themselves, the newest first."""
        found = [one.get("oncely") for one in self.table.history()]
        return [one for one in found if one and one["pipeline"] == self.name]

    def letters(self) -> list[tuple[str, int, int]]:
        """Origins of the dead letters that wait, read without the ledger's code."""
        version = self.table.transaction_version(f"oncely/{self.name}")
        if version is None:
            return []
        folder = self.root / "_oncely"
        ledger = json.loads((folder / f"ledger-{self.name}" / f"{version}.json").read_text())
        found = [
            (row["topic"], row["partition"], row["offset"])
            for path, _ in ledger["rejects"]
            for row in pq.read_table(folder / path).to_pylist()
        ]
        return sorted(found)


def make_place(folder: Path) -> DeltaPlace:
    """A root that is not there yet."""
    return DeltaPlace(folder / uuid.uuid4().hex[:12])


class Committing:
    """A Delta sink as one that commits chunks: stages and publishes each of them at once."""

    def __init__(self, sink: DeltaSink) -> None:
        self.inner = sink
        self._batch = 0

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def bind(self) -> Committing:
        self.inner = self.inner.bind()
        return self

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> Mapping[TopicPartition, Counts]:
        self._batch += 1
        self.inner.begin_batch()
        task = self.inner.staging(fence, self._batch, 0)
        refused = [*chunk.rejections, *task.add(chunk)]
        if max_rejects is not None and len(refused) > max_rejects:
            raise BudgetSpent(refused, "decode, transform or table")
        staged = task.finish()
        gone = {one.record for one in refused}
        keep = ~np.isin(chunk.row_record, list(gone))
        deleted = ~np.isin(chunk.delete_record, list(gone))
        keys = bool(self.inner.form.keys)
        record = [*chunk.row_record[keep], *(chunk.delete_record[deleted] if keys else ())]
        found = chunk.counts(np.array(record, np.int64), refused)
        counts = {tp: staged.of_range(tp, one) for tp, one in found.items()}
        letters = chunk.dead_letters(refused) if refused else []
        what = Batch(chunk.ranges, counts, letters, [staged])
        self.inner.publish(what, fence, claim)
        return counts
