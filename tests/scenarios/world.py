"""What scenarios share: a topic with known records, a pipeline, and a reader of its own.

The reader (:func:`verdict`) uses nothing of Oncely: it consumes the topic, reads the tables by
plain SQL and compares the two, offset by offset.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from oncely.testing.processes import Child, child, running
from oncely.testing.readers import messages
from oncely.verify.report import Report
from tests import plain_sql
from tests.scenarios import runtimes
from tests.verifytools import verified

if TYPE_CHECKING:
    from oncely.pipeline import Pipeline

SCHEMA = "id BIGINT NOT NULL, grp STRING, pad STRING"


@dataclass
class World:
    """One topic, one database, one pipeline name."""

    brokers: str
    url: str
    topic: str
    folder: Path
    name: str = field(default_factory=lambda: f"p-{uuid.uuid4().hex[:8]}")
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        """The pipeline file's content; keyword arguments add to its sections."""
        base: dict[str, Any] = {
            "name": self.name,
            "delivery": "exactly_once",
            "source": {"brokers": self.brokers, "topics": [self.topic]},
            "decode": {"format": "json", "schema": SCHEMA},
            "sink": {"kind": "sql", "url": self.url, "table": "rows", "keep_source": True},
            "spark": {"master": "local[2,4]", "trigger": "0 seconds"},
        }
        for section, more in {**self.overrides, **sections}.items():
            base[section] = {**base.get(section, {}), **more}
        # A transform by Spark needs Spark, wherever the other runs of the test are.
        return base if "spark" in base.get("transform", {}) else base | runtimes.settings()

    @property
    def events(self) -> Path:
        """The event log of the pipeline."""
        return self.folder / f"{self.name}.events"

    @property
    def logged(self) -> tuple[str, str]:
        """Arguments of `oncely run` that append to the event log."""
        return "--events", str(self.events)

    def file(self, **sections: Mapping[str, Any]) -> Path:
        """The pipeline file, written."""
        path = self.folder / f"{self.name}-{uuid.uuid4().hex[:4]}.toml"
        path.write_text(toml(self.settings(**sections)))
        return path

    def run(self, spark: Any, **sections: Mapping[str, Any]) -> None:
        """Run the pipeline until all that is there is committed, in this process.

        Args:
            spark: the fixture ``runtime`` or ``spark``.
            sections: added to those of the pipeline file.
        """
        from oncely.config import parse
        from oncely.pipeline import Pipeline

        pipeline = Pipeline(parse(self.settings(**sections)))
        assert pipeline.run("latest", spark=spark, events=self.events)

    def publish(self, count: int, *, pad: int = 0, partitions: int = 4, first: int = 0) -> None:
        """Records with ascending ids, round robin over the partitions."""
        produce(
            self.brokers,
            self.topic,
            ((i % partitions, str(i).encode(), good(i, pad)) for i in range(first, first + count)),
        )

    def sql(self, statement: str, *params: object) -> list[tuple[Any, ...]]:
        """Ask the database, as an outsider."""
        return plain_sql.ask(self.url, statement, params)

    def make_table(self) -> None:
        """The table before its pipeline, with a column that numbers rows as they are inserted."""
        self.sql(
            "CREATE TABLE rows (id bigint NOT NULL, grp text, pad text, kafka_topic text,"
            " kafka_partition integer, kafka_offset bigint, inserted bigserial)"
        )

    def count(self) -> int:
        """Rows in the table; 0 when there is none yet."""
        if not self.sql("SELECT to_regclass('rows')")[0][0]:
            return 0
        return int(self.sql("SELECT count(*) FROM rows")[0][0])


def good(i: int, pad: int = 0) -> bytes:
    """Record ``i``."""
    return json.dumps({"id": i, "grp": f"g{i % 7}", "pad": "x" * pad}).encode()


def produce(
    brokers: str, topic: str, records: Iterable[tuple[int, bytes | None, bytes | None]]
) -> None:
    """Send (partition, key, value) and wait for every acknowledgement."""
    producer = Producer(
        {"bootstrap.servers": brokers, "linger.ms": 20, "message.max.bytes": 64 << 20}
    )
    for partition, key, value in records:
        while True:
            try:
                producer.produce(topic, value, key, partition=partition)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0


def toml(value: Mapping[str, Any]) -> str:
    """A mapping of plain values and tables as TOML."""
    lines = [f"{k} = {_plain(v)}" for k, v in value.items() if not isinstance(v, Mapping)]

    def tables(prefix: str, table: Mapping[str, Any]) -> None:
        lines.append(f"[{prefix}]")
        lines.extend(
            f"{json.dumps(k)} = {_plain(v)}" for k, v in table.items() if not isinstance(v, Mapping)
        )
        for k, v in table.items():
            if isinstance(v, Mapping):
                tables(f"{prefix}.{json.dumps(k)}", v)

    for k, v in value.items():
        if isinstance(v, Mapping):
            tables(k, v)
    return "\n".join(lines) + "\n"


def _plain(value: object) -> str:
    return json.dumps(value)  # TOML's strings, numbers, booleans and lists read like JSON's


# -- the reader ------------------------------------------------------------------------------


