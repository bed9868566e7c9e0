"""A reader of committed records beside writers that are killed, stopped and fenced."""

from __future__ import annotations

import json
import random
import threading

import pytest
from confluent_kafka import Consumer, TopicPartition

from oncely.testing.servers.kafka import Broker
from tests.kafkatools import make_topics, open_sink
from tests.scenarios import kafka_jobs as jobs
from tests.scenarios.zygote import Zygote
from tests.sinktools import T0

pytestmark = pytest.mark.long


class Reader(threading.Thread):
    """Reads on and on; what it sees must be 0, 1, 2, ... at any time."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._config = {
            "bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False,
            "isolation.level": "read_committed", "fetch.wait.max.ms": 10, "log_level": 0,
        }  # fmt: skip
        self._topic = topic
        self._changed = threading.Condition()
        self._ending = False
        self.seen: list[int] = []

    def run(self) -> None:
        consumer = Consumer(self._config)
        consumer.assign([TopicPartition(self._topic, 0, 0)])
        while not self._ending:
            for message in consumer.consume(100, 0.1):
                with self._changed:
                    self.seen.append(json.loads(message.value())["id"])
                    self._changed.notify()
        consumer.close()

    def await_records(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, 30), self.seen[-3:]
        return self.seen

    def end(self) -> None:
        self._ending = True
        self.join(180)
        assert not self.is_alive()


@pytest.mark.timeout(300)
def test_a_reader_sees_each_record_once_and_in_order(zygote: Zygote, broker: Broker) -> None:
    topics = make_topics(broker)
    reader = Reader(broker.bootstrap, topics.output)
    reader.start()
    chance = random.Random(4)
    fence = open_sink(topics.sink(), {T0: 0}).fence
    stopped = []
    for start in range(0, 120, 10):
        how = chance.choice(["kill", "stop"])
        job = zygote.start(
            jobs.write_range, topics, fence, start, start + 10, chance.randint(3, 8), how
        )
        if how == "stop":
            job.wait_until_stopped()
            stopped.append(job)
        else:
            job.wait()
        fence = open_sink(topics.sink(), {T0: 0}).fence
        if stopped and chance.random() < 0.5:
            stopped[-1].go_on()  # a zombie beside the new run
        done = zygote.run(jobs.write_range, topics, fence, start, start + 10, 0, "kill")
        assert not done.error, done.error
        assert done.value != "fenced"
        seen = reader.await_records(start + 10)
        assert seen == list(range(start + 10))
    for job in stopped:
        job.go_on()
        ended = job.wait()
        assert not ended.error, ended.error
    # Whatever the zombies did is in the log by now; one more record shows that the reader is past.
    done = zygote.run(jobs.write_range, topics, fence, 120, 121, 0, "kill")
    assert not done.error, done.error
    assert reader.await_records(121) == list(range(121))
    reader.end()
    assert reader.seen == list(range(121))
