"""``[source]``, ``[filter]`` and ``[offsets]``: topics, start position, records that are dropped or
wait, and the store of the positions, if it is not the sink's own ledger."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from oncely.config.base import (
    GROUP,
    NAMES,
    PROPERTIES,
    RATE,
    TIME,
    Problem,
    Section,
    Table,
    Url,
    all_invalid,
    as_tuple,
    dialect_of,
    file_name,
    filled,
    invalid,
    parse_seconds,
    parse_start,
    plain_table,
    quoted,
    revealed,
    shown,
    written,
)
from oncely.kafka import properties
from oncely.kafka.properties import SECRET
from oncely.kafka.start import StartTime
from oncely.stores.offsets.base import SQL_TABLE
from oncely.stores.sql.connection import TableName

_BROKER = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
LONGEST_TOPIC = 249  # characters: the broker makes a directory of it
_TOPIC = re.compile(rf"[A-Za-z0-9._-]{{1,{LONGEST_TOPIC}}}")


def broker_list(
    value: str,
    way_out: str = 'write "broker-1:9092,broker-2:9092"; security.protocol goes to [source.kafka]',
) -> str:
    """Check ``host:port``, several separated by commas. Raises a problem."""
    brokers = [broker.strip() for broker in value.split(",")]
    for broker in brokers:
        match = _BROKER.fullmatch(broker)
        if match is None or not 0 < int(match[1]) < 65_536:
            raise invalid(
                f"found {shown(broker)}; allowed: host:port, more of them after commas",
                way_out,
            )
    return ",".join(brokers)


def topic_name(value: str) -> str:
    """Check a topic's name. Raises a problem."""
    if not _TOPIC.fullmatch(value) or value in (".", ".."):
        raise invalid(
            f"found {shown(value)}; allowed: 1 to 249 letters, digits, dots, dashes, underscores",
            "list each topic; patterns are not supported",
        )
    return value


def _topics(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise invalid("is empty", 'name at least one topic: topics = ["flights"]')
    for topic in value:
        topic_name(topic)
    twice = sorted({topic for topic in value if value.count(topic) > 1})
    if twice:
        raise invalid(f"names {', '.join(twice)} more than once", "name each topic once")
    return value


@written(NAMES)
def _names(value: object) -> object:
    """One name is a list of one."""
    return (value,) if isinstance(value, str) else as_tuple(value)


@written(GROUP)
def _group(value: object) -> str | None:
    if value is False:
        return ""
    if value is None or isinstance(value, str):
        return value
    raise invalid(
        f"found {shown(value)}; allowed: a group's name, or false for none",
        'remove it for "oncely-<name>"',
    )


@written(PROPERTIES)
def _kafka(value: object) -> dict[str, str | SecretStr]:
    values = plain_table(value)
    if found := properties.problems(values):
        raise all_invalid(
            Problem(e.key.removeprefix("source.kafka."), e.problem, e.way_out) for e in found
        )
    return {
        key: SecretStr(text) if key in SECRET else text
        for key, text in properties.plain(values).items()
    }


class SourceSettings(Section):
    """``[source]``: topics, and the start position.

    Attributes:
        brokers: ``host:port``, separated by commas.
        topics: the topics that are read; one may be written without a list.
        start: the start position of a new pipeline; resolved once, at the first start. A time must
            have passed; without an offset it is in UTC.
        on_gap: the action when records were deleted from the topic before they were read: ``fail``,
            or ``record`` the gap in the history and go on.
        group: the consumer group that shows the position to lag tools; by default
            ``oncely-<name>``, false for none.
        kafka: librdkafka's properties, for TLS and logins; secret values are never shown.
    """

    brokers: Annotated[str, AfterValidator(broker_list)]
    topics: Annotated[tuple[str, ...], BeforeValidator(_names), AfterValidator(_topics)]
    start: Annotated[
        Literal["earliest", "latest"] | InstanceOf[StartTime],
        BeforeValidator(parse_start),
        PlainSerializer(str, when_used="json"),
    ] = "earliest"
    on_gap: Literal["fail", "record"] = "fail"
    group: Annotated[str | None, BeforeValidator(_group)] = None
    kafka: Annotated[dict[str, str | SecretStr], BeforeValidator(_kafka)] = Field(
        default_factory=dict
    )

    def kafka_properties(self) -> dict[str, str]:
        """The properties with their values, for the clients. Not to be shown."""
        return revealed(self.kafka)


_RATE = re.compile(r"([\d_,]+) (?:in|per) (.+)")


@dataclass(frozen=True)
class Rate:
    """So many records of a partition in so much time."""

    records: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.records} in {self.seconds:g} seconds"


@written(RATE)
def _rate(value: object) -> object:
    if isinstance(value, Rate):
        return value
    match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    number = re.sub("[_,]", "", match[1]) if match else ""
    if match is None or not number.isdecimal() or int(number) < 1:
        raise invalid(
            f"found {shown(value)}; allowed: a number of records in a time",
            'write "1000 in 1 second"',
        )
    return Rate(int(number), _time(match[2]))


@written(TIME, "above 0")
def _time(value: object) -> float:
    seconds = parse_seconds(value)
    if seconds <= 0:
        raise invalid(f"found {shown(value)}; allowed: a time above 0", 'write "10 minutes"')
    return seconds


_condition = filled('write drop = "kafka_offset < 1000", or remove it')
Time = Annotated[float, BeforeValidator(_time)]


