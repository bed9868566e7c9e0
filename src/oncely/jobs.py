"""Jobs: function calls that are enqueued in a topic, and done by a worker with their database work.

    from oncely import Worker, jobs

    worker = Worker("billing", brokers="kafka:9092", url="postgresql://…")

    @jobs.job(worker)
    def send_invoice(tx, customer):
        tx.execute("INSERT INTO invoices …", (customer,))

    send_invoice.enqueue(7)

What the function does with ``tx`` is committed together with the position of its message, or not at
all. The message is JSON; the current context (:mod:`oncely.context`) travels in its headers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec

from oncely import context
from oncely.config.problems import checked
from oncely.context import Record
from oncely.errors import ConfigError, WrongInput
from oncely.kafka.client import ErrorState, make
from oncely.kafka.properties import producer_config
from oncely.kafka.sender import Delivered, Message, Plain
from oncely.kinds.handlers.batch import Batch
from oncely.per_process import PerProcess
from oncely.pipeline.handling import Worker

P = ParamSpec("P")
_TIMEOUT = 30.0  # seconds until a message must be acknowledged


def job(
    worker: Worker, topic: str | None = None, *, name: str | None = None
) -> Callable[[Callable[Concatenate[Any, P], object]], Job[P]]:
    """Make a job of a function, whose first argument is the transaction.

    Args:
        worker: does it.
        topic: of the messages, ``<worker's name>-jobs`` by default. It must exist.
        name: of the job in the messages; by default that of the function. A message whose job has
            no function any more becomes a dead letter.

    Raises:
        ConfigError: the worker has another job of this name, or another handler of the topic.
    """
    chosen = topic or f"{worker.name}-jobs"

    def register(function: Callable[Concatenate[Any, P], object]) -> Job[P]:
        handler = worker.handlers.get(chosen)
        if not isinstance(handler, Jobs):
            handler = worker.handle(chosen)(Jobs(worker, chosen))
        made = Job(function, name or function.__name__, handler)
        handler.add(made)
        return made

    return register


class Job(Generic[P]):
    """A function that may be enqueued. Calling it calls the function, here and now."""

    def __init__(
        self, function: Callable[Concatenate[Any, P], object], name: str, jobs: Jobs
    ) -> None:
        self.name, self.function, self._jobs = name, function, jobs
        update_wrapper(self, function)

    def __call__(self, tx: Any, /, *args: P.args, **kwargs: P.kwargs) -> object:
        """Call the function."""
        return self.function(tx, *args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue a call, and wait until the broker has acknowledged it.

        Raises:
            TypeError: the function can't be called so.
            WrongInput: an argument is no JSON, or would not be the same behind it.
            Unavailable: it is not known whether it is enqueued.
        """
        self._jobs.enqueue(self, None, args, kwargs)

    @checked
    def enqueue_keyed(self, key: str, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """As :meth:`enqueue`; jobs of the same key are done in the order in which they came."""
        self._jobs.enqueue(self, key, args, kwargs)


class Jobs:
    """The jobs of a topic, as its handler.

    Attributes:
        one_by_one: it is called with one record at a time, so that the time limit is that of a job.
    """

    one_by_one = True

    def __init__(self, worker: Worker, topic: str) -> None:
        self.topic = topic
        self._jobs: dict[str, Job[Any]] = {}
        self._producer = PerProcess(partial(_producer, worker), Plain.close)

    def __repr__(self) -> str:
        return f"jobs of {self.topic!r}"

    def add(self, made: Job[Any]) -> None:
        """Add a job.

        Raises:
            ConfigError: there is another one of its name.
        """
        if made.name in self._jobs:
            raise ConfigError(
                f"job {made.name!r}",
                f"two functions in topic {self.topic!r} have this name",
                way_out='give one of them another: @jobs.job(worker, name="…")',
            )
        self._jobs[made.name] = made

    def enqueue(
        self, made: Job[Any], key: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Send the message of a call."""
        inspect.signature(made.function).bind(None, *args, **kwargs)
        call = {"job": made.name, "args": list(args), "kwargs": kwargs}
        message = Message(_encoded(call), key.encode() if key else None, context.headers())
        with self._producer.use() as producer:
            producer.send(self.topic, [message])
            producer.finish()

    def __call__(self, batch: Batch, tx: Any) -> None:
        """Do the jobs of a batch."""
        for record in batch:
            call = _decoded(record)
            found = self._jobs.get(call["job"])
            if found is None:
                raise LookupError(f"no function is job {call['job']!r}")
            found.function(tx, *call["args"], **call["kwargs"])


def _encoded(call: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(call, allow_nan=False, ensure_ascii=False)
        same = json.loads(text) == call
    except (TypeError, ValueError) as error:
        raise WrongInput(f"job {call['job']!r}: {error}", way_out=_ALLOWED) from None
    if not same:
        raise WrongInput(
            f"job {call['job']!r}: an argument is another one after JSON", way_out=_ALLOWED
        )
    return text.encode()


_ALLOWED = "give it texts, numbers, booleans, None, lists, and dicts with texts as keys"


def _decoded(record: Record) -> dict[str, Any]:
    if "value" not in record.row:
        raise WrongInput(
            "jobs are read as they are",
            key="decode.format",
            way_out='write decode = { format = "raw" }',
        )
    try:
        call = json.loads(record.value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"no job: {error}") from None
    match call:
        case {"job": str(), "args": list(), "kwargs": dict()}:
            return dict(call)
    raise ValueError("no job: it needs job, args and kwargs")


def _producer(worker: Worker) -> Plain:
    from oncely.kafka.sender import Producer

    source, delivered = worker.pipeline.source, Delivered()
    config = producer_config({}, None, round(_TIMEOUT * 1000), ())
    errors = ErrorState(source.brokers)
    producer = make(Producer, source.brokers, source.kafka, errors, **config, on_delivery=delivered)
    return Plain(producer, delivered, _TIMEOUT, source.brokers)
