"""``oncely status``."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.tables import LEFT, RIGHT, duration, show


def show_status(file: Path, as_json: bool) -> None:
    """Print where the pipeline stands."""
    pipeline = opened(file)
    status = pipeline.status()
    for warning in status.warnings:
        screen.note(f"warning: {warning}")
    if as_json:
        screen.show_json(status.as_json())
        return
    show(
        [
            ("topic", LEFT),
            ("partition", RIGHT),
            ("position", RIGHT),
            ("end", RIGHT),
            ("lag", RIGHT),
            ("behind", RIGHT),
        ],
        (
            (
                one.topic,
                one.partition,
                one.position,
                one.end,
                Text(f"{one.lag:,}", style="yellow" if one.lag else "green"),
                duration(one.lag_seconds),
            )
            for one in status.partitions
        ),
    )
    lag = sum(one.lag for one in status.partitions)
    ran = f"epoch {status.epoch}" if status.epoch else "never ran"
    name = pipeline.settings.name
    screen.out.print(f"\n{name}: {ran}, lag {lag:,}, rejects {status.rejects:,}")
