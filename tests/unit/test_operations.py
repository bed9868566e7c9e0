"""Dashboard and alert rules name metrics and labels that exist, and no series is there twice.

There is no promtool on every machine (test_alerts uses it): expressions are read by a small parser
of the part of PromQL that they use.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from oncely.audit.watch import Gauges
from oncely.cli.verbs import app
from oncely.core import events
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.runtimes.health import Health, metrics
from tests.conftest import repository
from tests.plain_yaml import documents, read
from tests.prometheus import samples
from tests.unit.audit import reports

TOP = repository()
ALERTS = read((TOP / "ops" / "alerts.yml").read_text())["groups"][0]["rules"]
CASES = read((TOP / "ops" / "alerts.test.yml").read_text())["tests"]
DASHBOARD = json.loads((TOP / "ops" / "grafana-dashboard.json").read_text())
T0 = TopicPartition("t", 0)
EVENTS = [
    events.PipelineOpened("p", 1, {T0: 0}, first_start=True),
    events.BatchPlanned(0, {T0: OffsetRange(0, 10)}),
    events.RangeCommitted(T0, OffsetRange(0, 10), 10, 10, 0, 0),
    events.BatchCommitted(0, 10, 10, 0, 0.1, {T0: 10}),
]


def exposed() -> tuple[str, str]:
    """The metrics of a run, and of an audit's watch."""
    health, gauges = Health("p", "g"), Gauges("p")
    for event in EVENTS:
        health(event)
    health.ends({T0: 20})
    health.aged({T0: int(time.time() * 1000)})
    health.rejected(1)
    gauges.audited(reports.damaged())
    return metrics([health]), gauges.text()


_OF_TARGETS = {"job", "instance", "namespace", "pod", "container", "node"}
"""Labels that Prometheus adds; the last four from Kubernetes."""


@cache
def registry() -> dict[str, frozenset[str]]:
    """The labels of every metric."""
    found = {"up": frozenset(_OF_TARGETS)}
    for text in exposed():
        for name, labels in samples(text):
            found[name] = frozenset(re.findall(r'(\w+)="', labels)) | _OF_TARGETS
    return found


