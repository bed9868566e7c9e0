"""``oncely status``."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

from rich.text import Text

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.tables import LEFT, RIGHT, duration, show
from oncely.pipeline.status import Status

_STYLES = {"OK": "green", "WARN": "yellow", "STALL": "bold red"}


def show_status(file: Path, as_json: bool) -> None:
    """Print the positions and lags of the pipeline."""
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
    _show_state(status)


def _show_state(status: Status) -> None:
    state, reason = status.judgement
    parts = [f"{state}: {reason}" if reason else state]
    found = status.activity
    if found is not None and found.last_commit is not None:
        at = found.last_commit.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        parts.append(f"last commit {at} ({duration(found.seconds).plain} ago)")
        parts.append(f"{found.rate:,.1f} records/s in the last 5 minutes")
    screen.out.print(Text(", ".join(parts), style=_STYLES[state]))
