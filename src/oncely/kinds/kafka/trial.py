"""Topics in the trials of ``oncely semantics``: Kafka's producer has the fault."""

from __future__ import annotations

import json
from collections import Counter

from oncely.kinds.trial import STEPS, KillingClients, Place, Trial


def _found(place: Place, topic: str) -> Counter[int]:
    return Counter(json.loads(message.value())["id"] for message in place.messages(topic))


TRIAL = Trial(
    title="Into a Kafka topic",
    points=STEPS,
    sink=lambda _, name: {"kind": "kafka", "topic": name},
    faulty=lambda killer, sink: {"kafka_connect": KillingClients(killer, sink["topic"])},
    found=_found,
)
