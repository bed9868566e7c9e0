"""The records of a storm: numbered in each partition, plain and in transactions, some aborted."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping
from functools import cached_property
from random import Random

from confluent_kafka import Producer

from oncely.errors import check
from oncely.testing.readers import messages

SCHEMA = "part INT NOT NULL, number BIGINT NOT NULL, aborted BOOLEAN NOT NULL"
_PAUSE = 0.02  # seconds between portions
_PORTION = 60  # records


class Load(threading.Thread):
    """Publishes portions until :meth:`finish`.

    Args:
        brokers: the bootstrap address.
        topic: the source topic.
        partitions: the number of its partitions.
        random: the source of chance.
    """

    def __init__(self, brokers: str, topic: str, partitions: int, random: Random) -> None:
        super().__init__(name="load", daemon=True)
        self._brokers, self._topic, self._random = brokers, topic, random
        self._next = [0] * partitions
        self._done = threading.Event()
        self._failed: BaseException | None = None

    def run(self) -> None:
        """Publish; an error is kept for :meth:`finish`."""
        try:
            while not self._done.wait(_PAUSE):
                self._portion()
        except BaseException as error:
            self._failed = error

    def finish(self) -> None:
        """Publish a last portion in all partitions, and end.

        Raises:
            Exception: the error that ended the thread.
        """
        self._done.set()
        self.join()
        if self._failed is not None:
            raise self._failed
        for partition in range(len(self._next)):
            self._send(self._plain, partition, aborted=False)
        check(self._plain.flush(60) == 0, "the broker does not answer")

    def expected(self) -> Mapping[int, list[int]]:
        """By partition, the numbers that a plain committed reader finds, in its order."""
        found: dict[int, list[int]] = {}
        for one in messages(self._brokers, self._topic, patience=60.0):
            found.setdefault(one.partition(), []).append(json.loads(one.value())["number"])
        return found

    def _portion(self) -> None:
        how = self._random.choice(["plain", "plain", "committed", "aborted"])
        producer = self._plain if how == "plain" else self._transactional
        if how != "plain":
            producer.begin_transaction()
        for _ in range(self._random.randint(1, _PORTION)):
            partition = self._random.randrange(len(self._next))
            self._send(producer, partition, aborted=how == "aborted")
        check(producer.flush(60) == 0, "the broker does not answer")
        if how == "committed":
            producer.commit_transaction(30)
        elif how == "aborted":
            producer.abort_transaction(30)

    def _send(self, producer: Producer, partition: int, *, aborted: bool) -> None:
        record = {"part": partition, "number": self._next[partition], "aborted": aborted}
        self._next[partition] += 1
        producer.produce(self._topic, json.dumps(record).encode(), partition=partition)

    @cached_property
    def _plain(self) -> Producer:
        return Producer({"bootstrap.servers": self._brokers, "linger.ms": 2, "log_level": 0})

    @cached_property
    def _transactional(self) -> Producer:
        own = {"transactional.id": uuid.uuid4().hex}
        producer = Producer(
            {"bootstrap.servers": self._brokers, "linger.ms": 2, "log_level": 0, **own}
        )
        producer.init_transactions(30)
        return producer
