"""Wrong arguments of the Python API are refused, before anything else happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import oncely
from oncely import ConfigError, Pipeline, Worker, load, parse, write_stream
from oncely.core.ranges import TopicPartition
from oncely.jobs import job
from oncely.pipeline.rejects import RejectFilter

P0, WHICH, BAD = TopicPartition("t", 0), RejectFilter("x"), object()
STREAM = {"df": BAD, "name": "n", "url": "u", "table": "t", "checkpoint": "c"}


def pipeline() -> Pipeline:
    return Pipeline(parse({
        "name": "n", "source": {"brokers": "127.0.0.1:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id INT"},
        "sink": {"kind": "sql", "url": "sqlite:////nowhere/x.db", "table": "t"},
    }))  # fmt: skip


def keyed(key: Any) -> Any:
    jobs = job(Worker("w", brokers="b", url="u"))(lambda tx: None)
    return jobs.enqueue_keyed(key)


RUNS = {
    "until": ("yesterday", "", 5, True), "stop": ("no", 1), "listener": (None, "print"),
    "events": (5, True), "http": (":9464", 9464), "on_fenced": ("waits", None),
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    ("run", {}, {**RUNS, "spark": ("local[2]",)}),
    ("work", {}, RUNS),
    ("plan", {}, {"use_spark": ("no", 1), "sample": (-1, "5", True, 1.5, None)}),
    ("reset", {"verb": BAD}, {"verb": ("to-earliest", None)}),
    ("rejects", {}, {"limit": (-1, None), "which": ("reason",), "discarded": ("no", 0, None)}),
    ("discard", {"which": WHICH}, {"which": (None, "reason"), "execute": ("no", 1, None)}),
    ("audit", {}, {"limit": (-1, "all"), "before": ("yesterday", 5), "download": ("no", None)}),
    ("verify", {}, {"logs": (None, "a.jsonl", [5])}),
    ("repair", {"found": []},
     {"found": (None, ["x"], "x"), "execute": ("no",), "max_removed": (-1, "all", None),
      "progress": (None,), "events": (5,)}),
    ("backfill", {"ranges": {}}, {"ranges": (None, [P0], {P0: (0, 5)}), "execute": ("no",)}),
    ("replay", {}, {"spark": ("local",), "progress": (5, None)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "given", "name", "value"),
    [
        (method, given, name, value)
        for method, given, wrong in CASES
        for name, values in wrong.items()
        for value in values
    ],
)
def test_of_a_pipeline(method: str, given: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^{name}: found .*allowed: .*Pipeline\.{method}"):
        getattr(pipeline(), method)(**{**given, name: value})


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("path", lambda: load(5)),  # type: ignore[arg-type]
        ("raw", lambda: parse("name = 1")),  # type: ignore[arg-type]
        ("df", lambda: write_stream(**STREAM)),
        ("key", lambda: keyed(5)),
        *[
            (name, lambda one={name: value}: write_stream(**{**STREAM, "df": Streaming(), **one}))
            for name, value in (
                ("name", 5), ("checkpoint", None), ("keys", "id"), ("create", "no"),
            )
        ],
    ],
)  # fmt: skip
def test_of_functions(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: found .*allowed: "):
        call()


class Streaming:
    isStreaming = True


def test_each_public_method_is_in_the_table() -> None:
    methods = {
        name for name, one in vars(oncely.Pipeline).items()
        if name[0] != "_" and inspect.isfunction(one) and len(inspect.signature(one).parameters) > 1
    }  # fmt: skip
    assert methods == {method for method, _, _ in CASES}


def test_reset_topics_are_no_text() -> None:
    from oncely.kafka.reset import Verb

    with pytest.raises(ConfigError, match=r"^topics: found 't'; allowed: a list of texts"):
        pipeline().reset(Verb("to-earliest", 0), "t")
