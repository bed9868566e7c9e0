"""``oncely semantics`` and ``oncely torture``: kills at each step, and what they change."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.table import Table
from rich.text import Text

from oncely import artifacts
from oncely.cli import screen, verbs
from oncely.cli.local import importing_servers
from oncely.cli.opened import opened_app
from oncely.cli.options import Result
from oncely.errors import WrongInput

if TYPE_CHECKING:
    from oncely.testing.semantics.cells import Cell, Outcome
    from oncely.testing.torture.trial import Outcome as Killed


def show_semantics(asked: verbs.Semantics) -> int:
    """Kill, restart, count; the exit code is 1 if a guarantee was broken.

    Raises:
        WrongInput: the packages of the local servers are missing; no such sink, semantics or point.
    """
    with importing_servers():
        import oncely.testing.semantics.trial  # noqa: F401 - brings the local servers' packages
        from oncely.testing.semantics import cells
    sinks, deliveries, points = asked.sink or [], asked.delivery or [], asked.kill_point or []
    _known("--sink", sinks, cells.SINKS)
    _known("--delivery", deliveries, cells.DELIVERIES)
    _known("--kill-point", points, cells.POINTS)
    wanted = [one for one in cells.SINKS if not sinks or one in sinks]
    chains = [
        cells.cells(sink, points or cells.POINTS, deliveries or cells.DELIVERIES) for sink in wanted
    ]
    if not any(chains):
        raise WrongInput(
            f"--kill-point {points[0]!r}: not with --sink {wanted[0]} and these semantics",
            way_out=f"the sink has {', '.join(map(repr, cells.POINTS_OF[wanted[0]]))}; exactly_once"
            " alone has a commit of its own",
        )
    signal.signal(signal.SIGTERM, _interrupt)
    outcomes = _all([chain for chain in chains if chain], on_spark=asked.runtime == "spark")
    written = cells.write(outcomes, asked.folder)
    problems = cells.problems(outcomes)
    shown = partial(_show, outcomes, written)
    Result(lambda: [one.as_json() for one in outcomes], shown).print(as_json=asked.as_json)
    for problem in problems:
        screen.err.print(Text(f"✗ {problem}", style="red"))
    return 1 if problems else 0


def _known(option: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    if strange := [one for one in given if one not in allowed]:
        raise WrongInput(
            f"{option} {strange[0]!r}: there is none",
            way_out=f"one of {', '.join(map(repr, allowed))}",
        )


def _all(chains: Sequence[list[Cell]], *, on_spark: bool) -> list[Outcome]:
    """The outcomes of all trials; the sinks run in parallel."""
    from oncely.testing.semantics import trial
    from oncely.testing.servers.kafka import Broker
    from oncely.testing.servers.postgres import Postgres

    artifacts.resolve(artifacts.KAFKA_BROKER)  # downloads here, to show the progress
    total = sum(map(len, chains))
    with (
        screen.counting("killed, restarted and counted", total) as advance,
        tempfile.TemporaryDirectory(prefix="oncely-semantics-") as folder,
        Broker() as broker,
        Postgres() as postgres,
    ):
        stage = trial.prepare(broker, postgres, Path(folder), on_spark=on_spark)
        with ThreadPoolExecutor(len(chains)) as pool:
            runs = [pool.submit(trial.run, stage, chain, advance) for chain in chains]
            try:
                wait(runs, return_when=FIRST_EXCEPTION)
            finally:
                stage.stop.set()  # after Ctrl-C, or when another chain has failed
        return [one for run in runs for one in run.result()]


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt  # as by Ctrl-C: all child processes are ended


def _show(outcomes: Sequence[Outcome], written: tuple[Path, Path]) -> None:
    from oncely.testing.semantics.cells import DELIVERIES, POINTS_OF, TITLES

    for sink in dict.fromkeys(one.cell.sink for one in outcomes):
        found = {(o.cell.delivery, o.cell.point): o for o in outcomes if o.cell.sink == sink}
        table = Table(title=f"{sink}: lost / written twice", title_justify="left", box=None)
        table.add_column("killed", style="cyan")
        for delivery in DELIVERIES:
            table.add_column(TITLES[delivery], justify="right")
        for point in POINTS_OF[sink]:
            row = [found.get((delivery, point)) for delivery in DELIVERIES]
            if any(row):
                table.add_row(point, *map(_cell, row))
        screen.out.print()
        screen.out.print(table)
    screen.out.print(f"\n{written[1]} is the report, {written[0]} contains its numbers")


def _cell(one: Outcome | None) -> Text:
    if one is None:
        return Text("-", style="dim")
    style = "red" if one.lost else "yellow" if one.duplicated else "green"
    return Text(f"{one.lost:,} / {one.duplicated:,}", style=style)


# -- torture --------------------------------------------------------------------------------

_WIDTH = 60


def torture_app(asked: verbs.Torture) -> int:
    """Kill handlers at each step of their commits, compare, print; exit code 1 if tables differ.

    Raises:
        WrongInput: the packages of the local servers are missing; an option does not fit; or two
            runs without faults differ.
    """
    app, tables, records = asked.app_path, asked.table, asked.records
    if not tables:
        raise WrongInput("no table to compare", way_out="--table NAME, once for each")
    with importing_servers():
        from oncely.testing.servers.kafka import Broker
        from oncely.testing.servers.postgres import Postgres
        from oncely.testing.torture import trial
    pipeline = opened_app(app)
    topics = pipeline.settings.source.topics
    if records is None:
        raw = pipeline.settings.decode.format == "raw"
        published = trial.samples(topics, pipeline.decoder.schema, raw=raw)
    else:
        published = trial.read(records, topics)
    statements = _text(asked.setup)
    artifacts.resolve(artifacts.KAFKA_BROKER)  # downloads here, to show the progress
    with (
        tempfile.TemporaryDirectory(prefix="oncely-torture-") as folder,
        Broker() as broker,
        Postgres() as postgres,
    ):
        trial.publish(broker, topics, published)
        create, place, ignored = postgres.create_database, Path(folder), asked.ignore or ()
        stage = trial.Stage(app, broker.bootstrap, create, place, statements, tables, ignored)
        expected, calls = trial.reference(stage)
        with screen.counting("killed, restarted and compared", 2 * len(calls)) as advance:
            outcomes = trial.run(stage, expected, calls, advance)
    return _told(outcomes, as_json=asked.as_json)


def _text(setup: Path | None) -> str:
    try:
        return "" if setup is None else setup.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"--setup {setup}: {error}") from None


def _told(outcomes: Sequence[Killed], *, as_json: bool) -> int:
    bad = [one for one in outcomes if not one.is_good]
    shown = partial(_show_kills, outcomes)
    Result(lambda: [one.as_json() for one in outcomes], shown).print(as_json=as_json)
    if bad:
        said = f"✗ {len(bad)} of {len(outcomes)} kills changed the result: what these handlers do"
        screen.err.print(Text(f"{said} is not all in their transaction", style="red"))
    return 1 if bad else 0


def _show_kills(outcomes: Sequence[Killed]) -> None:
    table = Table(title="rows: lost / too many", title_justify="left", box=None)
    table.add_column("killed at", style="cyan")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for before, after in zip(outcomes[::2], outcomes[1::2], strict=True):
        call = " ".join(before.call.split())
        shown = call if len(call) <= _WIDTH else f"{call[: _WIDTH - 1]}…"
        table.add_row(f"{before.step}: {shown}", _changed(before), _changed(after))
    screen.out.print(table)


def _changed(one: Killed) -> Text:
    lost, surplus = sum(one.lost.values()), sum(one.surplus.values())
    text = f"{lost:,} / {surplus:,}" + ("" if one.killed else " (not reached)")
    return Text(text, style="green" if one.is_good else "red")
