"""Tasks that contradict each other: how often they stage, and what."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from oncely.commit.run import CommitContext, OpenLedger
from oncely.core.batch import Chunk, Staged
from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kinds.data_file import FileFormat, read_receipt
from oncely.kinds.files.topics import ScopeSchemas
from oncely.kinds.staged_files import FilesTask
from oncely.runtimes.batches.commit import RangeCommit, TaskResult
from oncely.stores.objects.store import Store
from tests.deliverytools import put

TASKS = 30


@dataclass
class Agreeing:
    """The half of the files sink that tasks agree by."""

    schemas: ScopeSchemas = field(default_factory=ScopeSchemas)

    def agree(self, staged: Staged) -> bool:
        return self.schemas.agree(read_receipt(staged.name or ""))


class Staging(RangeCommit):
    """Stages without a job: a task for each partition, or one for all."""

    def __init__(self, folder: Path, records: Mapping[TopicPartition, Sequence[Any]]) -> None:
        self.folder, self.records = folder, records
        self.rounds: list[list[TopicPartition]] = []
        self.attempts = count()
        nothing: Any = None
        self.ledger = OpenLedger(CommitContext(nothing, nothing, nothing))
        self.layout = "per_partition"

    def _stage(self, *given: Any) -> list[TaskResult]:
        batch_id, ranges, most, _ = given
        self.rounds.append(sorted(ranges))
        known = dict(cast(Agreeing, self.ledger.context.sink).schemas.known)
        groups = [sorted(ranges)] if most == 1 else [[tp] for tp in sorted(ranges)]
        return [self._task(known, batch_id, group, ranges) for group in groups]

    def _task(self, known: Any, batch_id: int, group: Any, ranges: Any) -> TaskResult:
        form = FileFormat("avro", (), None)
        store = Store(self.folder.as_uri())
        task = FilesTask(store, form, known, Fence("p", 1), batch_id, next(self.attempts))
        for tp in group:
            task.add(chunk(tp, self.records[tp]))
        read = {tp: ranges[tp] for tp in group}
        return TaskResult(read=read, staged=task.finish(), proved=read)


def chunk(tp: TopicPartition, records: Sequence[Any]) -> Chunk:
    values = pa.array([json.dumps(one).encode() for one in records], pa.binary())
    numbers = np.arange(len(records))
    none = np.array([], np.int64)
    return Chunk(
        {tp: OffsetRange(0, len(records))}, (tp,), np.zeros(len(records), np.int32), numbers,
        pa.table({"value": values}), numbers, None, none, (), lambda _: [],
    )  # fmt: skip


@pytest.fixture
def contradicting() -> dict[TopicPartition, list[Any]]:
    """Each task contradicts all before it in a column that shows when theirs are settled."""
    return {
        TopicPartition("t", task): [*({f"f{at}": "text"} for at in range(task)), {f"f{task}": 1}]
        for task in range(TASKS)
    }


def agreed(staging: Staging, sink: Agreeing) -> Iterator[TaskResult]:
    ranges = {tp: OffsetRange(0, len(own)) for tp, own in staging.records.items()}
    put(staging.ledger, sink=sink)
    yield from staging._agreed(0, ranges)


def test_the_rounds_do_not_grow_with_the_tasks(
    tmp_path: Path, contradicting: dict[TopicPartition, list[Any]]
) -> None:
    staging, sink = Staging(tmp_path, contradicting), Agreeing()
    answers = list(agreed(staging, sink))
    assert [len(ranges) for ranges in staging.rounds] == [TASKS, TASKS - 1, TASKS - 2]
    assert sorted(tp for one in answers for tp in one.read) == sorted(contradicting)
    assert sum(one.staged.rows for one in answers if one.staged) == TASKS
    schema = sink.schemas.known[()]
    assert schema == pa.schema({f"f{task}": pa.int64() for task in range(TASKS)})


def test_what_a_contradicting_task_has_learned_from_a_reject_is_not_known(
    tmp_path: Path,
) -> None:
    first, second = TopicPartition("t", 0), TopicPartition("t", 1)
    records = {first: [{"x": 1}], second: [{"x": "text", "amount": "n/a"}, {"amount": 5}]}
    staging, sink = Staging(tmp_path, records), Agreeing()
    answers = list(agreed(staging, sink))
    assert staging.rounds == [[first, second], [second]]
    assert sink.schemas.known[()] == pa.schema({"x": pa.int64(), "amount": pa.int64()})
    assert [one.staged.rows for one in answers if one.staged] == [1, 1]
