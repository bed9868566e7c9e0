"""Workers and their handlers: what can't be started is refused before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncely import ConfigError, Worker
from oncely.config import parse
from oncely.kinds.handlers.settings import HandlersSinkSettings
from oncely.kinds.handlers.sink import HandlersSink
from oncely.pipeline import Pipeline
from oncely.pipeline.handling import worker_of

URL = "postgresql://me:secret@nowhere/db"


def worker(**tables: Any) -> Worker:
    return Worker("billing", brokers="nowhere:9092", url=URL, **tables)


def bill(batch: object, tx: object) -> None:
    """Any handler."""


def test_handlers_make_a_pipeline_of_their_topics() -> None:
    made = worker(sink={"on_error": "stop", "retries": 0}, source={"start": "latest"})
    assert made.handle("orders")(bill) is bill
    made.handle("refunds")(bill)
    pipeline = made.pipeline
    settings = pipeline.settings
    assert settings.source.topics == ("orders", "refunds")
    assert settings.source.start == "latest"
    assert isinstance(settings.sink, HandlersSinkSettings)
    assert settings.sink.on_error == "stop"
    assert pipeline.handlers == {"orders": bill, "refunds": bill}
    assert "secret" not in f"{settings!r}{settings.describe()}{made!r}"


def test_the_headers_of_the_context_are_named() -> None:
    made = worker(sink={"context": ["user", "locale"]})
    made.handle("orders")(bill)
    sink = made.pipeline.sink(made.pipeline.row_schema())
    assert isinstance(sink, HandlersSink)
    assert set(sink.context) == {"traceparent", "tracestate", "baggage", "user", "locale"}


def test_a_handler_may_have_threads() -> None:
    made = worker()
    made.handle("orders", threads=8)(bill)
    made.handle("refunds")(bill)
    pipeline = made.pipeline
    sink: Any = pipeline.sink(pipeline.row_schema())
    assert sink.threads == {"orders": 8}
    assert sink.needs == {"headers", "key"}


@pytest.mark.parametrize("threads", [0, -1, 65, 1.5, "8", None])
def test_a_number_of_threads_that_is_none_is_refused(threads: Any) -> None:
    with pytest.raises(ConfigError, match=r"threads: found .*allowed: 1 to 64"):
        worker().handle("orders", threads=threads)


def with_three(batch: object, tx: object, more: object) -> None:
    """Needs another argument."""


def with_one(batch: object) -> None:
    """Has no place for the transaction."""


async def coroutine(batch: object, tx: object) -> None:
    """Would not be awaited."""


def generator(batch: object, tx: object) -> Any:
    """Would not run."""
    yield


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (with_three, "can't be called with a batch and its transaction: missing a required arg"),
        (with_one, "can't be called with a batch and its transaction: too many positional"),
        (coroutine, "is a coroutine"),
        (generator, "is a generator"),
        (3, "is no function"),
    ],
)
def test_a_function_that_is_no_handler_is_refused(handler: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"handler of 'orders': .*{said}"):
        worker().handle("orders")(handler)


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (bill, "can't be called with a record: missing a required arg"),
        (coroutine, "is a coroutine"),
        ("offset = 3", "is no function"),
    ],
)
def test_a_function_that_drops_nothing_is_refused(drop: Any, said: str) -> None:
    """A coroutine would be true for each record."""
    with pytest.raises(ConfigError, match=f"drop of 'orders': .*{said}"):
        worker().handle("orders", drop=drop)(bill)


def test_records_are_dropped_by_a_function_and_by_settings() -> None:
    made = worker(filter={"drop": "kafka_offset = 1", "delay": "1 second"})
    made.handle("orders", drop=with_one)(bill)
    made.handle("refunds")(bill)
    pipeline = made.pipeline
    assert pipeline.drops == {"orders": with_one}
    assert pipeline.settings.filter.delay == 1.0
    decoder: Any = pipeline.decoder
    assert (decoder.drop.sql, decoder.decoder.drop.by_topic) == (
        "kafka_offset = 1",
        {"orders": with_one},
    )


def test_two_handlers_of_a_topic_are_refused() -> None:
    made = worker()
    made.handle("orders")(bill)
    with pytest.raises(ConfigError, match=r"test_handling:bill and .*:with_one both want it"):
        made.handle("orders")(with_one)


def test_a_decorator_without_its_topic_is_refused() -> None:
    with pytest.raises(ConfigError, match="it takes a topic"):
        worker().handle(bill)  # type: ignore[arg-type]


def test_a_worker_without_handlers_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker 'billing': has no handler"):
        _ = worker().pipeline


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"sink": {"url": "sqlite:///x.db"}}, "sink.url: is not the URL of a PostgreSQL"),
        ({"sink": {"time_limit": "10 minutes"}}, "sink.time_limit: .*max.poll.interval.ms"),
        ({"sink": {"ledger_schema": " "}}, "sink.ledger_schema: is empty"),
        ({"sink": {"table": "rows"}}, "sink.table"),
        ({"sink": {"context": ["user", " "]}}, "sink.context: has an empty name"),
        ({"transform": {"spark": "a:b"}}, "transform.spark: a handler gets records"),
        ({"delivery": "at_least_once"}, "delivery: found .at_least_once."),
        ({"decode": {"format": "json", "schema": "infer"}}, "decode.schema"),
        ({"sinks": {}}, "sinks"),
    ],
)
def test_settings_that_do_not_fit_are_named(tables: Any, said: str) -> None:
    made = worker(**tables)
    made.handle("orders")(bill)
    with pytest.raises(ConfigError, match=said):
        _ = made.pipeline


FILE = """
name = "billing"
source = { brokers = "nowhere:9092", topics = ["orders", "refunds"] }
decode = { format = "raw" }
sink = { kind = "KIND", url = "postgresql://nowhere/db" TABLE }
"""


def test_a_file_names_the_topics_of_the_handlers(tmp_path: Path) -> None:
    file = tmp_path / "billing.toml"
    file.write_text(FILE.replace("KIND", "handlers").replace("TABLE", ""))
    made = Worker.from_file(file)
    made.handle("orders")(bill)
    with pytest.raises(ConfigError, match=r"source.topics: refunds has no handler"):
        _ = made.pipeline
    made.handle("refunds")(bill)
    assert made.pipeline.settings.name == "billing"
    made.handle("returns")(bill)
    with pytest.raises(ConfigError, match=r"source.topics: lacks returns"):
        _ = made.pipeline


def test_a_file_of_another_sink_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "billing.toml"
    file.write_text(FILE.replace("KIND", "sql").replace("TABLE", ', table = "rows"'))
    with pytest.raises(ConfigError, match=r"sink.kind: found 'sql'"):
        Worker.from_file(file)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:app", "no_such_module:app: can't be imported: ModuleNotFoundError"),
        ("some_app:nothing", "can't be imported: AttributeError"),
        ("some_app", "some_app: names no worker"),
        ("some_app:bill", "is no oncely.Worker, but function"),
        ("broken_app:app", "can't be imported: SystemExit: 3"),
        ("leaving_app:app", "can't be imported: GeneratorExit"),
    ],
)
def test_an_app_that_is_not_found_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str
) -> None:
    (tmp_path / "some_app.py").write_text("def bill(batch, tx): pass\n")
    (tmp_path / "broken_app.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "leaving_app.py").write_text("raise GeneratorExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said):
        worker_of(path)
    sys.modules.pop("some_app", None)


def of_file() -> Pipeline:
    raw = {
        "name": "billing",
        "source": {"brokers": "nowhere:9092", "topics": ["orders"]},
        "decode": {"format": "raw"},
        "sink": {"kind": "handlers", "url": URL},
    }
    return Pipeline(parse(raw))


REFUSED: dict[str, tuple[Callable[[Pipeline], object], str]] = {
    "run": (lambda one: one.sink(one.row_schema()), "oncely work module:app"),
    "replay": (lambda one: one.destination.check_replay(), "can't be replayed"),
    "repair": (
        lambda one: one.destination.check_rewrite(one.row_schema(), "repair"),
        "can't be repaired",
    ),
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_needs_rows_or_functions_is_refused(command: str) -> None:
    act, said = REFUSED[command]
    with pytest.raises(ConfigError, match=rf"(?s)sink.kind: .*{said}"):
        act(of_file())
