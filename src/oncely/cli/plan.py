"""``oncely plan``: the verdict, what is wrong and the effects of a run, on one screen; and ``oncely
init``, which proposes a pipeline file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from oncely.cli import screen, verbs
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.screen import LEFT, REST, RIGHT, cell, short, show
from oncely.core.ranges import grouped
from oncely.errors import ConfigError
from oncely.kinds.destination import Connections, PlanProblem, SinkFacts, TopicPlan
from oncely.pipeline.planning import Impossible, Plan, SourceFacts
from oncely.wording import plural

if TYPE_CHECKING:
    from oncely.pipeline.trial import Trial


def show_plan(asked: verbs.Plan) -> Result:
    """The plan, and if wanted the guarantee in words, and statements."""
    pipeline, live = opened(asked.file, imports=True), screen.err.is_terminal
    with screen.err.status("checking brokers, table and code") if live else nullcontext():
        plan = pipeline.plan(use_spark=asked.spark, sample=asked.sample)
    return Result(plan.as_json, partial(_show, plan, asked), plan.exit_code)


def _show(plan: Plan, asked: verbs.Plan) -> None:
    _verdict(plan)
    _facts(plan)
    if asked.guarantee:
        _guarantee(plan)
    if plan.sample is not None:
        show_trial(plan.sample)
    if asked.ddl:
        _topics(plan.topics)
        _columns(plan.sink)
        _statements("DDL", "of what is missing, for a role that may create it", plan.ddl)
    if asked.ddl or plan.denied:
        _statements("Kafka ACLs", "if the broker has an authorizer", plan.acls)
    _first_run(plan)


def _labelled(rows: Iterable[tuple[str, str | Text]]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(f"  {label}", cell(value))
    _print(grid)


def _print(what: RenderableType) -> None:
    screen.out.print(what, soft_wrap=False)


_TABLE = re.compile(r"CREATE TABLE (?:IF NOT EXISTS )?(.+?) \(")
_DELIVERY = {
    "exactly_once": "exactly once",
    "at_least_once": "at least once",
    "at_most_once": "at most once",
    "none": "no guarantee",
}


def _guarantee(plan: Plan) -> None:
    one = plan.guarantee
    screen.head("Guarantee", "its reasons and its limits")
    _labelled(
        [
            ("why", one.why),
            ("means", one.means),
            *(("ends" if i == 0 else "", f"- {end}") for i, end in enumerate(one.ends)),
        ]
    )


def _facts(plan: Plan) -> None:
    one = plan.guarantee
    delivers = f"{_DELIVERY[one.delivery]}, by {one.commit} commit"
    rows: list[tuple[str, str | Text]] = [("delivers", delivers), ("rejects", one.rejects)]
    if plan.source is not None:
        rows += _source(plan.source)
    if plan.sink is not None:
        state = "exists" if plan.sink.exists else "is missing: the first start creates it"
        if not plan.sink.exists and not plan.settings["sink"]["create"]:
            state = "is missing"
        rows.append((plan.sink.kind, f"{plan.sink.table} in {plan.sink.endpoint} {state}"))
    if plan.connections is not None:
        rows.append(("sessions", _connections(plan.connections)))
    rows += [("executor", f"{one.host}: {one.python}, oncely {one.oncely or 'missing'}")
             for one in plan.executors or ()]  # fmt: skip
    rows += [("note", Text(screen.redact(one), style="yellow")) for one in plan.notes]
    rows += [("" if at else "can't", one) for at, one in enumerate(_impossible(plan.impossible))]
    screen.out.print()
    _labelled(rows)


def _impossible(found: Iterable[Impossible]) -> Iterator[str]:
    """A line for each reason, with the operations that it makes impossible."""
    by_reason = grouped(((one.key, one.reason, one.way_out), one.operation) for one in found)
    for (key, reason, way_out), operations in by_reason.items():
        verbs = ", ".join(operations).replace(", oncely ", ", ")
        about = "" if key in ("", *operations) else f"{key}: "
        yield screen.redact("; ".join(filter(None, (f"{verbs}: {about}{reason}", way_out))))


def _source(source: SourceFacts) -> list[tuple[str, str | Text]]:
    topics, partitions = ", ".join(source.topics), plural(source.partitions, "partition")
    return [
        ("topics", f"{topics}: {partitions} in cluster {source.cluster_id}"),
        ("begins", f"{source.begins}; {plural(source.offsets, 'offset')} up to the end"),
    ]


def _connections(one: Connections) -> str:
    tasks = f"{one.tasks} for tasks" if one.tasks else "one for each task slot of the cluster"
    text = f"up to {plural(one.total, 'connection')}: {tasks}, {one.driver} for the driver"
    if not one.tasks:
        text = f"connections: {tasks}, and {one.driver} for the driver"
    if one.room is not None:
        text += f"; the database has room for {max(0, one.room.limit - one.room.used)} more"
    return text


def _topics(topics: Iterable[TopicPlan]) -> None:
    rows = [
        (one.name, "" if one.exists else "is created", one.partitions, one.replicas, one.min_insync)
        for one in topics
    ]
    if rows:
        screen.head("Topics", "of the destination")
        show([("topic", LEFT), ("", LEFT), ("partitions", RIGHT), ("replicas", RIGHT),
              ("min in sync", RIGHT)], rows)  # fmt: skip


def _columns(sink: SinkFacts | None) -> None:
    if sink is None or not sink.columns:
        return
    screen.head("Columns")
    show([("name", LEFT), ("rows", LEFT), ("table", LEFT)], sink.columns)


def _statements(title: str, remark: str, statements: Sequence[str]) -> None:
    """Print statements unwrapped, so that they can be copied."""
    if not statements:
        return
    screen.head(title, remark)
    for one in statements:
        for line in one.split("\n"):
            screen.out.print(line)


def _first_run(plan: Plan) -> None:
    """Print at the end what the first run does, as it can't be taken back."""
    if plan.epoch or plan.source is None:
        return
    made = [one[1].replace('"', "") for one in map(_TABLE.match, plan.ddl) if one]
    made += [one.name for one in plan.topics if not one.exists]
    does = f"reads {plural(plan.source.offsets, 'offset')} from {plan.settings['source']['start']}"
    if made and plan.settings["sink"].get("create", True):
        does += f", makes {', '.join(made)}"
    screen.out.print()
    _labelled([("first run", Text(screen.redact(does), style="bold"))])


