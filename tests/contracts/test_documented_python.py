"""The Python of the documentation runs as it is written, but for addresses and names."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import oncely
from oncely import Worker, files, jobs
from oncely.pipeline.proposal import written
from oncely.testing.servers.kafka import Broker
from tests.unit.test_documentation import PAGES, blocks

MakeTopic = Callable[..., str]
TESTED = {"testing.md"}  # test_documented_test.py runs it
PYTHON = {
    page.name: found
    for page in PAGES
    if (found := [one for one in blocks(page.read_text()) if one.language == "python"])
    and page.name not in TESTED
}
STREAM = {"df", "totals", "url"}
"""The names that a page's prose gives, beside ``spark``."""


@dataclass(frozen=True)
class World:
    """The places that stand for those of the pages."""

    names: dict[str, str]

    def run(self, text: str, known: dict[str, Any], where: str) -> None:
        """Run a block after those before it on its page."""
        for name, own in self.names.items():
            text = text.replace(name, own)
        if "worker" in known and "Worker(" not in text:  # an excerpt, for a worker like that one
            known["worker"] = Worker(
                "another", brokers=self.names["kafka:9092"], url="postgresql://h/d"
            )
        exec(compile(text, where, "exec", dont_inherit=True), known)


@pytest.fixture
def world(
    broker: Broker, make_topic: MakeTopic, database: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> World:  # fmt: skip
    name = f"billing-{uuid.uuid4().hex[:12]}"
    make_topic(name=f"{name}-jobs")
    topic = make_topic(records=[(0, b"k%d" % n, b'{"id": %d}' % n) for n in range(20)])
    for file in ("flights", "orders"):
        (tmp_path / f"{file}.toml").write_text(written({
            "name": f"{file}-{uuid.uuid4().hex[:12]}", "runtime": "processes", "processes": 1,
            "source": {"brokers": broker.bootstrap, "topics": [topic]},
            "decode": {"format": "json", "schema": "id BIGINT"},
            "sink": {"kind": "sql", "url": f"sqlite:///{tmp_path}/{file}.db", "table": "rows"},
        }))  # fmt: skip
    part = tmp_path / "part.parquet"
    pq.write_table(pa.table({"id": [1, 2]}), part)
    (tmp_path / "files.jsonl").write_text(json.dumps({"path": str(part)}) + "\n")
    (tmp_path / "paths.txt").write_text(f"{part}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["orders_job.py", "orders.toml"])
    monkeypatch.setattr(oncely, "write_stream", create_autospec(oncely.write_stream))
    monkeypatch.setattr(files, "read", create_autospec(files.read))
    return World({
        '"orders"': f'"{topic}"', '"billing"': f'"{name}"', "kafka:9092": broker.bootstrap,
        "postgresql://billing:${PASSWORD}@db/shop": database,
    })  # fmt: skip


@pytest.mark.parametrize("page", sorted(PYTHON))
def test_each_block_runs(page: str, world: World) -> None:
    known: dict[str, Any] = {"spark": MagicMock()}
    if any("write_stream(" in one.text for one in PYTHON[page]):
        known |= {name: MagicMock() for name in STREAM}
    for block in PYTHON[page]:
        world.run(block.text, known, f"{page}, line {block.line}")


@pytest.mark.parametrize("page", ["destinations.md", "handlers.md"])
def test_the_handler_writes_each_record_once(page: str, world: World, database: str) -> None:
    with psycopg.connect(database) as session:
        session.execute("CREATE TABLE bills (id bytea PRIMARY KEY, of bytea)")
    known: dict[str, Any] = {}
    (block,) = [one for one in PYTHON[page] if "INSERT INTO bills" in one.text]
    world.run(block.text, known, page)
    done = known["worker"].run("latest")
    assert (done.ended, done.records) == ("complete", 20)
    with psycopg.connect(database) as session:
        (found,) = session.execute("SELECT count(*), min(id), min(of) FROM bills").fetchall()
    assert found == (20, b"k0", b'{"id": 0}')


def test_a_job_of_the_page_is_enqueued(world: World, database: str) -> None:
    with psycopg.connect(database) as session:
        session.execute("CREATE TABLE invoices (customer int)")
    known: dict[str, Any] = {}
    (block,) = [one for one in PYTHON["handlers.md"] if "@jobs.job(worker)" in one.text]
    world.run(block.text, known, "handlers.md")
    assert isinstance(known["send_invoice"], jobs.Job)
    assert known["worker"].run("latest").records == 2
    with psycopg.connect(database) as session:
        assert session.execute("SELECT customer FROM invoices").fetchall() == [(7,), (7,)]
