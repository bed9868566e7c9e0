"""``oncely local``: the servers on this machine; records as lines, without a consumer group."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import confluent_kafka as ck
import pyarrow as pa

from oncely import artifacts
from oncely.cli import screen, verbs
from oncely.config.base import without_password
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

if TYPE_CHECKING:
    from types import ModuleType

    from oncely.testing.servers.background import LocalServers


@contextmanager
def importing_servers() -> Iterator[None]:
    """Import the local servers in this block.

    Raises:
        WrongInput: one of their packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise WrongInput(
            f"the local servers need {error.name}", way_out="pip install 'oncely[local]'"
        ) from None


def _servers() -> ModuleType:
    with importing_servers():
        from oncely.testing.servers import background as servers
    return servers


def up(asked: verbs.LocalUp) -> None:
    """Start the servers and print their addresses, or shell commands that set them as variables.

    Raises:
        WrongInput: both formats are requested.
    """
    if asked.as_json and asked.export:
        raise WrongInput("--export and --json exclude each other")
    servers = _servers()
    running: LocalServers = servers.status(asked.folder) or _started(servers, asked.folder)
    if asked.export:
        for name, value in (("BROKERS", running.brokers), ("POSTGRES", running.postgres)):
            sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
        return
    _show(running, asked.as_json)


def _started(servers: ModuleType, folder: Path | None) -> LocalServers:
    artifacts.resolve(artifacts.KAFKA_BROKER)  # downloads here, to show the progress
    said = f"starting a Kafka broker and PostgreSQL in {servers.home_directory(folder)}"
    if not (live := screen.err.is_terminal):
        screen.note(said)
    with screen.err.status(said) if live else nullcontext():
        made: LocalServers = servers.up(folder)
        return made


def brokers(folder: Path | None) -> str:
    """The address of the local broker in a folder, by default the usual one.

    Raises:
        WrongInput: it is not running.
    """
    running: LocalServers | None = _servers().status(folder)
    if running is None:
        raise WrongInput(
            "the local broker is not running",
            way_out="start it by `oncely local up`, or name another one by --brokers HOST:PORT",
        )
    return running.brokers


def down(asked: verbs.LocalDown) -> None:
    """Stop the servers."""
    ended = _servers().down(asked.folder, erase=asked.erase)
    screen.out.print("stopped" if ended else "nothing was running")


def status(asked: verbs.LocalStatus) -> int:
    """Print the addresses of the servers without the password; exit code 1 if they are not
    running."""
    as_json, running = asked.as_json, _servers().status(asked.folder)
    if running is not None:
        _show(replace(running, postgres=without_password(running.postgres)), as_json)
        if not as_json:
            screen.note("`oncely local up` prints the password, too")
    elif as_json:
        screen.show_json(None)
    else:
        screen.out.print("not running; `oncely local up` starts a broker and PostgreSQL")
    return 0 if running is not None else 1


def _show(running: LocalServers, as_json: bool) -> None:
    """Print the addresses, unredacted."""
    where = asdict(running)
    if as_json:
        sys.stdout.write(json.dumps(where) + "\n")
        return
    for name, value in where.items():
        sys.stdout.write(f"{name:9} {value}\n")


# -- records as lines -----------------------------------------------------------------------

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
