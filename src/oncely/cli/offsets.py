"""``oncely offsets show`` and ``oncely offsets reset``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.options import ResetTo
from oncely.cli.tables import LEFT, RIGHT, show
from oncely.errors import WrongInput
from oncely.kafka.reset import Verb, verb_of
from oncely.pipeline.offsets import FENCED, Reset


def show_offsets(file: Path, as_json: bool) -> None:
    """Print every partition's offsets."""
    pipeline = opened(file)
    found = pipeline.partition_offsets()
    if as_json:
        screen.show_json({"partitions": [one._asdict() for one in found]})
        return
    group = pipeline.settings.shown_group
    columns = [
        ("topic", LEFT),
        ("partition", RIGHT),
        ("first", RIGHT),
        ("position", RIGHT),
        ("end", RIGHT),
    ]
    if group is None:
        show(columns, (one[:5] for one in found))
        return
    show([*columns, ("mirrored", RIGHT)], found)
    screen.out.print(f"\nmirrored: the offsets of consumer group {group}, for lag tools")


def reset_offsets(
    file: Path,
    verb: Verb,
    topics: Sequence[str],
    *,
    execute: bool,
    events: Path | None,
    as_json: bool,
) -> None:
    """Print the effect of a reset, or execute it."""
    done = opened(file).reset(verb, topics, execute=execute, events=events)
    for one in done.notes:
        screen.note(one)
    if as_json:
        screen.show_json(done.as_json())
        return
    show(
        [
            ("topic", LEFT),
            ("partition", RIGHT),
            ("position", RIGHT),
            ("new position", RIGHT),
            ("", LEFT),
        ],
        (
            (tp.topic, tp.partition, done.before.get(tp), at, _effect(done.before.get(tp), at))
            for tp, at in sorted(done.positions.items())
        ),
    )
    _conclude(done)


def _effect(before: int | None, after: int) -> Text:
    if before is None or before == after:
        return Text("")
    if after < before:
        return Text(f"{before - after:,} are read again", style="yellow")
    return Text(f"{after - before:,} are skipped", style="yellow")


def _conclude(done: Reset) -> None:
    if done.epoch is not None:
        screen.out.print(f"\nreset with epoch {done.epoch}; a running pipeline is fenced")
        return
    screen.out.print("\na dry run: nothing was written. Add --execute to execute it")
    for one in filter(None, (done.warning, FENCED)):
        screen.note(one)


def chosen_verb(to: ResetTo) -> Verb:
    """The one verb that was given.

    Raises:
        WrongInput: none or several, or its argument is invalid.
    """
    given = [
        verb_of(name.replace("_", "-"), str(value))
        for name, value in asdict(to).items()
        if value is not None and value is not False
    ]
    if len(given) != 1:
        raise WrongInput(
            f"a reset needs one verb, {len(given)} were given",
            way_out="--to-earliest, --to-latest, --to-offset N, --to-datetime TIME, --shift-by N,"
            " or --by-duration PnDTnHnMnS",
        )
    return given[0]
