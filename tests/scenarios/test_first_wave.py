"""What the first wave wrote is taken over and continued.

tests/first_wave/README.md says what is restored. Readers that share no code with the pipeline
compare source and destination; each of the tests below is about one pipeline, from its takeover
to its reset.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncely import Pipeline, parse
from oncely.core import events
from oncely.files import table_of
from oncely.files.verify import verify
from oncely.ledgers.sql.tables import VERSION
from oncely.sources.reset import Verb
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from tests.conftest import produce
from tests.first_wave.cases import CASES, FIRST, SECOND, THIRD, Case, good, ident, key, value
from tests.first_wave.restore import Restored, remove, restore
from tests.scenarios import runtimes, world
from tests.scenarios.files_world import FilesWorld
from tests.scenarios.topic_world import TopicWorld
from tests.scenarios.world import topic_content


@pytest.fixture(scope="module")
def restored(
    broker: Broker, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Restored]:
    """All that the first wave left, in this run's servers."""
    url = postgres.create_database("wave1")
    found = restore(broker.bootstrap, url, tmp_path_factory.mktemp("wave1"))
    yield found
    remove(broker.bootstrap)
    postgres.drop_database("wave1")


# -- readers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """What the ledger says: the epoch that was given out last, and positions by partition."""

    epoch: int
    positions: dict[int, int]


@dataclass
class Table:
    """A table of PostgreSQL or SQLite, and the ledger beside it."""

    case: Case
    url: str

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file:
                return file.execute(text).fetchall()
        with psycopg.connect(self.url, autocommit=True) as database:
            cursor = database.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def widen(self) -> None:
        """As a user does before larger ids are let in; SQLite has one type for all of them."""
        if not self.url.startswith("sqlite"):
            self.sql(f"ALTER TABLE {self.case.sink['table']} ALTER COLUMN id TYPE bigint")

    def ids(self) -> Counter[int]:
        return Counter(one for (one,) in self.sql(f"SELECT id FROM {self.case.sink['table']}"))

    def standing(self) -> Standing:
        mine = f"WHERE pipeline = '{self.case.name}'"
        ((epoch,),) = self.sql(f"SELECT epoch FROM oncely_pipelines {mine}")
        found = self.sql(f'SELECT "partition", "position" FROM oncely_positions {mine}')
        return Standing(epoch, dict(found))


class _InTopic(TopicWorld):
    """A ledger topic, read by a plain consumer."""

    def standing(self) -> Standing:
        keys = [(json.loads(one.key()), one.value()) for one in self.records(self.ledger)]
        epochs = [json.loads(value)["epoch"] for key, value in keys if key[0] == "pipeline"]
        return Standing(epochs[-1], self.positions())

    def forget(self) -> None:
        """Delete the positions from the ledger topic."""
        keys = {one.key() for one in self.records(self.ledger)}
        gone = [(0, key, None) for key in keys if json.loads(key)[0] == "position"]
        world.produce(self.brokers, self.ledger, gone)
        assert self.positions() == {}


class Topic(_InTopic):
    """An output topic."""

    def ids(self) -> Counter[int]:  # type: ignore[override]
        return Counter(json.loads(one.value())["id"] for one in self.records())


class Files(FilesWorld, _InTopic):
    """The files that the manifest names, each compared with its entry."""

    def ids(self) -> Counter[int]:  # type: ignore[override]
        return Counter(row["id"] for row in self.rows())


def reader_of(case: Case, restored: Restored, folder: Path) -> Any:
    known = restored.known
    match case.sink["kind"]:
        case "sql":
            return Table(case, case.sink["url"].format(**known))
        case "kafka":
            return Topic(known["brokers"], "", case.topic, folder, case.name)
    root = Path(known["files"].removeprefix("file://")) / case.name
    return Files(known["brokers"], "", case.topic, folder, case.name, root=root)


# -- what must be there ----------------------------------------------------------------------


def too_large(case: Case, i: int) -> bool:
    """Whether the columns as they were refuse record ``i``."""
    return ident(i) != i and not case.infer


