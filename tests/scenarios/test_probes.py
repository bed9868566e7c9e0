"""The probes of a run, as a supervisor and Prometheus ask for them."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg

from oncely.config import parse
from oncely.core import events
from oncely.errors import OncelyError
from oncely.extras import is_installed
from oncely.phases import PHASES
from oncely.pipeline import Pipeline
from oncely.pipeline.running import Http
from oncely.testing.processes import await_that, child
from oncely.testing.servers.process import free_port
from oncely.threads import StopSignal
from tests.prometheus import samples
from tests.scenarios.commands import oncely
from tests.scenarios.world import World, assert_exactly_once


def asked(port: int, path: str) -> tuple[int, str]:
    """Status and body."""
    url = f"http://127.0.0.1:{port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def assert_all_phases(found: Mapping[tuple[str, str], float], world: World) -> None:
    seconds = {
        phase: found["oncely_batch_seconds_sum", f'pipeline="{world.name}",phase="{phase}"']
        for phase in ("process", *PHASES)
    }
    assert all(one > 0 for one in seconds.values()), seconds


@contextmanager
def running(world: World, runtime: Any, http: Http) -> Iterator[list[events.Event]]:
    stop, failed, heard = StopSignal(), list[OncelyError](), list[events.Event]()

    def run() -> None:
        try:
            pipeline = Pipeline(parse(world.settings()))
            pipeline.run(
                stop=stop, spark=runtime, http=http, events=world.events, listener=heard.append
            )
        except OncelyError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield heard
    finally:
        stop.ask()
        thread.join(180)
        stop.ask()
        thread.join(180)
        assert not thread.is_alive()
        assert not failed


def waiting(page: str) -> list[float]:
    """Since when records of each partition wait without a commit."""
    name = "oncely_waiting_since_timestamp_seconds"
    return [at for (found, _), at in samples(page).items() if found == name]


def test_a_run_that_cannot_commit_is_not_alive_and_recovers(
    make_world: Callable[..., World], runtime: Any
) -> None:
    world, port = make_world(2), free_port()
    world.publish(100, partitions=2)
    with running(world, runtime, Http(f":{port}", consuming_ttl=1.0)) as heard:
        await_that(lambda: world.count() == 100, "rows")
        await_that(lambda: asked(port, "/readyz")[0] == 200, "ready")
        await_that(lambda: asked(port, "/livez")[0] == 200, "alive")
        with psycopg.connect(world.url) as other:
            other.execute("LOCK TABLE rows")
            world.publish(50, first=100, partitions=2)
            body = await_that(
                lambda: dict([asked(port, "/livez")]).get(500), "no commit, and records are left"
            )
            document = json.loads(body)
            assert document["errors"]["consuming_ttl_exceeded"]
            assert "50 offsets" in document["reasons"][0]
            since = waiting(asked(port, "/metrics")[1])
            assert len(since) == 2
            assert all(-600 < at - time.time() < 0 for at in since)
        await_that(lambda: asked(port, "/livez")[0] == 200, "alive again")
        await_that(lambda: world.count() == 150, "the other rows")
        await_that(lambda: events.Polled() in heard, "an idle trigger")
        lag = f'consumergroup="oncely-{world.name}",topic="{world.topic}",partition="1"'
        records = "oncely_records_total", f'pipeline="{world.name}",outcome="written"'
        found = await_that(
            lambda: one if (one := samples(asked(port, "/metrics")[1]))[records] == 150 else None,
            "the metrics of all records",
        )
        assert found["kafka_consumergroup_current_offset", lag] == 75
        await_that(lambda: not waiting(asked(port, "/metrics")[1]), "no records wait")
        assert_all_phases(found, world)
    assert_exactly_once(world)


def test_an_address_that_is_taken_ends_it_before_anything_starts(
    make_world: Callable[..., World],
) -> None:
    world = make_world(1)
    with psycopg.connect(world.url) as session:
        taken = f"{session.info.host}:{session.info.port}"
    done = oncely("run", world.file(), "--http", taken, expect=1)
    assert f"--http {taken}: can't listen" in done.stderr
    assert "Spark" not in done.stderr
    assert "no duration" in oncely("run", world.file(), "--http", ":0", "--polling-ttl", "x",
                                   expect=2).stderr  # fmt: skip
    done = oncely("run", world.file(), "--metrics", taken, expect=1)
    assert f"--metrics {taken}: can't listen" in done.stderr
    assert "need --http" in oncely("run", world.file(), "--polling-ttl", "1", expect=2).stderr
    assert "no address" in oncely("run", world.file(), "--http", "here", expect=2).stderr
    assert "longer than 0" in oncely("run", world.file(), "--http", ":0", "--consuming-ttl", "0",
                                     expect=2).stderr  # fmt: skip
    assert world.sql("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]


class Collector:
    """Receives spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self._received: list[bytes] = []

    @contextmanager
    def serving(self) -> Iterator[dict[str, str]]:
        """The environment of a process that sends to it."""
        received = self._received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/v1/traces"
            yield {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
            server.shutdown()

    def counts(self, group: str) -> dict[tuple[str, int], int]:
        """The messages of each topic-partition, by spans of a consumer group."""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

        found: Counter[tuple[str, int]] = Counter()
        for body in self._received:
            for resource in otlp.ExportTraceServiceRequest.FromString(body).resource_spans:
                for span in (one for scope in resource.scope_spans for one in scope.spans):
                    values = {one.key: one.value for one in span.attributes}
                    assert values["messaging.consumer.group.name"].string_value == group
                    topic = values["messaging.destination.name"].string_value
                    number = int(values["messaging.destination.partition.id"].string_value)
                    count = values["messaging.batch.message_count"].int_value
                    found[topic, number] += count
        return dict(found)


def test_a_worker_has_them_too(make_world: Callable[..., World]) -> None:
    world, port, plain = make_world(2), free_port(), free_port()
    world.publish(100, partitions=2)
    file = world.file(worker={"group": "mine"})
    at = ["--http", f":{port}", "--consuming-ttl", "30", "--metrics", f":{plain}"]
    log, collector = file.with_suffix(".log"), Collector()
    with (
        collector.serving() as otel,
        child(["oncely.cli", "work", str(file), *at], log, otel) as worker,
    ):
        await_that(lambda: world.count() == 100 or worker.poll() is not None, "rows")
        assert worker.poll() is None, log.read_text()
        await_that(lambda: asked(port, "/readyz")[0] == 200, "ready")
        assert asked(port, "/livez")[0] == 200
        at_end = f'consumergroup="mine",topic="{world.topic}",partition="1"'
        lag = "kafka_consumergroup_lag", at_end
        await_that(lambda: samples(asked(port, "/metrics")[1]).get(lag) == 0, "no lag")
        pending = "oncely_rejects_pending", f'pipeline="{world.name}"'
        await_that(lambda: samples(asked(plain, "/metrics")[1]).get(pending) == 0, "no rejects")
        assert_all_phases(samples(asked(plain, "/metrics")[1]), world)
        assert asked(plain, "/livez")[0] == 404
        if is_installed("opentelemetry.sdk"):
            sent = {(world.topic, 0): 50, (world.topic, 1): 50}
            await_that(lambda: collector.counts("mine") == sent, "the spans of all records")
