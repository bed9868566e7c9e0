"""Puts back what the first wave left: databases, topics with their offsets, groups, files."""

from __future__ import annotations

import base64
import json
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

from tests.first_wave.cases import CASES

DATA = Path(__file__).parent / "data"
_FILLER = b"of a transaction that was aborted"


@dataclass(frozen=True)
class Restored:
    """Where things are now.

    Attributes:
        known: what the placeholders of :mod:`tests.first_wave.cases` stand for.
    """

    known: Mapping[str, str]


def restore(brokers: str, postgres: str, folder: Path) -> Restored:
    """Restore all of it, into an empty database, an empty folder and topics that are not there."""
    kept = json.loads((DATA / "kafka.json").read_text())
    admin = AdminClient({"bootstrap.servers": brokers})
    files = folder / "files"
    changed = {kept["files"]: files.as_uri(), **_make_topics(admin, kept)}
    _write_records(brokers, kept, changed)
    for group, offsets in kept["groups"].items():
        _commit(brokers, group, offsets, changed)
    with psycopg.connect(postgres, autocommit=True) as database:
        database.execute(_replaced((DATA / "postgres.sql").read_text(), changed).encode())
    with sqlite3.connect(folder / "wave1.db") as file:
        file.executescript(_replaced((DATA / "sqlite.sql").read_text(), changed))
    file.close()
    shutil.copytree(DATA / "files", files)
    for owner in files.glob("*/_oncely/owner.json"):
        owner.write_text(_replaced(owner.read_text(), changed))
    known = {
        "brokers": brokers,
        "postgres": postgres,
        "sqlite": f"sqlite:///{folder}/wave1.db",
        "files": files.as_uri(),
    }
    return Restored(known)


def remove(brokers: str) -> None:
    """Delete the topics, and with them the offsets of groups."""
    admin = AdminClient({"bootstrap.servers": brokers})
    there = admin.list_topics(timeout=60).topics
    ours = [one for one in there if any(case.name in one for case in CASES)]
    for answer in admin.delete_topics(ours, operation_timeout=60).values():
        answer.result(120)


# -- Kafka -----------------------------------------------------------------------------------


class Record(NamedTuple):
    """A line of ``records.jsonl``."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class Run(NamedTuple):
    """Records that follow each other, and how many offsets behind them hold none."""

    tp: tuple[str, int]
    records: list[Record]
    gap: int


def _make_topics(admin: AdminClient, kept: Mapping[str, Any]) -> dict[str, str]:
    """Create the topics; the new ids of cluster and topics by the old ones."""
    # Records keep their timestamps, and would be removed for their age.
    wanted = [
        NewTopic(name, len(one["ends"]), 1, config={**one["config"], "retention.ms": "-1"})
        for name, one in kept["topics"].items()
    ]
    for answer in admin.create_topics(wanted, operation_timeout=60).values():
        answer.result(120)
    ids = {
        _spelled(name, kept["topics"][name]["id"]): _spelled(name, str(one.topic_id))
        for name, one in _described(admin, list(kept["topics"])).items()
    }
    cluster = admin.describe_cluster().result(120).cluster_id
    return {kept["cluster"]: str(cluster), **ids}


def _described(admin: AdminClient, names: list[str]) -> dict[str, Any]:
    """The topics; a broker knows them a moment after they were created."""
    while True:
        answers = admin.describe_topics(TopicCollection(names))
        try:
            return {name: answer.result(120) for name, answer in answers.items()}
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise


def _spelled(topic: str, topic_id: str) -> str:
    """As the ledgers write it: that of a source in the base64 for URLs, others in plain base64."""
    if not topic.endswith("-source"):
        return topic_id
    return topic_id.replace("+", "-").replace("/", "_")


def _write_records(brokers: str, kept: Mapping[str, Any], changed: Mapping[str, str]) -> None:
    """Every record at its offset.

    One offset without a record is the marker of a commit; several are an aborted transaction.
    """
    config = {"bootstrap.servers": brokers, "linger.ms": 0, "log_level": 0}
    plain = Producer(config)
    transactional = Producer({**config, "transactional.id": "first-wave"})
    transactional.init_transactions(120)
    for together in zip_longest(*_runs(kept, changed)):
        now = [run for run in together if run is not None]
        _send(plain, (one for run in now if run.gap != 1 for one in run.records))
        assert plain.flush(120) == 0
        if committed := [run for run in now if run.gap == 1]:
            transactional.begin_transaction()
            _send(transactional, (one for run in committed for one in run.records))
            transactional.commit_transaction(120)
        if aborted := [run for run in now if run.gap > 1]:
            transactional.begin_transaction()
            for run in aborted:
                for _ in range(run.gap - 1):
                    transactional.produce(run.tp[0], _FILLER, _FILLER, run.tp[1])
            assert transactional.flush(120) == 0
            transactional.abort_transaction(120)
    _check_ends(brokers, kept)


def _check_ends(brokers: str, kept: Mapping[str, Any]) -> None:
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "first-wave"})
    try:
        for name, one in kept["topics"].items():
            for number, end in enumerate(one["ends"]):
                found = consumer.get_watermark_offsets(TopicPartition(name, number), 60)
                assert found == (0, end), (name, number)
    finally:
        consumer.close()


def _runs(kept: Mapping[str, Any], changed: Mapping[str, str]) -> list[list[Run]]:
    """Per partition its runs of records."""
    found: dict[tuple[str, int], list[Record]] = {
        (name, number): []
        for name, one in kept["topics"].items()
        for number in range(len(one["ends"]))
    }
    for record in _records(changed):
        found[record.topic, record.partition].append(record)
    return [
        list(_runs_of(tp, own, kept["topics"][tp[0]]["ends"][tp[1]])) for tp, own in found.items()
    ]


def _runs_of(tp: tuple[str, int], records: list[Record], end: int) -> Iterator[Run]:
    run: list[Record] = []
    at = 0
    for record in [*records, None]:
        offset = end if record is None else record.offset
        if offset > at:
            yield Run(tp, run, offset - at)
            run, at = [], offset
        if record is not None:
            run.append(record)
            at = record.offset + 1
    if run:
        yield Run(tp, run, 0)


def _records(changed: Mapping[str, str]) -> Iterator[Record]:
    with (DATA / "records.jsonl").open() as lines:
        for line in lines:
            topic, partition, offset, timestamp, key, value, headers = json.loads(line)
            content = _bytes(value)
            if content is not None and topic.startswith("ledger-"):
                content = _replaced(content.decode(), changed).encode()
            own = [(name, _bytes(one)) for name, one in headers]
            yield Record(topic, partition, offset, timestamp, _bytes(key), content, own)


def _send(producer: Producer, records: Iterable[Record]) -> None:
    for one in records:
        producer.produce(
            one.topic, one.value, one.key, one.partition,
            timestamp=one.timestamp, headers=one.headers,
        )  # fmt: skip


def _commit(
    brokers: str, group: str, offsets: Iterable[tuple[Any, ...]], changed: Mapping[str, str]
) -> None:
    wanted = [
        TopicPartition(topic, number, at, _replaced(metadata or "", changed))
        for topic, number, at, metadata in offsets
    ]
    consumer = Consumer(
        {"bootstrap.servers": brokers, "group.id": group, "enable.auto.commit": False}
    )
    try:
        for one in consumer.commit(offsets=wanted, asynchronous=False) or ():
            assert one.error is None, one
    finally:
        consumer.close()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def _replaced(text: str, changed: Mapping[str, str]) -> str:
    for old, new in changed.items():
        text = text.replace(old, new)
    return text
