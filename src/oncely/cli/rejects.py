"""``oncely rejects list``, ``oncely rejects replay`` and ``oncely rejects discard``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.options import WhichRejects
from oncely.cli.spark_log import SparkLog
from oncely.cli.tables import LEFT, REST, RIGHT, short, show
from oncely.pipeline.rejects import Reason, RejectFilter, filter_of
from oncely.pipeline.rejects import as_json as rejects_as_json
from oncely.runtimes.spark import session
from oncely.wording import plural


def list_rejects(
    file: Path, limit: int, which: RejectFilter, *, discarded: bool, as_json: bool
) -> None:
    """Print the reasons of dead letters, and the first dead letters."""
    chosen = None if which == RejectFilter() else which
    found = opened(file).rejects(limit, chosen, discarded=discarded)
    if as_json:
        screen.show_json(rejects_as_json(found))
        return
    if found.listed:
        _reasons(found.reasons)
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
                (*one.partition, one.offset, one.stage, short(one.reason), _bytes(one.value))
                for one in found.listed
            ),
        )
        screen.out.print()
    more = found.total - len(found.listed)
    total = f"{found.total:,} {'discarded ' if discarded else ''}rejects"
    screen.out.print(total + (f", {more:,} more than shown" if more else ""))
    if found.scanned:
        screen.note(f"reasons and filters are those of the first {plural(found.scanned, 'reject')}")


def _reasons(found: Iterable[Reason]) -> None:
    rows = ((one.rejects, short(one.reason)) for one in found)
    show([("rejects", RIGHT), ("reason", LEFT)], rows)
    screen.out.print()


def reject_filter(which: WhichRejects) -> RejectFilter:
    """The filter of the options.

    Raises:
        WrongInput: ``since`` or ``before`` is no time, or ``partition`` has another form.
    """
    return filter_of(which.reason, which.partition, which.since, which.before)


def _bytes(value: bytes | None) -> str | None:
    return None if value is None else short(value.decode("utf-8", "replace"))


def discard_rejects(file: Path, which: RejectFilter, *, execute: bool, as_json: bool) -> None:
    """Discard dead letters, or print those that would be."""
    done = opened(file).discard(which, execute=execute)
    if as_json:
        screen.show_json(done.as_json())
        return
    if done.reasons:
        _reasons(done.reasons)
    screen.out.print(f"{plural(done.total, 'reject')} {'' if execute else 'would be '}discarded")
    if done.total and not execute:
        screen.note("this is a dry run; --yes removes key, value and headers for good")


def replay_rejects(file: Path, as_json: bool) -> None:
    """Decode dead letters again; print the number that were moved."""
    pipeline = opened(file, imports=True)
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