_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<duration>\[(?:\d+[smhd]|\$__rate_interval)\]|\d+[smhd])
    |(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_]\w*)|(?P<mark>=~|!~|!=|==|>=|<=|[-+*/<>={}(),]))""",
    re.VERBOSE,
)
_AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
_FUNCTIONS = {"rate", "increase", "time", "histogram_quantile", "absent", "changes",
              "present_over_time"}  # fmt: skip
_OPERATORS = {"and", "or", "unless", "+", "-", "*", "/", ">", "<", "==", "!=", ">=", "<="}
_MATCHES = {"=", "!=", "=~", "!~"}


class Expression:
    """Parses an expression; raises ValueError if it is no PromQL, or names what does not exist."""

    def __init__(self, text: str) -> None:
        self.metrics: set[str] = set()
        self.dropped: set[str] = set()
        self.matched: list[str] = []
        self._tokens = list(self._split(text))
        self._binary()
        self._expect("")

    def _split(self, text: str) -> Iterator[str]:
        at, text = 0, text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"no token: {text[at:]}")
            at = match.end()
            yield match[0].strip()
        yield ""

    def _expect(self, *wanted: str) -> str:
        token = self._tokens.pop(0)
        if token not in wanted:
            raise ValueError(f"{token!r} instead of one of {wanted}")
        return token

    def _binary(self) -> None:
        self._one()
        while self._tokens[0] in _OPERATORS:
            self._tokens.pop(0)
            if self._tokens[0] in ("on", "ignoring"):
                self._tokens.pop(0)
                self.matched += self._labels()
            self._one()

    def _one(self) -> None:
        token = self._tokens.pop(0)
        if token == "(":
            self._binary()
            self._expect(")")
        elif token in _AGGREGATIONS:
            if self._tokens[0] in ("by", "without"):
                dropping, labels = self._tokens.pop(0) == "without", self._labels()
                self.dropped |= set(labels) if dropping else set()
            self._arguments()
        elif token in _FUNCTIONS:
            self._arguments()
        elif re.fullmatch(r"[a-z_]+", token):
            self._selector(token)
        elif not re.fullmatch(r"\d.*", token):
            raise ValueError(f"{token!r} is no operand")

    def _arguments(self) -> None:
        self._expect("(")
        while self._tokens[0] != ")":
            self._binary()
            if self._tokens[0] == ",":
                self._tokens.pop(0)
        self._expect(")")

    def _labels(self) -> list[str]:
        self._expect("(")
        found = []
        while self._tokens[0] != ")":
            found.append(self._tokens.pop(0))
            self._known_label(found[-1], set().union(*registry().values()))
            if self._tokens[0] == ",":
                self._tokens.pop(0)
        self._expect(")")
        return found

    def _selector(self, name: str) -> None:
        if name not in registry():
            raise ValueError(f"no metric {name}")
        self.metrics.add(name)
        if self._tokens[0] == "{":
            self._tokens.pop(0)
            while self._tokens[0] != "}":
                self._known_label(self._tokens.pop(0), set(registry()[name]))
                self._expect(*_MATCHES)
                if not self._tokens.pop(0).startswith('"'):
                    raise ValueError("a matcher without a text")
                if self._tokens[0] == ",":
                    self._tokens.pop(0)
            self._expect("}")
        if self._tokens[0].startswith("["):
            self._tokens.pop(0)
        if self._tokens[0] == "offset":
            self._tokens.pop(0)
            if not re.fullmatch(r"\d+[smhd]", self._tokens.pop(0)):
                raise ValueError("an offset without a duration")

    def _known_label(self, label: str, known: set[str]) -> None:
        if label not in known:
            raise ValueError(f"no label {label}")


def dashboard_targets() -> list[tuple[str, str]]:
    return [(one["expr"], one["legendFormat"]) for p in DASHBOARD["panels"] for one in p["targets"]]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda one: one["alert"])
def test_an_alert_names_what_exists(rule: dict[str, Any]) -> None:
    found = Expression(rule["expr"])
    assert found.metrics
    told = rule["annotations"]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert told.keys() == {"summary", "description", "runbook_url"}
    kept = {label for name in found.metrics for label in registry()[name]} - found.dropped
    if rule["expr"].startswith("absent"):
        kept = frozenset()
    assert set(re.findall(r"\$labels\.(\w+)", told["summary"])) <= kept
    commands = re.findall(r"`oncely ([^`]+)`", told["description"])
    for command in commands:
        words = command.split()
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


@pytest.mark.parametrize("rule", ALERTS, ids=lambda one: one["alert"])
def test_an_alert_keeps_environments_apart(rule: dict[str, Any]) -> None:
    """Whatever label tells them apart, no aggregation drops it."""
    assert " by " not in rule["expr"]
    found = Expression(rule["expr"])
    assert found.dropped <= {"instance", "pod", "container", "node"}
    assert found.matched in ([], ["job", "instance"])


@pytest.mark.parametrize("rule", ALERTS, ids=lambda one: one["alert"])
def test_an_alert_is_shown_to_fire_and_not_to_fire(rule: dict[str, Any]) -> None:
    """test_alerts runs these cases; here they are complete."""
    named = f'alertname="{rule["alert"]}"'
    firing = [named in str(check["exp_samples"]) for one in CASES
              for check in one["promql_expr_test"]]  # fmt: skip
    assert {*firing} == {True, False}


@pytest.mark.parametrize(("expression", "legend"), dashboard_targets())
def test_a_panel_names_what_exists(expression: str, legend: str) -> None:
    parsed = Expression(expression)
    labels = set().union(*(registry()[name] for name in parsed.metrics))
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels


def test_the_dashboard_shows_the_metrics_of_a_run_and_of_an_audit() -> None:
    shown = {name for expr, _ in dashboard_targets() for name in Expression(expr).metrics}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in shown} == {
        "oncely_position", "oncely_end_offset", "oncely_lag_records", "oncely_lag_seconds",
        "oncely_records_total", "oncely_commits_total", "oncely_batch_seconds", "oncely_epoch",
        "oncely_waiting_since_timestamp_seconds", "oncely_fenced_total", "oncely_gap_records_total",
        "oncely_rejects_pending", "oncely_last_commit_timestamp_seconds",
        "oncely_complete_until_timestamp_seconds", "oncely_failures_total",
    }  # fmt: skip
    assert len({one["id"] for one in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_a_time_is_named_so() -> None:
    found = {name: value for text in exposed() for (name, _), value in samples(text).items()}
    times = {name for name, value in found.items() if value > 1e9}
    assert times
    assert {name for name in found if name.endswith("_timestamp_seconds")} == times


def test_no_series_is_there_twice_but_for_tools_that_read_other_names() -> None:
    """Each number of the events is another one: equal values are of one series."""
    now = [100.0]
    health = Health("p", "g", clock=lambda: now[0], wall_clock=lambda: now[0] + 9_000)
    health(events.PipelineOpened("p", 31, {T0: 1_009}, first_start=True))
    now[0] += 13
    health(events.BatchPlanned(0, {T0: OffsetRange(1_009, 1_020)}))
    now[0] += 29
    health(events.RangeCommitted(T0, OffsetRange(1_009, 1_028), 19, 53, 5, 3, kind="gap"))
    now[0] += 17
    health(events.BatchCommitted(0, 19, 53, 5, 46.0, {T0: 1_028}, phases={"decode": 12.0}))
    health.ends({T0: 2_065})
    health.aged({T0: 8_000_000})
    health.rejected(23)
    now[0] += 41
    by_value: dict[float, set[str]] = {}
    for (name, labels), value in samples(metrics([health])).items():
        if value > 1 and not name.endswith("_bucket"):
            of = re.findall("(?:outcome|phase)=.*", labels)
            by_value.setdefault(value, set()).add(f"{name}{of}")
    doubles = [sorted(names) for names in by_value.values() if len(names) > 1]
    assert doubles == [
        ["kafka_consumergroup_current_offset[]", "oncely_position[]"],
        ["kafka_consumergroup_lag[]", "oncely_lag_records[]"],
    ]
    page = (TOP / "docs" / "metrics.md").read_text()
    (line,) = (one for one in page.splitlines() if one.startswith("| `kafka_consumergroup"))
    assert "`oncely_position` and `oncely_lag_records` again" in line


def test_every_metric_is_documented() -> None:
    page = (TOP / "docs" / "metrics.md").read_text() + (TOP / "docs" / "audit.md").read_text()
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in registry().keys() - {"up"}}
    assert not {name for name in names if f"`{name}" not in page}


@pytest.mark.parametrize(
    "wrong",
    ["oncely_lagg", "sum(oncely_epoch", "oncely_epoch)", 'oncely_epoch{topic="t"}',
     "sum by (x) (1)", 'oncely_epoch{pipeline="p}', "rate(oncely_rows_total[5 minutes])",
     "oncely_epoch >", "1 2", "oncely_epoch offset 5 minutes", "max without (x) (up)"],
)  # fmt: skip
def test_an_expression_that_is_wrong_is_noticed(wrong: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Expression(wrong)


def test_yaml_that_is_not_understood_is_an_error() -> None:
    assert read('a: "x"\nb:\n  - c: 1\n    d: [2]\n  - plain text\n') == {
        "a": "x", "b": [{"c": 1, "d": [2]}, "plain text"]
    }  # fmt: skip
    block = "a:\n  b: |\n    c = 1\n\n    # d\n  e: 2\n"
    assert read(block) == {"a": {"b": "c = 1\n\n# d\n", "e": 2}}
    assert documents("a: 1\n---\nb: 2\n") == [{"a": 1}, {"b": 2}]
    for wrong in (
        "a: {b: 1}",
        "a: x: y",
        "a:\n",
        "a: 1\na: 2",
        "a: yes",
        "a: 1\n  b: 2",
        "a: |\n  x",
        "- |\n  x\n",
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            read(wrong)
