"""Catching the files pipeline while it stages or publishes; compare :mod:`demo.moment`.

What can be seen from outside: files below the root that the manifest does not name, and a
transaction that is open on the manifest topic, because its last stable offset (KIP-98) stays
behind its end. The job is stopped (SIGSTOP, all of its processes), and then looked at again: its
clients stand still, so what is seen now can't end by itself.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from demo.job import Job
from demo.moment import JobEnded, Missed, standing_still

Phase = Literal["staging", "publishing"]

_POLL = 0.003
_TREE_AGE = 0.25  # seconds that a list of the job's processes is good for
_SETTLE = 0.1  # what a stopped client sent before is answered by then
_ASK = 10.0
_QUIET = 5.0
_SOME = 40  # of about 170 in a batch: staging is well under way, and not over


@dataclass(frozen=True)
class Caught:
    """The job, stopped.

    Attributes:
        phase: in which.
        staged: files that lie there and that nobody names.
        open_messages: messages and markers of the manifest topic from the open transaction on.
        processes: all of the job's, stopped.
    """

    phase: Phase
    staged: frozenset[str]
    open_messages: int
    processes: list[psutil.Process] = field(repr=False)


class Eyes:
    """Follows the manifest topic and looks into the folder; shares nothing with the pipeline.

    Args:
        brokers: ``host:port``.
        topic: the manifest's.
        root: where the files lie, in folders ``carrier=…/date=…/hour=…``.
    """

    def __init__(self, brokers: str, topic: str, root: Path) -> None:
        self.rows = 0
        self._brokers, self._topic, self._root = brokers, topic, root
        self._admin = AdminClient({"bootstrap.servers": brokers, "log_level": 2})
        self._consumer: Consumer | None = None
        self._at = 0
        self._dates: set[str] = set()
        self._before: set[str] = set()

    def look(self, wait: float = 0.0) -> None:
        """Take in what was committed to the manifest since the last look.

        Args:
            wait: seconds to wait for the first message.
        """
        if self._consumer is None and not self._begin():
            return
        assert self._consumer is not None
        for message in self._consumer.consume(10_000, wait):
            error = message.error()
            if error is None:
                self._at = message.offset() + 1
                self._take(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._at = message.offset()
            else:
                raise KafkaException(error)

    def growing(self) -> bool:
        """Whether folders of dates appear, there are some by now, and nobody names them."""
        found = self._unnamed_dates()
        new, self._before = found - self._before, found
        return bool(new) and len(found) >= _SOME

    def open_messages(self) -> int:
        """How far the manifest's last stable offset is behind its end."""
        if self._consumer is None:
            return 0
        stable, end = (self._end(level) for level in (
            IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED,
        ))  # fmt: skip
        return end - stable

    def certain(self, phase: Phase, processes: list[psutil.Process]) -> Caught | None:
        """What is seen while the job stands still, if it is in this phase."""
        time.sleep(_SETTLE)
        left = self.open_messages()
        if (left > 0) != (phase == "publishing") or not self._read_to_stable_end():
            return None
        staged = frozenset(
            str(path.relative_to(self._root))
            for date in self._unnamed_dates()
            for path in (self._root / date).rglob("*.avro")
        )
        return Caught(phase, staged, left, processes) if staged else None

    def close(self) -> None:
        """Close the consumer."""
        if self._consumer is not None:
            self._consumer.close()

    # -- parts -----------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Follow the topic as soon as it is there; asked for by name it might be made."""
        if self._topic not in self._admin.list_topics(timeout=_ASK).topics:
            return False
        self._consumer = Consumer(
            {
                "bootstrap.servers": self._brokers,
                "group.id": "demo-eyes",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
                "log_level": 2,
            }
        )
        self._consumer.assign([TopicPartition(self._topic, 0, 0)])
        return True

    def _take(self, message: Any) -> None:
        # Nothing is compacted or vacuumed in the demo, so no name is ever taken back.
        key = message.key().decode()
        if key.startswith("["):  # the topic's owner
            return
        carrier, date, _ = key.split("/", 2)
        self._dates.add(f"{carrier}/{date}")
        self.rows += json.loads(message.value())["rows"]

    def _unnamed_dates(self) -> set[str]:
        found: set[str] = set()
        for carrier in self._root.glob("carrier=*"):
            found.update(f"{carrier.name}/{date.name}" for date in carrier.iterdir())
        return found - self._dates

    def _end(self, level: IsolationLevel) -> int:
        partition = TopicPartition(self._topic, 0)
        asked = self._admin.list_offsets(
            {partition: OffsetSpec.latest()}, isolation_level=level, request_timeout=_ASK
        )
        end: int = asked[partition].result().offset
        return end

    def _read_to_stable_end(self) -> bool:
        end = self._end(IsolationLevel.READ_COMMITTED)
        deadline = time.monotonic() + _QUIET
        while self._at < end and time.monotonic() < deadline:
            self.look(0.05)
        return self._at >= end


@contextlib.contextmanager
def caught(job: Job, eyes: Eyes, phase: Phase, timeout: float) -> Iterator[Caught]:
    """Stop the job in a phase; what the block has left of it goes on afterwards.

    Raises:
        JobEnded: the job was done first.
        Missed: it was not caught in ``timeout`` seconds.
        JobFailed: it can't be kept running.
    """
    deadline = time.monotonic() + timeout
    tree: list[psutil.Process] = []
    listed = 0.0
    eyes.growing()  # what lies there by now does not count
    while time.monotonic() < deadline:
        if job.tend():
            raise JobEnded(job.plan.name)
        if time.monotonic() - listed > _TREE_AGE:
            tree, listed = job.tree(), time.monotonic()
        eyes.look()
        if not (eyes.growing() if phase == "staging" else eyes.open_messages()):
            time.sleep(_POLL)
            continue
        with standing_still(tree):
            found = eyes.certain(phase, tree)
            if found is not None:
                yield found
                return
    raise Missed(f"{job.plan.name}: it was not caught {phase} in {timeout:.0f} s")
