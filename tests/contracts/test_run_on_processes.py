"""`oncely run` on processes of this machine: a topic into a table, without Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from confluent_kafka import Producer

from oncely import artifacts, extras
from oncely.config import parse
from oncely.core import events
from oncely.errors import WrongInput
from oncely.pipeline import Pipeline
from oncely.testing.servers.kafka import Broker
from oncely.threads import StopSignal
from tests.conftest import produce
from tests.sinktools import Place

MakeTopic = Callable[..., str]
PARTITIONS = 3
ON_PROCESSES = {"runtime": "processes", "processes": 2}


def value(number: int) -> bytes:
    return json.dumps({"id": number}).encode()


def pipeline_of(
    broker: Broker,
    topic: str,
    place: Place,
    top: Mapping[str, object] = ON_PROCESSES,
    **source: object,
) -> Pipeline:
    return Pipeline(
        parse(
            {
                "name": topic,
                **top,
                "source": {"brokers": broker.bootstrap, "topics": [topic], **source},
                "decode": {"format": "json", "schema": "id BIGINT"},
                "sink": {
                    "kind": "sql",
                    "url": place.url,
                    "table": f"{place.schema}.rows" if place.schema else "rows",
                    "max_rejects": "100%",
                },
                "spark": {"max_records_per_batch": 100, "trigger": "0 seconds"},
            }
        )
    )


def test_each_record_once(broker: Broker, make_topic: MakeTopic, place: Place) -> None:
    """Several batches in two processes; one record is no JSON, and the log ends in a hole."""
    given = [(number % PARTITIONS, None, value(number)) for number in range(400)]
    topic = make_topic(partitions=PARTITIONS, records=[*given, (1, None, b"no JSON")])
    producer = Producer({**broker.client_config(), "transactional.id": f"of-{topic}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value(1_000), partition=2)
    producer.abort_transaction(30)
    told: list[events.Event] = []
    pipeline = pipeline_of(broker, topic, place)
    assert pipeline.run("latest", listener=told.append)
    assert place.sql("SELECT count(*), count(DISTINCT id), min(id), max(id) FROM rows") == [
        (400, 400, 0, 399)
    ]
    assert place.sql("SELECT count(*) FROM oncely_rejects") == [(1,)]
    ends = sorted(at for at in pipeline.source.stable_end().values())
    positions = place.sql('SELECT "position" FROM oncely_positions ORDER BY 1')
    assert [at for (at,) in positions] == ends, "also over the hole"
    batches = [one for one in told if isinstance(one, events.BatchCommitted)]
    assert len(batches) > 3
    produce(broker, topic, [(0, None, value(400))])
    assert pipeline_of(broker, topic, place).run("latest")
    assert place.sql("SELECT count(*), max(id) FROM rows") == [(401, 400)]


def test_a_day_in_a_notebook(broker: Broker, make_topic: MakeTopic, on_sqlite: Place) -> None:
    """Run, audit, repair and verify, each by what the one before has returned."""
    given = [(number % PARTITIONS, None, value(number)) for number in range(40)]
    topic = make_topic(partitions=PARTITIONS, records=[*given, (1, None, b"no JSON")])
    pipeline = pipeline_of(broker, topic, on_sqlite)
    done = pipeline.run("latest")
    assert done
    assert (done.ended, done.records, done.rows, done.rejects) == ("complete", 41, 40, 1)
    assert done.seconds > 0
    assert pipeline.audit().verdict == "clean"

    on_sqlite.sql("DELETE FROM rows WHERE id = 7")
    found = pipeline.audit().findings
    assert [one.kind for one in found] == ["lost"]
    planned = pipeline.repair(found)
    assert (planned.executed, planned.offsets) == (False, {"lost": 1})
    assert pipeline.repair([*found, *found], execute=True).done.counts.rows == 1
    assert pipeline.audit().verdict == "clean"
    assert pipeline.verify().verdict == "holds"

    stop = StopSignal()
    stop.ask()
    more = pipeline.work(stop=stop)
    assert not more
    assert (more.ended, more.records) == ("stopped", 0)
    produce(broker, topic, [(0, None, value(400))])
    worked = pipeline.work("latest")
    assert (bool(worked), worked.records, worked.rows) == (True, 1, 1)


@pytest.mark.parametrize("verb", ["run", "work"])
def test_a_start_imports_no_pandas(
    broker: Broker, make_topic: MakeTopic, on_sqlite: Place, tmp_path: Path, verb: str
) -> None:
    """The driver and its processes; an import costs each 0.3 s."""
    topic = make_topic(partitions=PARTITIONS, records=[(0, None, value(1))])
    (tmp_path / "p.toml").write_text(
        f"""
name = "{topic}"
runtime = "processes"
[source]
brokers = "{broker.bootstrap}"
topics = ["{topic}"]
[decode]
format = "json"
schema = "id BIGINT"
[sink]
kind = "sql"
url = "{on_sqlite.url}"
table = "rows"
"""
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            open({str(tmp_path / "imported")!r}, "w").close()
sys.meta_path.insert(0, Finder())
"""
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-m", "oncely.cli", verb, tmp_path / "p.toml", "--until", "latest"],
        env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True,
    )  # fmt: skip
    assert on_sqlite.sql("SELECT id FROM rows") == [(1,)]
    assert not (tmp_path / "imported").exists()


def test_a_plan_needs_no_java(
    broker: Broker, make_topic: MakeTopic, on_sqlite: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_java() -> str:
        raise WrongInput("there is no Java")

    monkeypatch.setattr(artifacts, "java", no_java)
    monkeypatch.setattr(extras, "is_installed", lambda one: one not in extras.PACKAGES["spark"])
    plan = pipeline_of(broker, make_topic(), on_sqlite).plan()
    assert not plan.problems
    assert not [one for one in plan.notes if "park" in one]
    assert plan.connections is not None
    assert plan.connections.tasks == 2


@pytest.mark.parametrize("top", [{}, {"delivery": "at_least_once"}])
def test_a_plan_names_the_extra_of_spark(
    broker: Broker, make_topic: MakeTopic, on_sqlite: Place, monkeypatch: pytest.MonkeyPatch,
    top: Mapping[str, object],
) -> None:  # fmt: skip
    """A problem, unless a worker can do without."""
    monkeypatch.setattr(extras, "is_installed", lambda one: one not in extras.PACKAGES["spark"])
    plan = pipeline_of(broker, make_topic(), on_sqlite, {**top, "runtime": "spark"}).plan()
    told = "a run on Spark needs the package pyspark, which is not installed"
    assert [one.key for one in plan.problems if told in one.message] == ["spark"] * bool(top)
    assert [told in one for one in plan.notes].count(True) == (0 if top else 1)


@pytest.mark.parametrize(
    ("top", "problems"),
    [({}, []), ({"delivery": "at_least_once"}, ["spark"])],
    ids=["a worker can run it", "only a run"],
)
def test_a_plan_requires_java_where_only_spark_can_run(
    broker: Broker, make_topic: MakeTopic, on_sqlite: Place, monkeypatch: pytest.MonkeyPatch,
    top: Mapping[str, object], problems: list[str],
) -> None:  # fmt: skip
    def no_java() -> str:
        raise WrongInput("there is no Java")

    monkeypatch.setattr(artifacts, "java", no_java)
    plan = pipeline_of(broker, make_topic(), on_sqlite, {**top, "runtime": "spark"}).plan()
    assert [one.key for one in plan.problems] == problems
    told = [one for one in plan.notes if "there is no Java" in one]
    assert len(told) == (0 if problems else 1)
    assert all("`oncely work`" in one for one in told)
