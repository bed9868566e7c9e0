"""The ledger in a compacted topic.

A sink with this ledger may write records or a manifest of files; its positions move in the same
transaction, and are taken over, read and reset in the same way.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from oncely.core.claim import Claim, Counts, Entry, Fence, Notes, Opened, Positions, Takeover
from oncely.core.ranges import SourceIdentity, TopicPartition
from oncely.errors import check
from oncely.kafka import topics
from oncely.kafka.topics import TOGETHER, check_open_files
from oncely.per_process import PerProcess
from oncely.stores.topic import takeover as takeovers
from oncely.stores.topic.cluster import KEPT, Cluster, LedgerCopy, PipelineTopics
from oncely.stores.topic.compare_and_set import PositionTakeover, move_alone
from oncely.stores.topic.records import RunMode


class _Worker:
    """Clients that outlive a task, in a Spark worker: the run's next task reuses them.

    To connect costs as much as writing 30,000 records. They remember positions that have taken
    effect, of any task. A task has a copy of the ledger topic as read by the driver: it is read
    from there, not from its beginning.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[str, PerProcess[Cluster]] | None = None

    def cluster(
        self, run: str, pipeline_topics: PipelineTopics, known: LedgerCopy | None
    ) -> Cluster:
        """The clients of a run; those of another run are closed."""
        with self._lock:
            if self._kept is None or self._kept[0] != run:
                self._close()
                self._kept = run, PerProcess(partial(Cluster, pipeline_topics), Cluster.close)
            cluster = self._kept[1].get()
            if known is not None:
                cluster.learn(known)
            return cluster

    def close(self) -> None:
        """Close the clients; the next call creates new ones."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
        self._kept = None


_worker = _Worker()


@dataclass
class TopicLedger:
    """Epochs and positions in a compacted topic, each with a copy in the consumer group.

    Attributes:
        pipeline_topics: cluster, pipeline, group and ledger topic.
        mode: the transactional ids by which this run moves positions.
        target: the destination, in the form that the ledger stores.
        outputs: returns the ids of output topics, which must be the same as before.
        create: create the ledger topic if it is missing.
        run: a unique name of this run, which identifies it in the ledger.
    """

    pipeline_topics: PipelineTopics
    mode: RunMode = "partition"
    target: str = ""
    outputs: Callable[[], Mapping[str, str]] = dict
    create: bool = True
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _travelled: bool = field(default=False, init=False, repr=False, compare=False)
    """True in a task's copy."""
    _known: LedgerCopy | None = field(default=None, init=False, repr=False, compare=False)
    """In a task's copy: the driver's copy of the ledger topic."""

    def __getstate__(self) -> dict[str, Any]:
        known = self.cluster.copy() if self._cluster.made else self._known
        state = self.__dict__ | {"_travelled": True, "_known": known, "outputs": dict}
        del state["_cluster"]
        return state

    @property
    def cluster(self) -> Cluster:
        """The clients of this process; librdkafka's do not survive a fork."""
        if self._travelled:
            return _worker.cluster(self.run, self.pipeline_topics, self._known)
        return self._cluster.get()

    @cached_property
    def _cluster(self) -> PerProcess[Cluster]:
        return PerProcess(partial(Cluster, self.pipeline_topics), Cluster.close)

    @property
    def one_store(self) -> bool:
        """False: a partition may lose records alone; files remain if a topic loses records."""
        return False

    def close(self) -> None:
        """Close the clients; the next call creates new ones."""
        if self._travelled:
            _worker.close()
        self._cluster.close()

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch and every position; see :mod:`oncely.stores.topic.takeover`."""
        check_open_files(self.cluster.admin, TOGETHER + (KEPT if self.mode == "turns" else 0))
        name = self.pipeline_topics.ledger_topic
        topics.require_ledger(self.cluster.admin, name, create=self.create)
        opener = takeovers.TopicTakeover(
            self.cluster, self.run, self.target, takeover, self.mode, self.outputs()
        )
        return opener.open()

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """The committed positions; settled ones include commits that are not visible to committed
        readers yet.

        Kafka responds to a commit when its coordinator has decided it; the markers that make it
        visible in the topics follow. A task's commit may thus be hidden from the driver for a
        moment in the ledger topic, but not in the group, where it is pending until it is visible
        (KIP-447).
        """
        del fence, of
        return self.cluster.committed() if settled else self.cluster.entries()

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Move positions alone, each by the transactional id that may move it."""
        move_alone(self.cluster, self.mode, claim, counts)

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Add positions for partitions that were discovered during the run."""
        check(fence.partitions is None, "a run of some partitions takes others over")
        PositionTakeover(self.cluster, fence, source, self.mode).take(dict(positions), {})
        # All later readers of the ledger see them: no open transaction hides them.
        self.cluster.settled()

    def note(self, fence: Fence, notes: Notes) -> None:
        """Store notes in the pipeline's record."""
        takeovers.note(self.cluster, fence, notes)

    def identity(self) -> str:
        """The id of the ledger topic: distinguishes it from others of its name."""
        topic = self.cluster.pipeline_topics.ledger_topic
        return (topics.identified(self.cluster.admin, topic) or ("", 0))[0]

    def tidy(self, fence: Fence) -> None:
        """Does nothing: Kafka compacts the ledger topic."""