def topic_content(brokers: str, topic: str) -> dict[tuple[int, int], bytes | None]:
    """Every committed record up to the last stable offset: (partition, offset) to value."""
    return {(m.partition(), m.offset()): m.value() for m in messages(brokers, topic)}


@dataclass(frozen=True)
class Verdict:
    """What the reader found; offsets are (partition, offset)."""

    records: int
    rows: int
    rejects: int
    lost: tuple[tuple[int, int], ...]
    duplicated: tuple[tuple[int, int], ...]
    invented: tuple[tuple[int, int], ...]
    disordered: tuple[tuple[int, int], ...]

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.invented or self.disordered)


def verdict(world: World, table: str = "rows", of: str = "kafka_partition") -> Verdict:
    """Compare topic and tables: each record is one row or one reject, in the order of each ``of``,
    which is a column."""
    topic = topic_content(world.brokers, world.topic)
    # A row's xmin is the transaction that inserted it. A later range is written only after the
    # one before has committed, so it can't have a lower one. (Where a row lies says nothing:
    # transactions that run side by side leave each other room.) Within a transaction the rows'
    # own numbers tell, where the table has them.
    number = "inserted" if _numbered(world, table) else "0"
    inserted = world.sql(
        f"SELECT kafka_partition, kafka_offset, {of}, xmin::text::bigint, {number} FROM {table}"
        " ORDER BY 3, 1, 2"
    )
    rows = [(p, o) for p, o, *_ in inserted]
    rejects = [
        (p, o)
        for p, o in world.sql(
            'SELECT "partition", "offset" FROM oncely_rejects WHERE pipeline = %s', world.name
        )
    ]
    seen = Counter([*rows, *rejects])
    disordered = [
        (after[0], after[1])
        for before, after in pairwise(inserted)
        if before[2] == after[2] and after[3:] < before[3:]
    ]
    return Verdict(
        len(topic),
        len(rows),
        len(rejects),
        lost=tuple(sorted(topic.keys() - seen.keys())),
        duplicated=tuple(sorted(at for at, n in seen.items() if n > 1)),
        invented=tuple(sorted(seen.keys() - topic.keys())),
        disordered=tuple(disordered),
    )


def _numbered(world: World, table: str) -> bool:
    """Whether the table is one of :meth:`World.make_table`."""
    return bool(
        world.sql(
            "SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = 'inserted'"
            " AND NOT attisdropped",
            table,
        )
    )


def assert_exactly_once(world: World, *, rejects: int = 0, of: str = "kafka_partition") -> Verdict:
    """Nothing lost, doubled, invented or out of order, and the ledger says the same."""
    found = verdict(world, of=of)
    assert found.clean, (
        f"{found.records} records: lost {found.lost[:5]} duplicated "
        f"{found.duplicated[:5]} invented {found.invented[:5]} disordered {found.disordered[:5]}"
    )
    assert found.rejects == rejects
    assert found.rows == found.records - rejects
    assert_history(world)
    assert_unbroken(world)
    return found


def steps(world: World) -> Report:
    """The result of `oncely verify`, with the event log."""
    from oncely.config import parse

    return verified(parse(world.settings()), world.events)


def assert_unbroken(world: World) -> None:
    """No step is broken; runs without event log may leave some unknown."""
    if world.events.exists():
        found = steps(world)
        assert found.verdict != "broken", found.as_json()


def assert_steps(world: World) -> None:
    """Every step of the ledger and of the event log follows from the one before it."""
    assert steps(world).verdict == "holds", steps(world).as_json()


def assert_history(world: World) -> None:
    """Ranges of a partition follow each other without gap or overlap, up to the position."""
    ranges = world.sql(
        'SELECT topic, "partition", range_start, range_end FROM oncely_ranges'
        " WHERE pipeline = %s AND superseded = 0 ORDER BY 1, 2, 3",
        world.name,
    )
    ends: dict[tuple[str, int], int] = {}
    for topic, partition, start, end in ranges:
        assert start == ends.get((topic, partition), start), "the history has a gap or an overlap"
        ends[topic, partition] = end
    positions = world.sql(
        'SELECT topic, "partition", "position" FROM oncely_positions WHERE pipeline = %s',
        world.name,
    )
    for topic, partition, position in positions:
        assert ends.get((topic, partition), position) == position


# -- processes -------------------------------------------------------------------------------


@contextmanager
def running_slow(file: Path, *arguments: str) -> Iterator[Child]:
    """The slow pipeline of ``slow.py`` as a child."""
    with child(
        ["tests.scenarios.slow", str(file), *arguments], file.with_suffix(".log")
    ) as process:
        yield process


def run(world: World, runtime: Any, **sections: Any) -> Pipeline:
    """Run a pipeline of the world up to the present ends, in this process."""
    from oncely.config import parse
    from oncely.pipeline import Pipeline

    pipeline = Pipeline(parse(world.settings(**sections)))
    pipeline.run("latest", spark=runtime)
    return pipeline


def run_to_end(file: Path, *arguments: str, expect: int = 0, timeout: float = 300) -> None:
    """`oncely run --until latest` as a child, to its end."""
    with running(file, "--until", "latest", *arguments) as process:
        code = process.wait(timeout)
    assert code == expect, f"exit code {code}\n{file.with_suffix('.log').read_text()[-4000:]}"
