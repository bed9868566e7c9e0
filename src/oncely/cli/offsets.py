"""``oncely offsets show`` and ``oncely offsets reset``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from rich.text import Text

from oncely.cli import screen, verbs
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.screen import LEFT, RIGHT, show
from oncely.errors import WrongInput
from oncely.kafka.reset import Verb, verb_of
from oncely.pipeline.offsets import FENCED, PartitionOffsets, Reset


def show_offsets(asked: verbs.OffsetsShow) -> Result:
    """Print every partition's offsets."""
    pipeline = opened(asked.file)
    found = pipeline.partition_offsets()
    return Result(
        lambda: {"partitions": [one._asdict() for one in found]},
        partial(_offsets, found, pipeline.settings.shown_group),
    )


def _offsets(found: list[PartitionOffsets], group: str | None) -> None:
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


def reset_offsets(asked: verbs.OffsetsReset) -> Result:
    """Print the effect of a reset, or execute it."""
    verb, topics = chosen_verb(asked.to), asked.topic or ()
    done = opened(asked.file).reset(verb, topics, execute=asked.execute, events=asked.events)
    for one in done.notes:
        screen.note(one)
    return Result(done.as_json, partial(_reset, done))


def _reset(done: Reset) -> None:
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
    if done.epoch is not None:
        screen.out.print(f"\nreset with epoch {done.epoch}; a running pipeline is fenced")
        return
    screen.out.print("\na dry run: nothing was written. Add --execute to execute it")
    for note in filter(None, (done.warning, FENCED)):
        screen.note(note)


def _effect(before: int | None, after: int) -> Text:
    if before is None or before == after:
        return Text("")
    if after < before:
        return Text(f"{before - after:,} are read again", style="yellow")
    return Text(f"{after - before:,} are skipped", style="yellow")


def chosen_verb(to: verbs.ResetTo) -> Verb:
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
