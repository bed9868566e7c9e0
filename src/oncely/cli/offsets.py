"""``oncely offsets show`` and ``oncely offsets reset``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.tables import LEFT, RIGHT, show
from oncely.errors import WrongInput
from oncely.pipeline.offsets import Reset
from oncely.sources.reset import (
    ShiftBy,
    ToEarliest,
    ToLatest,
    ToOffset,
    Verb,
    by_duration,
    to_datetime,
)


def show_offsets(file: Path, as_json: bool) -> None:
    """Print every partition's offsets."""
    pipeline = opened(file)
    standings = pipeline.standings()
    if as_json:
        screen.show_json({"partitions": [one._asdict() for one in standings]})
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
        show(columns, (one[:5] for one in standings))
        return
    show([*columns, ("mirrored", RIGHT)], standings)
    screen.out.print(f"\nmirrored: what consumer group {group} shows to lag tools")


def reset_offsets(
    file: Path, verb: Verb, topics: Sequence[str], *, execute: bool, as_json: bool
) -> None:
    """Print what a reset would do, or do it."""
    done = opened(file).reset(verb, topics, execute=execute)
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
        screen.out.print(f"\nreset with epoch {done.epoch}; whatever still ran is fenced")
        return
    screen.out.print("\na dry run: nothing was written. Add --execute to do it")
    if any(at < done.before.get(tp, at) for tp, at in done.positions.items()):
        screen.note(
            "What is read again is written again: rows of an append table stand in it twice unless"
            " you delete them first. Rejects at or beyond the new positions are dropped, because"
            " their records are judged anew."
        )


def chosen_verb(
    *,
    earliest: bool,
    latest: bool,
    offset: int | None,
    datetime: str | None,
    shift: int | None,
    duration: str | None,
) -> Verb:
    """The one verb that was given.

    Raises:
        WrongInput: none or several, or its argument can't be read.
    """
    given: list[Verb] = []
    if earliest:
        given.append(ToEarliest())
    if latest:
        given.append(ToLatest())
    if offset is not None:
        given.append(ToOffset(offset))
    if datetime is not None:
        given.append(to_datetime(datetime))
    if shift is not None:
        given.append(ShiftBy(shift))
    if duration is not None:
        given.append(by_duration(duration))
    if len(given) != 1:
        raise WrongInput(
            f"a reset needs one verb, {len(given)} were given",
            way_out="--to-earliest, --to-latest, --to-offset N, --to-datetime TIME, --shift-by N,"
            " or --by-duration PnDTnHnMnS",
        )
    return given[0]
