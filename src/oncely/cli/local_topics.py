"""``oncely local produce | consume``: records as lines, without a consumer group."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain, islice

import confluent_kafka as ck
import pyarrow as pa

from oncely.cli import screen, verbs
from oncely.cli.local import brokers
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import OncelyError, TopicMissing, Unavailable, WrongInput
from oncely.kafka import records as json_lines
from oncely.kafka import topics
from oncely.kafka.client import ErrorState, KafkaAdmin, make
from oncely.kafka.properties import producer_config
from oncely.kafka.reader import RecordReader
from oncely.kafka.records import each
from oncely.kafka.sender import Delivered, Message, Plain
from oncely.kafka.source import KafkaSource, Watermarks
from oncely.wording import plural

_TIMEOUT = 30.0  # seconds
_POSITION = {"topic", "partition", "offset", "timestamp"}
"""Members of what ``consume`` prints that ``produce --records`` does not use."""

Numbered = Iterable[tuple[int, Message]]


def produce(asked: verbs.LocalProduce) -> None:
    """Write the lines of standard input to a topic, until its end or Ctrl-C.

    Raises:
        WrongInput: a line cannot be written, or there is no such topic.
        Unavailable: the broker does not answer.
    """
    topic, key, records, partitions = asked.topic, asked.key, asked.records, asked.partitions
    if key is not None and records:
        raise WrongInput("--key and --records exclude each other: a record has its own key")
    where = asked.brokers or brokers(asked.folder)
    if sys.stdin.isatty():
        screen.note("one record a line; Ctrl-D ends")
    sent = 0
    try:
        messages = _messages(sys.stdin.buffer, key, records=records)
        if key is not None or records:
            messages = list(messages)  # all of them are checked before the first is written
        create = asked.brokers is None or partitions is not None
        _require_topic(where, topic, partitions, create=create)
        producer = _producer(where)
        try:
            for sent, (number, message) in enumerate(messages, 1):  # noqa: B007
                _send(producer, topic, number, message)
        finally:
            producer.finish()
    except KeyboardInterrupt:
        pass
    screen.note(f"{plural(sent, 'record')} written to {topic}")


def consume(asked: verbs.LocalConsume) -> None:
    """Print the committed records of a topic, until its present end, or until Ctrl-C.

    Raises:
        WrongInput: there is no such topic.
        Unavailable: the broker does not answer.
    """
    topic, follow = asked.topic, asked.follow
    where = asked.brokers or brokers(asked.folder)
    try:
        with _asked(), KafkaSource(where, [topic]) as source:
            marks = source.watermarks()
        with (
            closing(RecordReader(where, {})) as reader,
            closing(_committed(reader, marks, follow=follow)) as found,
        ):
            for record in islice(chain.from_iterable(map(each, found)), asked.limit):
                screen.write_json(json_lines.as_json(*record))
                if follow:
                    sys.stdout.flush()
    except TopicMissing:
        raise WrongInput(
            f"{where} has no topic {topic!r}, or does not show it",
            way_out=f"`oncely local produce {topic}` creates it on the local broker",
        ) from None
    except KeyboardInterrupt:
        pass
    sys.stdout.flush()


def _committed(
    reader: RecordReader, marks: Mapping[TopicPartition, Watermarks], *, follow: bool
) -> Generator[pa.Table]:
    """The records between the marks, by partition, and then the later ones as they arrive."""
    for tp, one in sorted(marks.items()):
        yield from reader.tables({tp: OffsetRange(one.low, one.stable)}, lost="skip")
    if follow:
        yield from reader.follow({tp: one.stable for tp, one in marks.items()})


@contextmanager
def _asked() -> Iterator[None]:
    """Name the option instead of the key of a pipeline file if a broker does not answer."""
    try:
        yield
    except Unavailable as error:
        error.way_out = "check that the broker is running, and --brokers"
        raise


def _messages(lines: Iterable[bytes], key: str | None, *, records: bool) -> Numbered:
    """The record of each line that is not empty, with the line's number.

    Raises:
        WrongInput: names the line.
    """
    for number, line in enumerate(lines, 1):
        text = line.rstrip(b"\r\n")
        if not text.strip():
            continue
        where = f"line {number}"
        if records:
            given = json_lines.members(text, where, json_lines.MEMBERS | _POSITION)
            yield number, json_lines.message_of(given, where)
        else:
            yield number, Message(text, None if key is None else _key(text, key, where))


def _key(line: bytes, field: str, where: str) -> bytes | None:
    given = json_lines.members(line, where)
    if field not in given:
        raise WrongInput(
            f"{where}: no field {field!r}", way_out=f"it has {', '.join(given) or 'no fields'}"
        )
    return json_lines.content_of(given[field], where)


def _require_topic(where: str, topic: str, partitions: int | None, *, create: bool) -> None:
    with _asked(), closing(KafkaAdmin(where, {}, _TIMEOUT)) as admin:
        if not create and topics.missing(admin, [topic]):
            raise WrongInput(
                f"{where} has no topic {topic!r}, or does not show it",
                way_out="--partitions N creates it",
            )
        given = {} if partitions is None else {topic: partitions}
        topics.require_topics(admin, [topic], create=True, partitions=lambda: given)


def _producer(where: str) -> Plain:
    delivered = Delivered()
    config = producer_config({}, None, round(_TIMEOUT * 1000), ())
    client = make(ck.Producer, where, {}, ErrorState(where), **config, on_delivery=delivered)
    return Plain(client, delivered, _TIMEOUT, where)


def _send(producer: Plain, topic: str, number: int, message: Message) -> None:
    try:
        producer.send(topic, [message])
    except OncelyError as error:
        error.problem = f"line {number}: {error.problem}; the lines before it are written"
        raise
