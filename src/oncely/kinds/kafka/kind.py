"""Topics as a kind of destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncely.errors import Unavailable
from oncely.kinds.kafka.settings import KafkaSinkSettings
from oncely.kinds.kind import BOTH_DELETED, Kind, Parts, Proposed, Texts

if TYPE_CHECKING:
    from oncely.kinds.destination import Destination
    from oncely.kinds.trial import Trial


def _destination(parts: Parts) -> Destination:
    from oncely.kinds.kafka.destination import KafkaDestination

    return KafkaDestination(parts)


def _ledger_key(sink: KafkaSinkSettings) -> str:
    return "source.brokers" if sink.brokers is None else "sink.brokers"


def _trial() -> Trial:
    from oncely.kinds.kafka.trial import TRIAL

    return TRIAL


KIND = Kind(
    name="kafka",
    rank=2,
    settings=KafkaSinkSettings,
    destination=_destination,
    require=lambda _: None,
    dead_letters=lambda sink: f"topic {sink.rejects}",
    again=lambda _: (
        "records that are written again are duplicates; a key and compaction hide them later"
    ),
    texts=Texts(
        by_task="each task writes records, rejects and the new position of a topic-partition in one"
        " transaction of Kafka; readers with isolation.level=read_committed see each record once,"
        " and those of a partition with the same key in order",
        by_driver="tasks stage records; the driver publishes them with all rejects and all"
        " positions of the batch in one transaction of Kafka: all or nothing becomes visible to"
        " readers with isolation.level=read_committed, though not in all partitions at one instant",
        ends=(
            "it covers what Oncely writes; a reader without isolation.level=read_committed also"
            " sees records of transactions that were aborted",
            BOTH_DELETED,
        ),
        untransacted=("records are visible separately as they arrive: there is no transaction",),
    ),
    ledger="source",
    ledger_key=_ledger_key,
    silent_after=(Unavailable,),
    group_is_ledger=True,
    trial=_trial,
    proposed=Proposed(("topic:",), lambda to, *_: {"topic": to.removeprefix("topic:")}),
)
