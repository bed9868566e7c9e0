"""What a driver does with its ledger outside of commits, each step a function that may be killed.

Each takes a task, and ``around``, through which every call to the database goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oncely.commit.backoff import Backoff
from oncely.commit.path import pass_over
from oncely.core.batch import Chunk
from oncely.core.claim import Fence, Notes, Opened, RejectCount, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kinds.sql.sink import SqlSink
from oncely.testing.processes import kill_self
from tests.scenarios.commit_jobs import Hit
from tests.scenarios.commit_topic import Task
from tests.sinktools import SOURCE, T0, T1, together, with_faults

Around = Callable[[str, Callable[[], Any]], Any]
Step = Callable[[Task, Fence, Around], object]
Positions = Mapping[TopicPartition, int]

LATEST, LATER = {T0: 5, T1: 7}, {T0: 50, T1: 70}
"""Where the topic ends when the pipeline is started first, and some time later."""
GAP = OffsetRange(0, 5)
COUNTED = RejectCount("10", 2_000, 7)


def die_at(step: Step, task: Task, fence: Fence, at: int, when: str) -> list[str]:
    """Do the step, and be killed at a call to the database; the calls when there were fewer."""
    hit = Hit(at, when, kill_self)
    step(task, fence, hit)
    return hit.calls


def open_at(task: Task, start: Positions, earliest: Positions | None = None) -> Opened:
    """A run opens the ledger, undisturbed."""
    return task.sink().open(Takeover(SOURCE, lambda: start, earliest or dict.fromkeys(start, 0)))


# -- steps that are killed -----------------------------------------------------------------


def open_first(task: Task, _: Fence, around: Around) -> object:
    """The first start of a pipeline that begins at the topic's end."""
    return _sink(task, around).open(Takeover(SOURCE, lambda: LATEST, {T0: 0, T1: 0}))


def open_first_some(task: Task, _: Fence, around: Around) -> object:
    """The first start, by a run of one of the partitions."""
    return _some(task, around, LATEST)


def take_over(task: Task, _: Fence, around: Around) -> object:
    """A further run opens."""
    return _sink(task, around).open(Takeover(SOURCE, dict, {T0: 0, T1: 0}))


def take_over_some(task: Task, _: Fence, around: Around) -> object:
    """A further run takes one of the partitions over."""
    return _some(task, around, {})


def _some(task: Task, around: Around, start: Positions) -> object:
    some = frozenset({T0})
    return _sink(task, around).open(
        Takeover(SOURCE, lambda: start, {T0: 0, T1: 0}, partitions=some)
    )


def add_partition(task: Task, fence: Fence, around: Around) -> object:
    """A partition is found while running."""
    _sink(task, around).ledger.add_partitions(fence, {T1: 0}, SOURCE)
    return None


def record_gap(task: Task, fence: Fence, around: Around) -> object:
    """Records were deleted from the topic before they were read, and ``on_gap`` is ``record``."""
    lost = Chunk.of_nothing({T0: GAP})
    patience = Backoff(0.01, 0.01, 0.1, clock=lambda: 0.0)
    return pass_over(together(_sink(task, around)), lost.ranges, fence, "gap", patience)


def reset(task: Task, _: Fence, around: Around) -> object:
    """A person puts the position of one partition back."""
    return _sink(task, around).open(Takeover(SOURCE, dict, {T0: 0, T1: 0}, reset=lambda _: {T0: 3}))


def note_rejects(task: Task, fence: Fence, around: Around) -> object:
    """The count of rejects is noted after a batch."""
    _sink(task, around).ledger.note(fence, Notes(counted=COUNTED))
    return None


def join_history(task: Task, fence: Fence, around: Around) -> object:
    """Old ranges of the history are joined."""
    return _sink(task, around).ledger.join_history(fence, 1)


def _sink(task: Task, around: Around) -> SqlSink:
    return with_faults(task.sink(), around)