class FilterSettings(Section):
    """``[filter]``: what happens to a record before it is decoded.

    Attributes:
        drop: a condition in SQL over ``kafka_topic``, ``kafka_partition``, ``kafka_offset``,
            ``kafka_timestamp``, ``key`` and ``value`` (bytes): such records are dropped.
        expire: records that are older than this are dropped.
        delay: records wait until they are so old; with ``oncely work``.
        throttle: the records that are read of each partition in a time; with ``oncely work``.
    """

    drop: Annotated[str, AfterValidator(_condition)] | None = None
    expire: Time | None = None
    delay: Time | None = None
    throttle: (
        Annotated[InstanceOf[Rate], BeforeValidator(_rate), PlainSerializer(str, when_used="json")]
        | None
    ) = None

    @property
    def drops(self) -> bool:
        """True if records may be dropped."""
        return self.drop is not None or self.expire is not None

    @property
    def waits(self) -> str | None:
        """The key of a filter that waits, if there is one."""
        return "delay" if self.delay is not None else "throttle" if self.throttle else None


# -- offsets --------------------------------------------------------------------------------

_NODES = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[^/\0]+)+")
_REDIS = re.compile(r"(?:rediss?://[^/?#\s]+(?:/\d*)?|unix://\S*?/[^?#\s]+)(?:\?[^#\s]*)?")
_REDIS_WAY = 'write "redis://user:${PASSWORD}@host:6379/0", or rediss:// for TLS'


class LedgerOffsets(Section):
    """``[offsets]`` with ``store = "ledger"``: positions are in the sink, beside the rows. The
    default.

    Attributes:
        store: the kind of the store.
    """

    store: Literal["ledger"] = "ledger"

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return False


_offsets_group = filled('name a group, or remove it for "oncely-<name>"')


class KafkaOffsets(Section):
    """``[offsets]`` with ``store = "kafka"``: committed offsets on the source's cluster.

    Attributes:
        store: the kind of the store.
        group: the consumer group; by default ``oncely-<name>``.
    """

    store: Literal["kafka"]
    group: Annotated[str, AfterValidator(_offsets_group)] | None = None

    def group_of(self, pipeline: str) -> str:
        """The consumer group of a pipeline."""
        return self.group or f"oncely-{pipeline}"

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return False


def _directory(value: Path) -> Path:
    if value.exists() and not value.is_dir():
        raise invalid(
            f"{shown(str(value))} is a file; each pipeline has a file of its own in a directory",
            "name a directory; it is made when it is missing",
        )
    return value


class FileOffsets(Section):
    """``[offsets]`` with ``store = "file"``: a JSON file on one machine.

    Attributes:
        store: the kind of the store.
        path: the directory with one file for each pipeline; relative to the folder of the pipeline
            file.
    """

    store: Literal["file"]
    path: Annotated[
        Path,
        BeforeValidator(file_name),
        AfterValidator(_directory),
        PlainSerializer(str, when_used="json"),
    ]

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return True


class SqlOffsets(Section):
    """``[offsets]`` with ``store = "sql"``: a table in PostgreSQL or SQLite.

    Attributes:
        store: the kind of the store.
        url: URL of the database; its password is never shown.
        table: the table, or schema.table, of the positions; created if it is missing.
    """

    store: Literal["sql"]
    url: Url
    table: Table = SQL_TABLE

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return dialect_of(self.url.get_secret_value()) == "sqlite"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        url = self.url.get_secret_value()
        try:
            dialect = dialect_of(url)
        except ValueError as error:
            problem = error.context["problems"][0]  # type: ignore[attr-defined]
            raise invalid(problem.text, problem.way_out, below="url") from None
        if dialect == "sqlite" and self.table.schema not in (None, "main"):
            raise invalid(
                f"SQLite has no schema {shown(self.table.schema)}",
                f"write {quoted(TableName(None, self.table.name))}",
                below="table",
            )
        return self


class RedisOffsets(Section):
    """``[offsets]`` with ``store = "redis"``: a hash in Redis.

    Attributes:
        store: the kind of the store.
        url: URL of the server; its password is never shown.
    """

    store: Literal["redis"]
    url: Url

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return self.url.get_secret_value().startswith("unix:")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        url = self.url.get_secret_value()
        if not _REDIS.fullmatch(url) or "@" in url.rpartition("@")[0]:
            raise invalid(
                "not a URL of Redis; allowed: redis://, rediss://, unix://",
                f"{_REDIS_WAY}; in user and password write @ as %40, / as %2F, ? as %3F",
                below="url",
            )
        return self


def _hosts(value: str) -> str:
    return broker_list(value, 'write "zk-1:2181,zk-2:2181,zk-3:2181"; a path goes to offsets.path')


def _nodes(value: str) -> str:
    if not _NODES.fullmatch(value) or value.split("/")[1] == "zookeeper":
        raise invalid(
            f"found {shown(value)}; allowed: names after slashes, but not /zookeeper, its own",
            'write "/oncely"',
        )
    return value


class ZooKeeperOffsets(Section):
    """``[offsets]`` with ``store = "zookeeper"``: nodes in ZooKeeper.

    Attributes:
        store: the kind of the store.
        hosts: ``host:port``, separated by commas.
        path: the parent node of the pipelines' nodes; created if it is missing.
    """

    store: Literal["zookeeper"]
    hosts: Annotated[str, AfterValidator(_hosts)]
    path: Annotated[str, AfterValidator(_nodes)] = "/oncely"

    @property
    def one_machine(self) -> bool:
        """True if the store can be reached from one machine only."""
        return False


OffsetsSettings = Annotated[
    LedgerOffsets | KafkaOffsets | FileOffsets | SqlOffsets | RedisOffsets | ZooKeeperOffsets,
    Field(discriminator="store"),
]
