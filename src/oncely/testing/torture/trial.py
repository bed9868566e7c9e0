"""Trials in sequence: publish records, those of a file or samples; kill, go on, compare."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
from confluent_kafka import Producer
from psycopg import sql

from oncely.errors import Stopped, Unavailable, WrongInput
from oncely.kafka import records as json_lines
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.process import Process

_LONGEST = 300.0  # seconds for a restart and a run
_LAST = "COMMIT"

Rows = Mapping[str, Counter[str]]
"""The rows of each table, as text, and how often each occurs."""


@dataclass(frozen=True)
class Stage:
    """Everything that the trials share. The URLs contain a password: never shown.

    Attributes:
        app: ``module:app``.
        brokers: the broker with the records.
        create_database: creates a database and returns its URL.
        folder: for orders and logs.
        setup: SQL that creates the handlers' tables.
        tables: the tables that are compared.
        ignored: columns that may differ.
    """

    app: str
    brokers: str
    create_database: Callable[[str], str] = field(repr=False)
    folder: Path
    setup: str
    tables: Sequence[str]
    ignored: Sequence[str] = ()

    def database(self, name: str) -> str:
        """The URL of a new database with the handlers' tables.

        Raises:
            WrongInput: PostgreSQL refuses the setup.
        """
        url = self.create_database(name)
        try:
            with psycopg.connect(url, autocommit=True) as database:
                database.execute(self.setup.encode() or b"SELECT 1")
        except psycopg.Error as error:
            raise WrongInput(f"--setup: {error}") from None
        return url

    def rows(self, url: str) -> Rows:
        """The rows of the tables.

        Raises:
            WrongInput: there is no such table.
        """
        with psycopg.connect(url, autocommit=True) as database:
            return {table: self._rows(database, table) for table in self.tables}

    def _rows(self, database: psycopg.Connection[Any], table: str) -> Counter[str]:
        query = sql.SQL("SELECT (to_jsonb(t) - %s::text[])::text FROM {} AS t")
        name = sql.Identifier(*table.split("."))
        try:
            found = database.execute(query.format(name), (list(self.ignored),)).fetchall()
        except psycopg.errors.UndefinedTable as error:
            raise WrongInput(
                f"--table {table}: {error.diag.message_primary}",
                way_out="create the handlers' tables by --setup FILE, in SQL",
            ) from None
        return Counter(text for (text,) in found)


@dataclass(frozen=True)
class Outcome:
    """The result of a kill.

    Attributes:
        step: the number of the call to the database, from 0.
        call: the call: an SQL statement of the commit, or one of the handler.
        after: killed after the call, not before it.
        killed: False: the run has not come so far, because it has divided the records otherwise.
        lost: per table, the number of rows that are missing.
        surplus: per table, the number of rows too many.
    """

    step: int
    call: str
    after: bool
    killed: bool
    lost: Mapping[str, int]
    surplus: Mapping[str, int]

    @property
    def is_good(self) -> bool:
        """True if the tables are those of a run without faults."""
        return not any(self.lost.values()) and not any(self.surplus.values())

    def as_json(self) -> dict[str, object]:
        """For a report."""
        return {
            "step": self.step,
            "call": self.call,
            "killed": ("after" if self.after else "before") if self.killed else None,
            "lost": dict(self.lost),
            "surplus": dict(self.surplus),
        }


@dataclass(frozen=True)
class Trial:
    """A kill, and the database of its own."""

    step: int
    call: str
    after: bool
    url: str = field(repr=False)


def reference(stage: Stage) -> tuple[Rows, list[str]]:
    """The tables after a run without faults, and the calls to the database in its commits.

    Raises:
        WrongInput: nothing has changed; or the values of two such runs differ.
        Stopped: the worker has failed; or their numbers of rows differ.
    """
    urls = [stage.database(f"reference{number}") for number in range(2)]
    untouched = stage.rows(urls[0])
    order = _Order(stage, "reference")
    for url in urls:
        order.add(url)
    order.run()
    first, second = map(stage.rows, urls)
    if first == untouched:
        raise WrongInput(
            f"the handlers have changed nothing in {', '.join(stage.tables)}",
            way_out="give records that they accept, by --records FILE",
        )
    different = [table for table in stage.tables if first[table] != second[table]]
    for table in different:
        if (one := first[table].total()) != (other := second[table].total()):
            raise Stopped(
                f"two runs without faults leave {one:,} and {other:,} rows in {table}: what these"
                " handlers do is not all in their transaction, but goes on after it",
                way_out="do it with the transaction, before the handler returns; if the number of"
                " rows depends on how records are divided into batches, compare other tables",
            )
    if different:
        raise WrongInput(
            f"two runs without faults differ in {', '.join(different)}, so a difference after a"
            " fault would prove nothing",
            way_out="name the columns that differ (serial ids, times) by --ignore COLUMN",
        )
    calls = order.seen(0)
    if _LAST not in calls:
        raise WrongInput("no handler was called", way_out="give records, by --records FILE")
    return first, calls[: len(calls) - calls[::-1].index(_LAST)]


def run(
    stage: Stage, expected: Rows, calls: Sequence[str], on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Kill before and after each call, go on, and compare.

    Raises:
        Stopped: a worker ended otherwise than by the kill.
    """
    outcomes: list[Outcome] = []
    before: tuple[Trial, bool] | None = None
    trials = [(step, call, after) for step, call in enumerate(calls) for after in (False, True)]
    for wanted in [*trials, None]:
        order = _Order(stage, f"trial{len(outcomes) + (before is not None)}")
        if before is not None:
            order.add(before[0].url)
        now = None
        if wanted is not None:
            now = Trial(*wanted, stage.database(f"step{wanted[0]}_{int(wanted[2])}"))
            order.add(now.url, now.step, now.after)
        killed = order.run()
        if before is not None:
            outcomes.append(_compared(stage, expected, *before))
            on_outcome(outcomes[-1])
        before = (now, killed) if now is not None else None
    return outcomes


