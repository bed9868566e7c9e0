"""``oncely semantics``."""

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
from oncely.cli.options import Result
from oncely.errors import WrongInput

if TYPE_CHECKING:
    from oncely.testing.semantics.cells import Cell, Outcome, SinkKind


def show_semantics(asked: verbs.Semantics) -> int:
    """Kill, restart, count; the exit code is 1 if a guarantee was broken.

    Raises:
        WrongInput: the packages of the local servers are missing; no such sink, semantics or point.
    """
    with importing_servers():
        import oncely.testing.semantics.trial  # noqa: F401 - brings the local servers' packages
        from oncely.testing.semantics import cells, page
    sinks, deliveries, points = asked.sink or [], asked.delivery or [], asked.kill_point or []
    _known("--sink", sinks, cells.SINKS)
    _known("--delivery", deliveries, cells.DELIVERIES)
    _known("--kill-point", points, cells.POINTS)
    wanted: list[SinkKind] = [one for one in cells.SINKS if not sinks or one in sinks]
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
    written = page.write(outcomes, asked.folder)
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
            runs = [pool.submit(trial.run, stage, broker, chain, advance) for chain in chains]
            try:
                wait(runs, return_when=FIRST_EXCEPTION)
            finally:
                stage.stop.set()  # after Ctrl-C, or when another chain has failed
        return [one for run in runs for one in run.result()]


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt  # as by Ctrl-C: all child processes are ended


def _show(outcomes: Sequence[Outcome], written: tuple[Path, Path]) -> None:
    from oncely.testing.semantics.cells import DELIVERIES, POINTS_OF
    from oncely.testing.semantics.page import TITLES

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
