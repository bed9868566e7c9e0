"""``oncely plan``: the answer for people. The verdict comes last, where the eye is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.run import importable
from oncely.cli.tables import LEFT, cell, show
from oncely.pipeline.destination import Connections, SinkFacts
from oncely.pipeline.planning import Plan, SourceFacts
from oncely.pipeline.problems import Problem


def show_plan(file: Path, use_spark: bool | None, as_json: bool) -> int:
    """Print the plan; returns the exit code."""
    pipeline = opened(file)
    importable(file)
    if screen.err.is_terminal:
        with screen.err.status("looking at brokers, table and code"):
            plan = pipeline.plan(use_spark=use_spark)
    else:
        plan = pipeline.plan(use_spark=use_spark)
    if as_json:
        screen.show_json(plan.as_json())
        return plan.exit_code
    _guarantee(plan)
    _facts(plan)
    _columns(plan.sink)
    _statements("DDL", "for whoever may create tables", plan.ddl)
    _statements("Kafka ACLs", "where the broker has an authorizer", plan.acls)
    _verdict(plan)
    return plan.exit_code


def _head(title: str, remark: str = "") -> None:
    text = Text(f"\n{title}", style="bold")
    if remark:
        text.append(f"  {remark}", style="not bold dim")
    screen.out.print(text)


def _labelled(rows: Iterable[tuple[str, str | Text]]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(f"  {label}", cell(value))
    _print(grid)


def _print(what: RenderableType) -> None:
    screen.out.print(what, soft_wrap=False)


_DELIVERY = {
    "exactly_once": "exactly once",
    "at_least_once": "at least once",
    "at_most_once": "at most once",
    "none": "no guarantee",
}


def _guarantee(plan: Plan) -> None:
    one = plan.guarantee
    _head(f"{plan.name}: {_DELIVERY[one.delivery]}, by {one.commit} commit")
    _labelled(
        [
            ("why", one.why),
            ("means", one.means),
            ("rejects", one.rejects),
            *(("ends" if i == 0 else "", f"- {end}") for i, end in enumerate(one.ends)),
        ]
    )


def _facts(plan: Plan) -> None:
    rows: list[tuple[str, str | Text]] = []
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
    if rows:
        _head("What was found")
        _labelled(rows)


def _source(source: SourceFacts) -> list[tuple[str, str | Text]]:
    topics = ", ".join(source.topics)
    return [
        ("topics", f"{topics}: {source.partitions} partitions in cluster {source.cluster_id}"),
        ("begins", f"{source.begins}; {source.offsets:,} offsets up to the end"),
    ]


def _connections(one: Connections) -> str:
    tasks = f"{one.tasks} for tasks" if one.tasks else "one for each task slot of the cluster"
    text = f"up to {one.total} connections: {tasks}, {one.driver} for the driver"
    if not one.tasks:
        text = f"connections: {tasks}, and {one.driver} for the driver"
    if one.room is not None:
        text += f"; the database has room for {max(0, one.room.limit - one.room.used)} more"
    return text


def _columns(sink: SinkFacts | None) -> None:
    if sink is None or not sink.columns:
        return
    _head("Columns")
    show([("name", LEFT), ("rows", LEFT), ("table", LEFT)], sink.columns)


def _statements(title: str, remark: str, statements: Iterable[str]) -> None:
    """As they are, without wrapping: they are made to be copied."""
    _head(title, remark)
    for one in statements:
        screen.out.print(Text(screen.redact(one)))


def _verdict(plan: Plan) -> None:
    if not plan.problems:
        screen.out.print(Text("\nit can run", style="bold green"))
        return
    count = len(plan.problems)
    title = "1 problem" if count == 1 else f"{count} problems"
    screen.out.print(Text(f"\nit can't run: {title}", style="bold red"))
    for one in plan.problems:
        screen.out.print(_problem(one))


def _problem(one: Problem) -> Text:
    text = Text.assemble(("  ✗ ", "red"), (one.key, "bold"), f": {screen.redact(one.message)}")
    if one.way_out:
        text.append("\n    way out: ", "bold")
        text.append(screen.redact(one.way_out))
    return text
