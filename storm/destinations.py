"""The two destinations of a storm, and what plain readers find in them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol

import psycopg

from oncely.testing.readers import ends, messages
from oncely.testing.servers.kafka import Broker

Found = list[tuple[int, int, bool]]
"""Partition, number and whether it was aborted, in the order of arrival within each partition."""


class Destination(Protocol):
    """Where a pipeline of a storm writes."""

    @property
    def sink(self) -> str:
        """The lines of ``[sink]`` in the pipeline file."""

    def count(self) -> int:
        """The number of rows or messages; may include markers."""

    def found(self) -> Found:
        """Everything that a committed reader sees."""


@dataclass(frozen=True)
class Table:
    """A table of PostgreSQL whose identity column shows the order of arrival."""

    url: str = field(repr=False)
    name: str

    def __post_init__(self) -> None:
        with psycopg.connect(self.url) as database:
            database.execute(
                f'CREATE TABLE "{self.name}" (part INT NOT NULL, number BIGINT NOT NULL,'
                " aborted BOOLEAN NOT NULL, arrival BIGINT GENERATED ALWAYS AS IDENTITY)"
            )

    @property
    def sink(self) -> str:
        """The lines of ``[sink]`` in the pipeline file."""
        return f'kind = "sql"\nurl = "{self.url}"\ntable = "{self.name}"\nkeep_source = false'

    def count(self) -> int:
        """The number of rows."""
        with psycopg.connect(self.url) as database:
            (number,) = database.execute(f'SELECT count(*) FROM "{self.name}"').fetchall()[0]
        return int(number)

    def found(self) -> Found:
        """Every row, in the order of arrival."""
        with psycopg.connect(self.url) as database:
            wanted = f'SELECT part, number, aborted FROM "{self.name}" ORDER BY arrival'
            return [(part, number, bad) for part, number, bad in database.execute(wanted)]


@dataclass(frozen=True)
class Topic:
    """A topic to which all records of a source partition go by one key."""

    broker: Broker
    name: str

    def __post_init__(self) -> None:
        self.broker.create_topic(self.name, 4)

    @property
    def sink(self) -> str:
        """The lines of ``[sink]`` in the pipeline file."""
        return f'kind = "kafka"\ntopic = "{self.name}"\nkey = "part"'

    def count(self) -> int:
        """The number of messages, markers and aborted messages."""
        return sum(ends(self.broker.bootstrap, self.name).values())

    def found(self) -> Found:
        """Every committed message, in the order of its partition."""
        seen = messages(self.broker.bootstrap, self.name, patience=60.0)
        rows = [json.loads(one.value()) for one in seen]
        return [(one["part"], one["number"], one["aborted"]) for one in rows]