def _verdict(plan: Plan) -> None:
    if not plan.problems:
        screen.out.print(Text(f"{plan.name}: it can run", style="bold green"))
        return
    title = f"{plan.name}: it can't run: {plural(len(plan.problems), 'problem')}"
    screen.out.print(Text(title, style="bold red"))
    for one in plan.problems:
        screen.out.print(_problem(one))


def _problem(one: PlanProblem) -> Text:
    text = Text.assemble(("  ✗ ", "red"), (one.key, "bold"), f": {screen.redact(one.message)}")
    if one.way_out:
        text.append("\n    way out: ", "bold")
        text.append(screen.redact(one.way_out))
    return text


# -- the outcome of a sample as text, for ``oncely plan --sample`` -------------------------


_UNNAMED = 20


def show_trial(trial: Trial) -> None:
    """Print counts, reasons of rejects, first rows, and members that the schema does not name."""
    screen.head(f"Sample of {plural(trial.records, 'record')}")
    screen.out.print(f"  {_counts(trial)}")
    if trial.note:
        screen.out.print(Text(f"  note: {trial.note}", style="yellow"))
    if trial.reasons:
        screen.out.print()
        show([("rejects", RIGHT), ("reason", LEFT)], ((n, short(why)) for why, n in trial.reasons))
        for one in trial.examples:
            screen.out.print(Text(f"  example: {short(one)}", style="dim"))
    if trial.rows:
        screen.out.print()
        _rows(trial)
    if trial.unnamed:
        _unnamed(trial)


def _counts(trial: Trial) -> str:
    counts = [("delete", trial.tombstones), ("reject", trial.rejected)]
    said = [plural(trial.rows, "row"), *(plural(n, what) for what, n in counts if n)]
    return ", ".join([*said, f"{trial.filtered:,} filtered"] if trial.filtered else said)


def _rows(trial: Trial) -> None:
    """The first rows, a column of the screen each: a table has more columns than rows here."""
    first = trial.columns[0].values
    show(
        [("column", LEFT), *((f"row {at + 1}", REST) for at in range(len(first)))],
        ((one.name, *(value and short(value) for value in one.values)) for one in trial.columns),
    )


def _unnamed(trial: Trial) -> None:
    screen.head("Not in the schema", "members that are ignored")
    named = trial.unnamed[:_UNNAMED]
    show(
        [("values", RIGHT), ("member", LEFT), ("type", REST)],
        ((one.values, short(one.path), one.type) for one in named),
    )
    if len(trial.unnamed) > len(named):
        screen.out.print(f"{len(trial.unnamed) - len(named):,} more than shown")


# -- init ----------------------------------------------------------------------------------


def propose(asked: verbs.Init) -> None:
    """Write the proposed file; ``-`` is standard output.

    Raises:
        ConfigError: the file exists, or can't be written.
    """
    from oncely.pipeline.init import (
        ProposalRequest,
        default_file,
        exports,
        given_pipeline,
        pipeline_file,
    )

    kafka = _assigned(asked.kafka or ())
    wanted = ProposalRequest(
        asked.brokers, asked.topic, asked.to, asked.registry, kafka, asked.sample
    )
    file = default_file(wanted.topic) if asked.out is None else asked.out
    shown = str(file) != "-"
    if shown and file.exists() and not asked.force:
        raise ConfigError("--out", f"{file} exists", way_out="--force replaces it; - prints it")
    given = given_pipeline(wanted)
    screen.hide(given.secrets)
    text = pipeline_file(wanted, given, str(file) if shown else "FILE")
    if not shown:
        sys.stdout.write(text)
        return
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError("--out", f"can't write {file}: {error.strerror}") from None
    steps = (exports(wanted), f"oncely plan {file} --sample {wanted.sample}")
    screen.out.print("\n  ".join([f"wrote {file}; next:", *filter(None, steps)]))


def _assigned(texts: Sequence[str]) -> dict[str, str]:
    """The properties of ``--kafka KEY=VALUE``.

    Raises:
        ConfigError: one of them has no equals sign.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError("--kafka", "needs KEY=VALUE", way_out="write --kafka key=value")
        found[key.strip()] = value
    return found
