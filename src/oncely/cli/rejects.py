"""``oncely rejects list``, ``oncely rejects replay`` and ``oncely rejects discard``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from oncely.cli import screen, verbs
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.screen import LEFT, REST, RIGHT, short, show
from oncely.cli.spark_log import SparkLog
from oncely.pipeline.rejects import Discarded, RejectFilter, RejectReason, Rejects, filter_of
from oncely.pipeline.rejects import as_json as rejects_as_json
from oncely.runtimes.spark import session
from oncely.wording import plural


def list_rejects(asked: verbs.RejectsList) -> Result:
    """Print the reasons of dead letters, and the first dead letters."""
    which = reject_filter(asked.which)
    chosen = None if which == RejectFilter() else which
    found = opened(asked.file).rejects(asked.limit, chosen, discarded=asked.discarded)
    shown = partial(_rejects, found, discarded=asked.discarded)
    return Result(partial(rejects_as_json, found), shown)


def _rejects(found: Rejects, *, discarded: bool) -> None:
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


def _reasons(found: Iterable[RejectReason]) -> None:
    rows = ((one.rejects, short(one.reason)) for one in found)
    show([("rejects", RIGHT), ("reason", LEFT)], rows)
    screen.out.print()


def reject_filter(which: verbs.WhichRejects) -> RejectFilter:
    """The filter of the options.

    Raises:
        WrongInput: ``since`` or ``before`` is no time, or ``partition`` has another form.
    """
    return filter_of(which.reason, which.partition, which.since, which.before)


def _bytes(value: bytes | None) -> str | None:
    return None if value is None else short(value.decode("utf-8", "replace"))


def discard_rejects(asked: verbs.RejectsDiscard) -> Result:
    """Discard dead letters, or print those that would be."""
    which = reject_filter(asked.which)
    done = opened(asked.file).discard(which, execute=asked.execute)
    return Result(done.as_json, partial(_discarded, done))


def _discarded(done: Discarded) -> None:
    if done.reasons:
        _reasons(done.reasons)
    would = "" if done.executed else "would be "
    screen.out.print(f"{plural(done.total, 'reject')} {would}discarded")
    if done.total and not done.executed:
        screen.note("this is a dry run; --yes removes key, value and headers for good")


def replay_rejects(asked: verbs.RejectsReplay) -> Result:
    """Decode dead letters again; print the number that were moved."""
    pipeline = opened(asked.file, imports=True)
    with SparkLog(pipeline.settings.name, None) as log:
        spark = None
        if pipeline.spark_path is not None and pipeline.status().rejects:
            spark = pipeline.start_spark(log.file)
        try:
            moved, kept = pipeline.replay(spark=spark)
        finally:
            if spark is not None:
                session.stop(spark)
    return Result(lambda: {"moved": moved, "kept": kept}, partial(_replayed, moved, kept))


def _replayed(moved: int, kept: int) -> None:
    screen.out.print(f"{moved:,} moved, {kept:,} remain rejects")
    if kept:
        screen.note("`oncely rejects list` shows the new reasons")
