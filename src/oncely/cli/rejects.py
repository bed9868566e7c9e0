"""``oncely rejects list`` and ``oncely rejects replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.run import importable
from oncely.cli.spark_log import SparkLog
from oncely.cli.tables import LEFT, REST, RIGHT, printable, show
from oncely.errors import WrongInput
from oncely.pipeline.rejects import RejectFilter, Rejects
from oncely.pipeline.rejects import as_json as rejects_as_json
from oncely.runtimes.spark import session
from oncely.sources.start import parse_moment

_LONGEST = 200


def list_rejects(file: Path, limit: int, which: RejectFilter, as_json: bool) -> None:
    """Print the reasons of dead letters, and the first dead letters."""
    found = opened(file).rejects(limit, None if which == RejectFilter() else which)
    if as_json:
        screen.show_json(rejects_as_json(found))
        return
    if found.listed:
        _reasons(found)
        show(
            [
                ("topic", LEFT),
                ("part.", RIGHT),
                ("offset", RIGHT),
                ("stage", LEFT),
                ("reason", REST),
                ("value", REST),
            ],
            (
                (*one.partition, one.offset, one.stage, _line(one.reason), _bytes(one.value))
                for one in found.listed
            ),
        )
        screen.out.print()
    more = found.total - len(found.listed)
    screen.out.print(f"{found.total:,} rejects" + (f", {more:,} more than shown" if more else ""))
    if found.scanned:
        screen.note(f"reasons and filters are those of the first {found.scanned:,} rejects")


def _reasons(found: Rejects) -> None:
    rows = ((one.rejects, _line(one.reason)) for one in found.reasons)
    show([("rejects", RIGHT), ("reason", LEFT)], rows)
    screen.out.print()


def reject_filter(
    reason: str | None, partition: Sequence[str] | None, since: str | None
) -> RejectFilter:
    """The filter of the options.

    Raises:
        WrongInput: ``since`` is no time.
    """
    try:
        begin = None if since is None else parse_moment(since).timestamp_ms
    except ValueError:
        raise WrongInput(
            f"--since: {since!r} is no time", way_out="write ISO 8601: 2026-01-31T12:00:00Z"
        ) from None
    return RejectFilter(reason or "", tuple(partition or ()), begin)


def _bytes(value: bytes | None) -> str | None:
    return None if value is None else _line(value[:_LONGEST].decode("utf-8", "replace"))


def _line(text: str) -> str:
    return printable(text, _LONGEST)


def replay_rejects(file: Path, as_json: bool) -> None:
    """Decode dead letters again; print the number that were moved."""
    pipeline = opened(file)
    importable(file)
    with SparkLog(pipeline.settings.name, None) as log:
        spark = None
        if pipeline.spark_path is not None and pipeline.status().rejects:
            spark = pipeline.start_spark(log.file)
        try:
            moved, kept = pipeline.replay(spark=spark)
        finally:
            if spark is not None:
                session.stop(spark)
    if as_json:
        screen.show_json({"moved": moved, "kept": kept})
        return
    screen.out.print(f"{moved:,} moved, {kept:,} remain rejects")
    if kept:
        screen.note("`oncely rejects list` shows the new reasons")
