"""The half of a sink that keeps epochs and positions in the ledger topic.

Whatever such a sink writes, records or a manifest of files, its positions move in the same
transaction, and are taken over, read and reset in one way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from oncely.core.ledger import Entry
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.sinks.base import Fence, Opened, RejectCount, Reset
from oncely.sinks.kafka import takeover, topics
from oncely.sinks.kafka.cluster import Cluster, LedgerCopy, Place
from oncely.sinks.kafka.limits import check_open_files
from oncely.sinks.kafka.settling import Settling
from oncely.sinks.kafka.words import Mode, from_tree


class _Worker:
    """Clients that outlive a task, in a worker of Spark's: the run's next task takes them up.

    To connect costs as much as writing 30,000 records. What they remember is what has taken effect,
    whichever task has seen it. A task brings what the driver has read of the ledger topic: it is
    read on from there, not from its beginning.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[int, str, Cluster] | None = None

    def cluster(self, run: str, place: Place, known: LedgerCopy | None) -> Cluster:
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


class LedgerInTopic:
    """To be inherited by sinks.

    Attributes:
        place: cluster, pipeline, group and ledger topic.
        create: create the ledger topic when it is missing.
        run: a name of this run's own, by which it finds itself in the ledger.
    """

    _travelled = False  # True in a task's copy
    _known: LedgerCopy | None = None  # in a task's copy: what the driver had read
    place: Place
    create: bool
    run: str
    _cluster: tuple[int, Cluster] | None

    def __getstate__(self) -> dict[str, Any]:
        opened = self._cluster is not None and self._cluster[0] == os.getpid()
        known = self.cluster.copy() if opened else self._known
        return self.__dict__ | {"_cluster": None, "_travelled": True, "_known": known}

    @property
    def mode(self) -> Mode:
        """By which transactional ids this run moves positions."""
        raise NotImplementedError

    @property
    def cluster(self) -> Cluster:
        """The clients of this process; librdkafka's do not survive a fork."""
        if self._travelled:
            return _worker.cluster(self.run, self.place, self._known)
        if self._cluster is None or self._cluster[0] != os.getpid():
            self._cluster = (os.getpid(), Cluster(self.place))
        return self._cluster[1]

    def close(self) -> None:
        """Close the clients; the next call makes new ones."""
        if self._travelled:
            _worker.close()
        if self._cluster is not None and self._cluster[0] == os.getpid():
            self._cluster[1].close()
        self._cluster = None

    def take_over(
        self,
        source: SourceIdentity,
        target: str,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
        reset: Reset | None = None,
        outputs: Mapping[str, str] = MappingProxyType({}),
    ) -> Opened:
        """Take the next epoch; see :class:`oncely.sinks.kafka.takeover.Takeover`."""
        check_open_files(self.cluster.asker)
        topics.require_ledger(self.cluster.asker, self.place.ledger_topic, create=self.create)
        return takeover.Takeover(
            self.cluster,
            source,
            self.run,
            target,
            start,
            earliest,
            expected,
            reset,
            self.mode,
            outputs,
        ).open()

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity, fence: Fence
    ) -> None:
        """Give partitions that were found while running their position.

        Raises:
            Fenced: a newer run has opened.
        """
        Settling(self.cluster, fence, source, self.mode).settle(positions, {})
        # Whoever reads the ledger from here on finds them: no open transaction hides them.
        self.cluster.settled()

    def leader_epochs(self, fence: Fence) -> dict[TopicPartition, int]:  # noqa: ARG002 - the port's
        """What the pipeline's record has noted.

        It is asked for after `open` or `add_partitions`, which have read the ledger topic to its
        end, and only a newer run has changed the record since. So it does not wait for open
        transactions of other pipelines.
        """
        known = self.cluster.look().pipeline
        return from_tree(known.leaders) if known else {}

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int], fence: Fence) -> None:
        """Note them in the pipeline's record."""
        takeover.note_leader_epochs(self.cluster, epochs, fence)

    def note_rejects(self, count: RejectCount, fence: Fence) -> None:
        """Note the count in the pipeline's record."""
        takeover.note_rejects(self.cluster, count, fence)

    def tidy(self, fence: Fence) -> None:
        """Nothing to do: Kafka compacts the ledger topic."""

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:  # noqa: ARG002 - the port's
        """What has been committed, read now. Decisions made on it are checked by commit."""
        return self.cluster.entries()

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:  # noqa: ARG002
        """All that was committed, also what readers of committed records can't see yet.

        Kafka answers a commit when its coordinator has decided it; the markers that show it in
        the topics follow. A task's commit may thus be hidden from the driver for a moment in the
        ledger topic, but not in the group, where it is pending until it shows (KIP-447).
        """
        return self.cluster.committed()