def _compared(stage: Stage, expected: Rows, trial: Trial, killed: bool) -> Outcome:
    found = stage.rows(trial.url)
    lost = {table: (expected[table] - found[table]).total() for table in stage.tables}
    surplus = {table: (found[table] - expected[table]).total() for table in stage.tables}
    return Outcome(trial.step, trial.call, trial.after, killed, lost, surplus)


class _Order:
    """What a process does, one work after the other; each in a group of its own, so that it waits
    for no killed member."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self._name = stage, name
        self._works: list[dict[str, Any]] = []
        self._file = stage.folder / f"{name}.json"

    def add(self, url: str, call: int = -1, after: bool = False) -> None:
        """Work on a database; with ``call`` until the kill."""
        group = f"{self._name}-{len(self._works)}"
        self._works.append({"url": url, "group": group, "call": call, "after": after})

    def run(self) -> bool:
        """Execute it; True if it was killed by its own order.

        Raises:
            Stopped: it has failed.
        """
        stage = self._stage
        self._file.touch(mode=0o600)  # it contains URLs with a password
        self._file.write_text(
            json.dumps({"app": stage.app, "brokers": stage.brokers, "works": self._works})
        )
        process = Process(
            f"the worker of {self._name}",
            [sys.executable, "-P", "-m", "oncely.testing.torture.child", str(self._file)],
            directory=Path.cwd(),
            log=self._file.with_suffix(".log"),
            environment=dict(os.environ),
        )
        try:
            code = process.wait(_LONGEST)
        finally:
            process.kill()
            self._file.unlink()
        killed = code == -signal.SIGKILL and self._works[-1]["call"] >= 0
        done = sum(self._seen_file(number).exists() for number in range(len(self._works)))
        if done < len(self._works) - killed or not (killed or code == 0):
            raise Stopped(
                f"{process.name} ended with code {code}\n{process.log_tail()}",
                way_out="let it work once without faults: oncely work",
            )
        return killed

    def seen(self, number: int) -> list[str]:
        """The calls to the database in one of the works."""
        found: list[str] = json.loads(self._seen_file(number).read_text())
        return found

    def _seen_file(self, number: int) -> Path:
        return self._file.with_suffix(f".{number}")


# -- records --------------------------------------------------------------------------------

SAMPLES = 5
"""Records of each topic, if none are given."""


@dataclass(frozen=True)
class Record:
    """A record to publish."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()


def read(file: Path, topics: Sequence[str]) -> list[Record]:
    """The records of a file: a JSON object in each line, ``{"topic", "key", "value", "headers"}``.

    A value that is no text is published as it is written. ``topic`` may be left out if there is
    only one.

    Raises:
        WrongInput: names the line.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"--records {file}: {error}") from None
    found = [_record(line, topics, f"--records {file}, line {number}")
             for number, line in enumerate(lines, 1) if line.strip()]  # fmt: skip
    if not found:
        raise WrongInput(f"--records {file}: no records")
    return found


def _record(line: str, topics: Sequence[str], where: str) -> Record:
    given = json_lines.members(line, where, {"topic", *json_lines.MEMBERS})
    named = msgspec.json.decode(given["topic"]) if "topic" in given else None
    topic = topics[0] if named is None and len(topics) == 1 else named
    if not isinstance(topic, str) or topic not in topics:
        raise WrongInput(f"{where}: topic {topic!r} has no handler", way_out=f"one of {topics}")
    value, key, headers, _ = json_lines.message_of(given, where)
    return Record(topic, value, key, headers)


def samples(topics: Sequence[str], schema: pa.Schema, *, raw: bool) -> list[Record]:
    """JSON objects with a value for each column of a decoder; ``{"id": …}`` if it decodes none."""
    names = pa.schema([("id", pa.int64())]) if raw else schema
    rows = [{one.name: _sample(one, n) for one in names} for n in range(SAMPLES)]
    return [Record(topic, json.dumps(row).encode(), str(n).encode())
            for topic in topics for n, row in enumerate(rows)]  # fmt: skip


def _sample(column: pa.Field, number: int) -> Any:
    kind = column.type
    if pa.types.is_boolean(kind):
        return number % 2 == 0
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind):
        return number
    if pa.types.is_timestamp(kind):
        return f"2026-01-01T00:00:{number:02d}Z"
    if pa.types.is_date(kind):
        return f"2026-01-{number + 1:02d}"
    return f"{column.name} {number}" if pa.types.is_string(kind) else None


def publish(broker: Broker, topics: Sequence[str], records: Sequence[Record]) -> None:
    """Create the topics, with one partition, and publish the records.

    Raises:
        Unavailable: they are not acknowledged.
    """
    for topic in topics:
        broker.create_topic(topic, 1)
    producer = Producer({**broker.client_config(), "linger.ms": 5, "log_level": 0})
    for one in records:
        producer.produce(one.topic, one.value, one.key, partition=0, headers=list(one.headers))
    if producer.flush(60):
        raise Unavailable("the records were not acknowledged")
