"""The ledger in a compacted topic.

Whatever a sink with this ledger writes, records or a manifest of files, its positions move in the
same transaction, and are taken over, read and reset in one way.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oncely.clients.kafka import topics
from oncely.clients.kafka.limits import check_open_files
from oncely.core.claim import Claim, Counts, Fence, Notes, Opened, Positions, Takeover
from oncely.core.ledger import Entry
from oncely.core.topics import SourceIdentity, TopicPartition
from oncely.ledgers.topic import takeover as takeovers
from oncely.ledgers.topic.cluster import Cluster, LedgerCopy, PipelineTopics
from oncely.ledgers.topic.compare_and_set import move_alone
from oncely.ledgers.topic.records import Mode
from oncely.ledgers.topic.settling import Settling


class _Worker:
    """Clients that outlive a task, in a worker of Spark's: the run's next task takes them up.

    To connect costs as much as writing 30,000 records. What they remember is what has taken effect,
    whichever task has seen it. A task brings what the driver has read of the ledger topic: it is
    read on from there, not from its beginning.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[int, str, Cluster] | None = None

    def cluster(self, run: str, place: PipelineTopics, known: LedgerCopy | None) -> Cluster:
        """Those of a run; the ones of another run are closed."""
        with self._lock:
            if self._kept is None or self._kept[:2] != (os.getpid(), run):
                self._close()
                self._kept = (os.getpid(), run, Cluster(place))
            if known is not None:
                self._kept[2].learn(known)
            return self._kept[2]

    def close(self) -> None:
        """Close them; the next call makes new ones."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._kept is not None and self._kept[0] == os.getpid():
            self._kept[2].close()
        self._kept = None


_worker = _Worker()


@dataclass
class TopicLedger:
    """Epochs and positions in a compacted topic, each with a copy in the consumer group.

    Attributes:
        place: cluster, pipeline, group and ledger topic.
        mode: by which transactional ids this run moves positions.
        target: where records go, as the ledger has it.
        outputs: asks for the ids of output topics that must still be the ones that were written
            to.
        create: create the ledger topic when it is missing.
        run: a name of this run's own, by which it finds itself in the ledger.
    """

    place: PipelineTopics
    mode: Mode = "partition"
    target: str = ""
    outputs: Callable[[], Mapping[str, str]] = dict
    create: bool = True
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _cluster: tuple[int, Cluster] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _travelled: bool = field(default=False, init=False, repr=False, compare=False)
    """True in a task's copy."""
    _known: LedgerCopy | None = field(default=None, init=False, repr=False, compare=False)
    """In a task's copy: what the driver had read."""

    def __getstate__(self) -> dict[str, Any]:
        opened = self._cluster is not None and self._cluster[0] == os.getpid()
        known = self.cluster.copy() if opened else self._known
        own = {"_cluster": None, "_travelled": True, "_known": known, "outputs": dict}
        return self.__dict__ | own

    @property
    def cluster(self) -> Cluster:
        """The clients of this process; librdkafka's do not survive a fork."""
        if self._travelled:
            return _worker.cluster(self.run, self.place, self._known)
        if self._cluster is None or self._cluster[0] != os.getpid():
            self._cluster = (os.getpid(), Cluster(self.place))
        return self._cluster[1]

    @property
    def one_store(self) -> bool:
        """A partition may lose records alone; files stay when a topic loses records."""
        return False

    def close(self) -> None:
        """Close the clients; the next call makes new ones."""
        if self._travelled:
            _worker.close()
        if self._cluster is not None and self._cluster[0] == os.getpid():
            self._cluster[1].close()
        self._cluster = None

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch and every position; see :mod:`oncely.ledgers.topic.takeover`."""
        check_open_files(self.cluster.asker)
        topics.require_ledger(self.cluster.asker, self.place.ledger_topic, create=self.create)
        opener = takeovers.Opener(
            self.cluster, self.run, self.target, takeover, self.mode, self.outputs()
        )
        return opener.open()

    def positions(self, fence: Fence, *, settled: bool = False) -> dict[TopicPartition, Entry]:
        """What has been committed; settled also what readers of committed records can't see yet.

        Kafka answers a commit when its coordinator has decided it; the markers that show it in
        the topics follow. A task's commit may thus be hidden from the driver for a moment in the
        ledger topic, but not in the group, where it is pending until it shows (KIP-447).
        """
        del fence
        return self.cluster.committed() if settled else self.cluster.entries()

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Move positions alone, each by the transactional id that may move it."""
        move_alone(self.cluster, self.mode, claim, counts)

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Give partitions that were found while running their position."""
        Settling(self.cluster, fence, source, self.mode).settle(dict(positions), {})
        # Whoever reads the ledger from here on finds them: no open transaction hides them.
        self.cluster.settled()

    def note(self, fence: Fence, notes: Notes) -> None:
        """Keep notes in the pipeline's record."""
        takeovers.note(self.cluster, fence, notes)

    def tidy(self, fence: Fence) -> None:
        """Kafka compacts the ledger topic."""
