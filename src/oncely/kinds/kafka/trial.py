"""Topics in the trials of ``oncely semantics``: Kafka's producer has the fault."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oncely.kafka.client import ErrorState, make
from oncely.kafka.sender import Producer
from oncely.kinds.trial import (
    ARRIVING,
    BEFORE,
    INSIDE,
    POSITION,
    RECORDS,
    STEPS,
    Killer,
    Place,
    Trial,
)


@dataclass
class KillingClients:
    """``Parts.kafka_connect`` for a Kafka sink.

    Attributes:
        killer: the fault.
        topic: the topic of the records; all other messages belong to the position.
    """

    killer: Killer
    topic: str

    def __call__(
        self,
        kind: Any,
        brokers: str,
        kafka: Mapping[str, object],
        error_state: ErrorState,
        **own: Any,
    ) -> Any:
        """Create a client; producers have the fault."""
        made = make(kind, brokers, kafka, error_state, **own)
        return self.producer(made) if issubclass(kind, Producer) else made

    def producer(self, made: Any) -> KillingProducer:
        """The producer with the fault."""
        return KillingProducer(made, self.killer, self.topic)


class KillingProducer:
    """A producer that tracks the step."""

    def __init__(self, inner: Any, killer: Killer, topic: str) -> None:
        self._inner, self._of, self._topic = inner, killer, topic
        self._records = self._position = False

    @property
    def _killer(self) -> Killer:
        return self._of.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def produce_batch(self, topic: str, messages: Sequence[dict[str, object]]) -> Any:
        """Queue records."""
        return self._send(topic, messages, lambda part: self._inner.produce_batch(topic, part))

    def _send(
        self,
        topic: str,
        messages: Sequence[dict[str, object]],
        send: Callable[[Sequence[dict[str, object]]], Any],
    ) -> Any:
        if topic != self._topic:
            return send(messages)
        if not self._killer.position_first:
            self._killer.at(BEFORE)
        if self._killer.wants(INSIDE):
            send(messages[: len(messages) // 2])
            self._inner.flush(ARRIVING)
            self._killer.end()
        sent = send(messages)
        self._records = True
        if self._killer.together and self._killer.wants(RECORDS):
            self._inner.flush(ARRIVING)
            self._killer.end()
        return sent

    def flush(self, *timeout: float) -> Any:
        """Wait for queued messages: without transactions this is the end of a step."""
        left = self._inner.flush(*timeout)
        if not self._killer.together:
            self._killer.committed(records=self._records, position=False)
        return left

    def send_offsets_to_transaction(self, *args: Any) -> Any:
        """Add the position to the transaction."""
        if self._killer.position_first:
            self._killer.at(BEFORE)
        sent = self._inner.send_offsets_to_transaction(*args)
        self._position = True
        if self._killer.together:
            self._killer.at(POSITION)
        return sent

    def commit_transaction(self, *args: Any) -> Any:
        """Commit the transaction."""
        done = self._inner.commit_transaction(*args)
        self._killer.committed(records=self._records, position=self._position)
        return done


def _found(place: Place, topic: str) -> Counter[int]:
    return Counter(json.loads(message.value())["id"] for message in place.messages(topic))


TRIAL = Trial(
    title="Into a Kafka topic",
    points=STEPS,
    sink=lambda _, name: {"kind": "kafka", "topic": name},
    faulty=lambda killer, sink: {"kafka_connect": KillingClients(killer, sink["topic"])},
    found=_found,
)
