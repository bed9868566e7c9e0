"""``oncely status``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from oncely.cli import screen, verbs
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.screen import LEFT, RIGHT, duration, show
from oncely.errors import OncelyError
from oncely.pipeline.status import NOBODY, Status, unreadable
from oncely.wording import plural

if TYPE_CHECKING:
    from oncely.web.model import Overview

_STYLES = {"OK": "green", "WARN": "yellow", "STALL": "bold red"}


def show_status(asked: verbs.Status) -> int:
    """Print positions and lags of a pipeline, or the overview of several.

    With ``check`` the exit code is that of the worst verdict, else 0.
    """
    paths = asked.paths
    several = len(paths) > 1 or paths[0].is_dir()
    try:
        found = _several(paths) if several else _one(paths[0])
        code = found.print(as_json=asked.as_json)
    except OncelyError as error:
        if several or not asked.check:
            raise
        screen.show_error(error, debug=False)
        code = unreadable(error.message).code
    return code if asked.check else 0


def _several(paths: Sequence[Path]) -> Result:
    from oncely.cli.web import opened_subjects, read_once, rendered

    read = read_once(opened_subjects(paths))
    told = (
        {"name": subject.name, "file": str(subject.file), **_as_json(one)} for subject, one in read
    )
    return Result(
        lambda: list(told),
        lambda: screen.out.print(rendered(read), soft_wrap=False),
        max(one.verdict.code for _, one in read),
    )


def _as_json(one: Overview) -> dict[str, Any]:
    if one.status is not None:
        return one.status.as_json()
    return {"state": one.verdict.state, "verdict": one.verdict.kind, "reason": one.verdict.reason}


def _one(file: Path) -> Result:
    pipeline = opened(file)
    status = pipeline.status()
    for warning in status.warnings:
        screen.note(f"warning: {warning}")
    shown = partial(_show, pipeline.settings.name, status)
    return Result(status.as_json, shown, status.judgement.code)


def _show(name: str, status: Status) -> None:
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
    ran = f"epoch {status.epoch}" if status.epoch else "never ran"
    screen.out.print(f"\n{name}: {ran}, lag {status.lag:,}, rejects {status.rejects:,}")
    _show_state(status)
    _show_members(status)


def _show_members(status: Status) -> None:
    if status.members is None:
        return
    for group, found in status.members.items():
        for one in found:
            held = plural(len(one.partitions), "partition")
            screen.out.print(f"{group}: {one.client} at {one.host}, {held}")
    if not any(status.members.values()):
        screen.out.print(NOBODY)


def _show_state(status: Status) -> None:
    state, reason = status.judgement.state, status.judgement.reason
    parts = [f"{state}: {reason}" if reason else state]
    found = status.activity
    if found is not None and found.last_commit is not None:
        at = found.last_commit.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        parts.append(f"last commit {at} ({duration(found.seconds).plain} ago)")
        parts.append(f"{found.rate:,.1f} records/s in the last 5 minutes")
    screen.out.print(Text(", ".join(parts), style=_STYLES[state]))
