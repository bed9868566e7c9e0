"""Damage of an output topic, its dead letters and its ledger, in copies of the three topics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

from oncely import Pipeline
from oncely.audit import Report, audit
from oncely.audit.report import FindingKind
from oncely.config import parse
from oncely.errors import check
from oncely.testing.servers.kafka import Broker
from truth.damage import Damage, Place, Throw
from truth.source import SCHEMA, Pool, Pools, Source
from truth.topics import Kept, kept, moved, topic_id, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EVERY = 1_000_000
_SOURCE = "oncely.source"
Topics = tuple[list[Kept], list[Kept], list[Kept]]
Change = Callable[[Kept], list[Kept]]


def _altered(**changes: Callable[[Any], Any]) -> Change:
    def change(one: Kept) -> list[Kept]:
        row = one.entry
        return [one.saying(**{name: new(row.get(name)) for name, new in changes.items()})]

    return change


def _unchanged(one: Kept) -> list[Kept]:
    return [one]


def _an_hour_later(at: str) -> str:
    return f"{at[:11]}{int(at[11:13]) + 1:02}{at[13:]}"


_ALTERED: Mapping[str, Change] = {
    "text altered": _altered(customer=lambda text: text + " "),
    "number altered": _altered(cents=lambda cents: cents + 1),
    "value set to 0": _altered(cents=lambda _: 0),
    "value set to null": _altered(share=lambda _: None),
    "flag turned": _altered(paid=lambda paid: not paid),
    "moved to another hour": _altered(at=_an_hour_later),
    "made a tombstone": lambda one: [one._replace(value=None)],
}
_KINDS: Mapping[str, tuple[Pool, FindingKind, Change]] = {
    "record removed": ("row", "lost", lambda _: []),
    "record doubled": ("row", "duplicated", lambda one: [one, one]),
    **{kind: ("row", "altered", change) for kind, change in _ALTERED.items()},
    "dead letter removed": ("dead letter", "lost", lambda _: []),
    "record of a dead letter": ("dead letter", "duplicated", lambda one: [one]),
    "record of a hole": ("hole", "unexpected", lambda one: [one]),
    "record beyond the position": ("beyond", "unexpected", lambda one: [one]),
    "record of another partition": ("nowhere", "unexpected", lambda one: [one]),
}
_OF_HISTORY: Mapping[str, Change] = {
    "message of the history dropped": lambda _: [],
    "message of the history with other counts": lambda one: [
        one.saying(rows=one.entry["rows"] + 1, records=one.entry["records"] + 1)
    ],
}
_BY_VALUE = ("record removed", "record doubled", *_ALTERED, "dead letter removed")


class KafkaWorld:
    """An output topic, filled by a pipeline on Spark in several batches.

    Args:
        broker: the cluster.
        spark: a session.
        records: the number of records.
        random: the source of chance.
        keep_source: records name their sources; otherwise they are compared by value.
    """

    def __init__(
        self,
        broker: Broker,
        spark: SparkSession,
        records: int,
        random: Random,
        *,
        keep_source: bool,
    ) -> None:
        self.name = "kafka" if keep_source else "kafka-values"
        self._keep_source, self._broker, self._numbers = keep_source, broker, count()
        self._source = Source(broker.bootstrap, f"truth-{self.name}", 4, random)
        broker.create_topic(self._source.topic, 4)
        names = [f"{self._source.topic}.{what}" for what in ("out", "rejects", "ledger")]
        broker.create_topic(names[0], 4)
        self.pipeline = self._pipeline(*names)
        for _ in range(3):
            self._source.publish(records // 3)
            check(bool(self.pipeline.run("latest", spark=spark)), "the pipeline was stopped")
        self._kept: Topics = tuple(kept(broker.bootstrap, name) for name in names)  # type: ignore[assignment]
        self._places = self._by_place()
        self._ends = {
            one.parts[3]: one.entry["position"]
            for one in self._kept[2]
            if one.parts[0] == "position"
        }

    def _pipeline(self, output: str, rejects: str, ledger: str) -> Pipeline:
        settings = {
            "name": self._source.topic,
            "delivery": "exactly_once",
            "source": {"brokers": self._source.brokers, "topics": [self._source.topic]},
            "decode": {"format": "json", "schema": SCHEMA},
            "sink": {
                "kind": "kafka",
                "topic": output,
                "rejects_topic": rejects,
                "ledger_topic": ledger,
                "keep_source": self._keep_source,
                "max_rejects": "50%",
            },
            "spark": {"master": "local[2,4]"},
        }
        return Pipeline(parse(settings))

    def audit(self) -> Report:
        """Audit the output, or the copy that is damaged."""
        return audit(self.pipeline, limit=_EVERY)

    # -- at many records -------------------------------------------------------------------

    @contextmanager
    def throw(self, random: Random, number: int) -> Iterator[Sequence[Damage]]:
        """Damage records, each at most once."""
        pools = Pools(self._source, self._ends, random)
        chosen = {one: _KINDS[one] for one in (_KINDS if self._keep_source else _BY_VALUE)}
        changed: dict[Place, Change] = {}
        letters: set[Place] = set()
        damages, more = [], []
        for _ in range(number):
            kind, place = pools.draw({kind: pool for kind, (pool, _, _) in chosen.items()})
            pool, finding, change = chosen[kind]
            if kind == "dead letter removed":
                letters.add(place)
            elif pool == "row":
                changed[place] = change
            else:
                more.append(self._foreign(place))
            damages.append(Damage.at(kind, [place], *self._named_by(finding)))
        output, rejects, ledger = self._kept
        written = [
            new
            for place, one in zip(self._places, output, strict=True)
            for new in changed.get(place, _unchanged)(one)
        ]
        rest = [one for one in rejects if _rejected(one) not in letters]
        with self._copied((written + more, rest, ledger)):
            yield damages

    # -- alone -----------------------------------------------------------------------------

    def large(self, random: Random) -> Iterator[Throw]:
        """A position that was moved, an output that was made again, cut, or compacted."""
        for number, end in sorted(self._ends.items()):
            by = random.randint(1, end // 2)
            yield partial(self._moved, "position moved forward", number, by)
            if self._keep_source:
                yield partial(self._moved, "position moved back", number, -by)
        for kind, change in _OF_HISTORY.items():
            yield partial(self._history_changed, kind, change, random)
        yield partial(self._spoilt, "topic made again, empty", "was made again", self._made_again)
        yield partial(self._spoilt, "topic made again", "was made again", self._made_equal)
        yield partial(self._spoilt, "first records deleted", "has deleted the first", self._cut)
        yield partial(self._spoilt, "topic compacted", "is compacted", self._compacted)

    def last(self, random: Random) -> Iterator[Throw]:
        """A source that was made again."""
        del random
        yield partial(self._source.made_again, self._broker, self._ends)

    @contextmanager
    def _moved(self, kind: str, partition: int, by: int) -> Iterator[Sequence[Damage]]:
        end = self._ends[partition]
        if by > 0:
            self._source.plain(by, partition)
            self._source.look()
        low, high = sorted((end, end + by))
        records = self._source.records
        places = [one for one in records if one[0] == partition and low <= one[1] < high]
        output, rejects, ledger = self._kept
        edited = moved(ledger, self._source.topic, partition, by)
        with self._copied((output, rejects, edited)):
            yield [Damage.moved(kind, partition, places if by > 0 else ())]

    @contextmanager
    def _history_changed(
        self, kind: str, change: Change, random: Random
    ) -> Iterator[Sequence[Damage]]:
        """Change an older position. The newest one has the totals, and compaction may remove any
        other: so the audit need not tell it, and ``oncely verify`` does."""
        output, rejects, ledger = self._kept
        older = [
            one
            for number in self._ends
            for one in [p for p in ledger if p.is_position(self._source.topic, number)][:-1]
            if one.entry["kind"] == "data"
        ]
        chosen = random.choice(older)
        edited = [new for one in ledger for new in (change(one) if one is chosen else [one])]
        with self._copied((output, rejects, edited)):
            yield [Damage.harmless(kind)]

    @contextmanager
    def _spoilt(
        self, kind: str, text: str, spoil: Callable[[str], None]
    ) -> Iterator[Sequence[Damage]]:
        with self._copied(self._kept) as output:
            spoil(output)
            yield [Damage.unknown(kind, text, self._ends)]

    def _made_again(self, output: str) -> None:
        self._broker.delete_topic(output)
        self._broker.create_topic(output, 4)

    def _made_equal(self, output: str) -> None:
        self._made_again(output)
        write(self._source.brokers, output, self._kept[0])

    def _cut(self, output: str) -> None:
        self._broker.delete_records(output, {0: 5})

    def _compacted(self, output: str) -> None:
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

        entry = ConfigEntry(
            "cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ConfigResource.Type.TOPIC, output, incremental_configs=[entry])
        admin = self._broker.admin()
        admin.incremental_alter_configs([resource])[resource].result(30)

    # -- the topics ------------------------------------------------------------------------

    @contextmanager
    def _copied(self, topics: Topics) -> Iterator[str]:
        """New topics, which the pipeline has for its own; returns the output's name."""
        brokers, number, own = self._source.brokers, next(self._numbers), self.pipeline
        names = [f"{self._source.topic}.{what}-{number}" for what in ("out", "rejects", "ledger")]
        for name, partitions in zip(names, (4, 4, 16), strict=True):
            self._broker.create_topic(name, partitions)
        for name, records in zip(names[:2], topics[:2], strict=True):
            write(brokers, name, records)
        id_ = topic_id(self._broker, names[0])
        ledger = [
            one.saying(outputs={names[0]: id_}, target=names[0])
            if one.parts[0] == "pipeline"
            else one
            for one in topics[2]
        ]
        write(brokers, names[2], ledger)
        self.pipeline = self._pipeline(*names)
        yield names[0]
        self.pipeline = own
        for name in names:
            self._broker.delete_topic(name)

    def _named_by(self, finding: FindingKind) -> tuple[FindingKind, ...]:
        """By value, any record without a row and any row of no record are taken for a pair."""
        either = not self._keep_source and finding in ("lost", "altered")
        return ("lost", "altered") if either else (finding,)

    def _by_place(self) -> list[Place]:
        """The source of each record of the output: its header, or the id in its value."""
        if self._keep_source:
            return [_origin(one) for one in self._kept[0]]
        places = {
            json.loads(value)["id"]: place
            for place, value in self._source.records.items()
            if place not in self._source.bad
        }
        return [places[one.entry["id"]] for one in self._kept[0]]

    def _foreign(self, place: Place) -> Kept:
        any_one = self._kept[0][0]
        header = json.dumps([self._source.topic, *place]).encode()
        return any_one._replace(headers=[(_SOURCE, header)])


def _origin(one: Kept) -> Place:
    _, partition, offset = json.loads(dict(one.headers)[_SOURCE])
    return partition, offset


def _rejected(one: Kept) -> Place:
    headers = dict(one.headers)
    return int(headers["oncely.partition"]), int(headers["oncely.offset"])
