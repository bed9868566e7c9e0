"""Jobs: what is enqueued, and what a worker does with it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely import ConfigError, Worker, WrongInput, context, jobs
from oncely.core.batch import Chunk
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kafka.sender import Message
from oncely.kinds.handlers.batch import Portion
from oncely.kinds.handlers.sink import HandlersSink, _Attempt


def worker() -> Worker:
    return Worker("billing", brokers="nowhere:9092", url="postgresql://nowhere/db")


class Topic:
    """Holds what was sent, in the place of a producer."""

    def __init__(self, of: Worker) -> None:
        ((self.name, self.handler),) = of.handlers.items()
        self.sent: list[Message] = []
        self.handler._producer = self  # type: ignore[attr-defined]

    @contextmanager
    def use(self) -> Iterator[Topic]:
        yield self

    def send(self, topic: str, messages: list[Message]) -> None:
        assert topic == self.name
        self.sent += messages

    def finish(self) -> None:
        """Acknowledged."""

    def chunk(self, *values: bytes | None, column: str = "value") -> Chunk:
        """What was sent, or these values."""
        given = values or tuple(one.value for one in self.sent)
        numbers = np.arange(len(given))
        tp = TopicPartition(self.name, 0)
        return Chunk(
            {tp: OffsetRange(0, len(given))}, (tp,), np.zeros(len(given), dtype=np.int32), numbers,
            pa.table({column: pa.array(given, pa.binary())}), numbers, None,
            np.array([], dtype=np.int64), (), lambda _: [],
        )  # fmt: skip

    def work(self, *values: bytes | None, column: str = "value") -> None:
        """Do what was sent, or these values."""
        for batch in Portion.of(self.chunk(*values, column=column), ()):
            self.handler(batch, "tx")


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def billing(calls: list[Any]) -> Worker:
    made = worker()

    @jobs.job(made)
    def send_invoice(tx: Any, customer: int, *lines: Any, note: str | None = None) -> None:
        """Sends it."""
        calls.append((tx, customer, lines, note))

    assert send_invoice.__doc__ == "Sends it."
    made.send_invoice = send_invoice  # type: ignore[attr-defined]
    return made


def test_a_call_is_a_message_and_a_message_a_call(billing: Any, calls: list[Any]) -> None:
    topic = Topic(billing)
    assert topic.name == "billing-jobs"
    billing.send_invoice.enqueue(7, [1.5, None], {"ä": True}, note="x")
    billing.send_invoice.enqueue(customer=8)
    assert calls == []
    topic.work()
    assert calls == [("tx", 7, ([1.5, None], {"ä": True}), "x"), ("tx", 8, (), None)]
    assert billing.send_invoice("mine", 9) is None
    assert calls[-1][0] == "mine"


def test_each_job_is_a_call_of_its_own(billing: Any) -> None:
    topic = Topic(billing)
    for number in range(3):
        billing.send_invoice.enqueue(number)
    sink: Any = HandlersSink(Any, {topic.name: topic.handler})  # type: ignore[arg-type]
    attempt = _Attempt(sink, topic.chunk(), Any, None, (), None, Any)  # type: ignore[arg-type]
    assert [batch.offsets for batch in attempt._batches({1})] == [(0, 0), (2, 2)]


def test_the_context_and_the_key_travel_with_it(billing: Any) -> None:
    topic = Topic(billing)
    with context.using({"user": "7"}):
        billing.send_invoice.enqueue_keyed("k", 7)
    (message,) = topic.sent
    assert (message.key, message.headers) == (b"k", [("user", b"7")])
    value = {"job": "send_invoice", "args": [7], "kwargs": {}}
    assert json.loads(message.value or b"") == value


@pytest.mark.parametrize(
    "argument", [datetime.date.min, float("nan"), (1, 2), {1: 2}, b"x", {"a": (1,)}]
)
def test_an_argument_that_json_would_change_is_refused(billing: Any, argument: object) -> None:
    topic = Topic(billing)
    with pytest.raises(WrongInput, match="job 'send_invoice'"):
        billing.send_invoice.enqueue(7, argument)
    assert topic.sent == []


def test_a_call_that_does_not_fit_the_function_is_refused(billing: Any) -> None:
    topic = Topic(billing)
    with pytest.raises(TypeError, match="customer"):
        billing.send_invoice.enqueue()
    assert topic.sent == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'{"job": "gone", "args": [], "kwargs": {}}', "no function is job 'gone'"),
        (b"no json", "no job: "),
        (b"\xff", "no job: "),
        (None, "no job: "),
        (b"[]", "no job: it needs job, args and kwargs"),
        (b'{"job": "send_invoice", "args": 7, "kwargs": {}}', "it needs job, args and kwargs"),
    ],
)
def test_a_message_that_is_no_job_is_an_error(
    billing: Worker, value: bytes | None, said: str
) -> None:
    """So it is retried, and becomes a dead letter, as any record on which a handler fails."""
    with pytest.raises((LookupError, ValueError), match=said):
        Topic(billing).work(value)


def test_decoded_records_are_no_jobs(billing: Worker) -> None:
    with pytest.raises(WrongInput, match=r"decode\.format"):
        Topic(billing).work(b"{}", column="id")


def test_jobs_of_a_topic_are_one_handler_and_have_different_names() -> None:
    made = worker()
    jobs.job(made, "a")(lambda tx: None)
    jobs.job(made, "a", name="other")(lambda tx: None)
    jobs.job(made, "b")(lambda tx: None)
    assert set(made.handlers) == {"a", "b"}
    assert made.pipeline.settings.source.topics == ("a", "b")
    with pytest.raises(ConfigError, match=r"job '<lambda>': two functions in topic 'a'"):
        jobs.job(made, "a")(lambda tx: None)


def test_a_topic_with_another_handler_is_refused() -> None:
    made = worker()
    made.handle("billing-jobs")(lambda batch, tx: None)
    with pytest.raises(ConfigError, match="both want it"):
        jobs.job(made)(lambda tx: None)
