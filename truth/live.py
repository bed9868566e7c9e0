"""Audits of a pipeline while it runs under load: nothing may be reported."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from random import Random

from rich.console import Console

from oncely import Pipeline
from oncely.audit import audit
from oncely.errors import OncelyError
from oncely.testing.processes import await_that, running
from oncely.testing.servers.kafka import Broker
from truth.source import SCHEMA, Source

_PAUSE = 0.05  # seconds between portions of 200 records on average
_START = 600.0  # seconds that a pipeline may take to start on a busy machine
_FILE = """
name = "{name}"
delivery = "exactly_once"

[source]
brokers = "{brokers}"
topics = ["{name}"]

[decode]
format = "json"
schema = "{schema}"

[sink]
max_rejects = "50%"
{sink}

[spark]
master = "local[1,4]"
"""


def clean_audits(
    broker: Broker, name: str, sink: str, number: int, console: Console
) -> tuple[int, int]:
    """Audit a running pipeline; returns the number of audits, and of those with a finding.

    Records are published all the time, some in transactions, of which a part is aborted. An audit
    that is not clean, compares no record, or ends with an error, is a false alarm.

    Args:
        broker: the cluster.
        name: of the pipeline and its topic.
        sink: the lines of the pipeline file's section.
        number: the number of audits.
        console: is told what was found.
    """
    broker.create_topic(name, 4)
    source = Source(broker.bootstrap, name, 4, Random(number))
    source.publish(500)
    stop = threading.Event()
    load = threading.Thread(target=_publish, args=(source, stop), daemon=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "live.toml"
        file.write_text(_FILE.format(name=name, brokers=broker.bootstrap, schema=SCHEMA, sink=sink))
        with running(file):
            pipeline = Pipeline.from_file(file)
            await_that(lambda: any(_positions(pipeline)), "a commit", _START)
            load.start()
            try:
                alarms = _audited(pipeline, number, console)
            finally:
                stop.set()
                load.join()
    return number, alarms


def _audited(pipeline: Pipeline, number: int, console: Console) -> int:
    """The number of audits that were wrong. Before each of them the pipeline has committed more."""
    alarms, seen, before = 0, set(), _positions(pipeline)
    for _ in range(number):
        await_that(lambda: _positions(pipeline) != before, "a commit", _START)  # noqa: B023
        before = _positions(pipeline)
        try:
            report = audit(pipeline)
        except OncelyError as error:
            alarms += 1
            console.print(f"an audit ended with an error: {error}")
            continue
        seen.add(report.records)
        if report.verdict != "clean" or report.records <= 0:
            alarms += 1
            console.print(f"false alarm: {json.dumps(report.as_json())[:2000]}")
    console.print(
        f"{pipeline.settings.name}: {number} audits of {min(seen, default=0):,} to"
        f" {max(seen, default=0):,} records, {alarms} alarms"
    )
    return alarms


def _positions(pipeline: Pipeline) -> list[int | None]:
    return [one.position for one in pipeline.status().partitions]


def _publish(source: Source, stop: threading.Event) -> None:
    while not stop.wait(_PAUSE):
        source.portion()