def rows_of(case: Case, numbers: list[int]) -> Counter[int]:
    """The ids in the destination when these records have become rows."""
    if "keys" not in case.sink:
        return Counter(ident(i) for i in numbers)
    return Counter({i % 8: ident(i) for i in sorted(numbers, key=ident)}.values())


def letters_of(numbers: list[int]) -> list[Any]:
    return sorted((key(i), value(i)) for i in numbers)


def listed(pipeline: Pipeline) -> list[Any]:
    """Keys and values of the dead letters that wait."""
    found = pipeline.rejects(1_000)
    assert found.total == len(found.listed)
    assert all(one.headers == [("h", b"1")] for one in found.listed)
    return sorted((one.key, one.value) for one in found.listed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pipeline_of_the_first_wave_goes_on(
    case: Case,
    restored: Restored,
    tmp_path: Path,
    broker: Broker,
    runtime: Any,
    request: pytest.FixtureRequest,
) -> None:
    session = request.getfixturevalue("spark") if case.transform else runtime
    reader = reader_of(case, restored, tmp_path)
    narrow, wide = (today(case, restored, wide=wide) for wide in (False, True))
    every = [*FIRST, *SECOND, *THIRD]
    before = reader.standing()
    if case.forgets:
        reader.forget()
    of = case.partitions
    produce(broker, case.topic, [(i % of, key(i), value(i), [("h", b"1")]) for i in THIRD])

    # It goes on where it stood, and what was under way takes effect once.
    opened = taken_over(narrow, session)
    assert not opened.first_start
    assert opened.epoch == before.epoch + 1
    if isinstance(reader, Table):
        assert reader.sql("SELECT DISTINCT schema_version FROM oncely_pipelines"
                          f" WHERE pipeline = '{case.name}'") == [(VERSION,)]  # fmt: skip
    at = {tp.partition: position for tp, position in opened.positions.items()}
    assert at == {**dict.fromkeys(range(of), 0), **before.positions}
    done = set(FIRST) if case.replays else set()  # with wider columns, by the first wave
    rows = [i for i in every if good(i) and (i in done or not too_large(case, i))]
    waiting = [i for i in every if i not in rows]
    assert reader.ids() == rows_of(case, rows)
    assert listed(narrow) == letters_of(waiting)
    content = topic_content(broker.bootstrap, case.topic)
    assert Counter(content.values()) == Counter(map(value, every)), "the source as it was"
    assert reader.standing().positions == dict(Counter(number for number, _ in content))

    # Dead letters are replayed, those of the first wave among them.
    if isinstance(reader, Table):
        reader.widen()
    passes = [i for i in waiting if good(i)]
    assert wide.replay(spark=session) == (len(passes), len(waiting) - len(passes))
    rows = [i for i in every if good(i)]
    assert reader.ids() == rows_of(case, rows)
    assert listed(wide) == letters_of([i for i in every if not good(i)])
    if isinstance(reader, Files):
        assert verify(table_of(wide)).problems == ()

    # A reset reads from the beginning.
    wide.reset(Verb("to-earliest", 0), execute=True)
    assert reader.standing().positions == dict.fromkeys(range(of), 0)
    assert listed(wide) == []
    if "keys" in case.sink:
        taken_over(wide, session)
        assert reader.ids() == rows_of(case, rows)


def today(case: Case, restored: Restored, *, wide: bool) -> Pipeline:
    """The pipeline, in batches that take all there is: each costs a second."""
    made = case.settings(restored.known, wide=wide) | {"spark": {"max_records_per_batch": 1_000}}
    return Pipeline(parse(made if case.transform else made | runtimes.settings()))


def taken_over(pipeline: Pipeline, runtime: Any) -> events.PipelineOpened:
    """Run to the end; how it was opened."""
    heard: list[events.Event] = []
    assert pipeline.run("latest", spark=runtime, listener=heard.append)
    (opened,) = (one for one in heard if isinstance(one, events.PipelineOpened))
    return opened
