"""``oncely torture``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from oncely import artifacts
from oncely.cli import screen, verbs
from oncely.cli.local import importing_servers
from oncely.cli.opened import opened_app
from oncely.cli.options import Result
from oncely.errors import WrongInput

if TYPE_CHECKING:
    from oncely.testing.torture.trial import Outcome

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
        from oncely.testing.torture import records as records_of
        from oncely.testing.torture import trial
    pipeline = opened_app(app)
    topics = pipeline.settings.source.topics
    if records is None:
        raw = pipeline.settings.decode.format == "raw"
        published = records_of.samples(topics, pipeline.decoder.schema, raw=raw)
    else:
        published = records_of.read(records, topics)
    statements = _text(asked.setup)
    artifacts.resolve(artifacts.KAFKA_BROKER)  # downloads here, to show the progress
    with (
        tempfile.TemporaryDirectory(prefix="oncely-torture-") as folder,
        Broker() as broker,
        Postgres() as postgres,
    ):
        records_of.publish(broker, topics, published)
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


def _told(outcomes: Sequence[Outcome], *, as_json: bool) -> int:
    bad = [one for one in outcomes if not one.is_good]
    shown = partial(_show, outcomes)
    Result(lambda: [one.as_json() for one in outcomes], shown).print(as_json=as_json)
    if bad:
        said = f"✗ {len(bad)} of {len(outcomes)} kills changed the result: what these handlers do"
        screen.err.print(Text(f"{said} is not all in their transaction", style="red"))
    return 1 if bad else 0


def _show(outcomes: Sequence[Outcome]) -> None:
    table = Table(title="rows: lost / too many", title_justify="left", box=None)
    table.add_column("killed at", style="cyan")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for before, after in zip(outcomes[::2], outcomes[1::2], strict=True):
        call = " ".join(before.call.split())
        shown = call if len(call) <= _WIDTH else f"{call[: _WIDTH - 1]}…"
        table.add_row(f"{before.step}: {shown}", _cell(before), _cell(after))
    screen.out.print(table)


def _cell(one: Outcome) -> Text:
    lost, surplus = sum(one.lost.values()), sum(one.surplus.values())
    text = f"{lost:,} / {surplus:,}" + ("" if one.killed else " (not reached)")
    return Text(text, style="green" if one.is_good else "red")
