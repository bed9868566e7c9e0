"""What an operator corrects: ``oncely offsets``, ``rejects``, ``repair`` and ``backfill``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from oncely.audit.report import EXIT_CODES, KINDS, Finding, FindingKind, Report
from oncely.cli import screen, verbs
from oncely.cli.audits import show_report
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.progress import SparkLog
from oncely.cli.screen import LEFT, REST, RIGHT, short, show
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import WrongInput
from oncely.kafka.reset import Verb, verb_of
from oncely.kafka.start import parse_moment
from oncely.pipeline import Pipeline
from oncely.pipeline.guarantee import check_rewrite
from oncely.pipeline.offsets import FENCED, PartitionOffsets, Reset
from oncely.pipeline.rejects import Discarded, RejectFilter, RejectReason, Rejects, filter_of
from oncely.pipeline.rejects import as_json as rejects_as_json
from oncely.pipeline.repair import Impossible, Repaired
from oncely.runtimes.spark import session
from oncely.wording import counted, plural

_OFFSETS = re.compile(r"(?P<topic>.+):(?P<partition>\d+):(?P<start>\d+)-(?P<end>\d+)")
_FOREVER = 1 << 62
_SHOWN = 20
_STALE = "the audit of now does not find it: it was corrected, or the ledger has changed"


def repair_file(asked: verbs.Repair) -> Result:
    """Repair the findings of an audit, or those of them that a report has.

    What a report names is true of its time: rows may have been corrected since, or the ledger.
    """
    pipeline, most = opened(asked.file, imports=True), asked.max_removed
    name = pipeline.settings.name
    chosen = None if asked.report is None else findings_of(asked.report, name)
    check_rewrite(pipeline, "repair")  # an audit may take long
    audited = pipeline.audit()
    found, code = [replace(one, detail="") for one in audited.findings], audited.exit_code
    if chosen is not None:
        (wanted, code), now = chosen, set(found)
        stale = [Impossible(one, _STALE) for one in wanted if one not in now]
        found = [one for one in wanted if one in now]
    done = pipeline.repair(found, execute=asked.execute, max_removed=most, events=asked.events)
    if chosen is not None:
        done = replace(done, impossible=[*done.impossible, *stale])
    if not asked.execute and (told := done.exceeds(most)):
        screen.note(f"with --execute it would be refused: {told}")
    return _concluded(pipeline, done, code)


def backfill_file(asked: verbs.Backfill) -> Result:
    """Process ranges again."""
    pipeline = opened(asked.file, imports=True)
    ranges = chosen_ranges(pipeline, asked.begin, asked.end, asked.offsets or ())
    done = pipeline.backfill(ranges, execute=asked.execute, events=asked.events)
    return _concluded(pipeline, done, 0)


# -- input --------------------------------------------------------------------------------------


def findings_of(path: Path, pipeline: str) -> tuple[list[Finding], int]:
    """The findings in the JSON of an audit, and the audit's exit code.

    Raises:
        WrongInput: it is not a report, of another pipeline, or lists only some of the findings.
    """
    try:
        report = json.loads(path.read_text("utf-8"))
        name, counts = report["pipeline"], report["found"]
        found = [_found(kind, one) for kind in KINDS for one in report[kind]]
        more = {kind: int(counts[kind]) for kind in KINDS}
        code = EXIT_CODES[report["verdict"]]
    except OSError as error:
        raise WrongInput(f"--report {path}: {error.strerror}", way_out=_AUDIT) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WrongInput(
            f"--report {path} is not a report of `oncely audit --json`: {error!r}", way_out=_AUDIT
        ) from None
    if name != pipeline:
        raise WrongInput(
            f"--report {path} is of the pipeline {name!r}, this is {pipeline!r}", way_out=_AUDIT
        )
    listed = {kind: sum(1 for one in found if one.kind == kind) for kind in KINDS}
    short = [
        f"{listed[kind]} of {more[kind]} {kind}" for kind in KINDS if listed[kind] < more[kind]
    ]
    if short:
        raise WrongInput(
            f"--report {path} lists {', '.join(short)}",
            way_out="audit with a larger --limit; or let the repair audit: without --report",
        )
    return found, code


_AUDIT = "write one with `oncely audit FILE --json`; or leave out --report: it audits then"


def _found(kind: FindingKind, one: Mapping[str, Any]) -> Finding:
    within = tuple(
        (TopicPartition(str(topic), int(number)), OffsetRange(int(start), int(end)))
        for topic, number, start, end in one.get("within", ())
    )
    file = str(one.get("file", ""))
    offset = None if one["offset"] is None else int(one["offset"])
    if one["topic"] is None or one["partition"] is None:
        return Finding(None, offset, kind, within=within, file=file)
    tp = TopicPartition(str(one["topic"]), int(one["partition"]))
    return Finding(tp, offset, kind, within=within, file=file)


def chosen_ranges(
    pipeline: Pipeline, begin: str | None, end: str | None, offsets: Sequence[str]
) -> dict[TopicPartition, OffsetRange]:
    """The ranges of ``--offsets``, or of ``--from`` and ``--to``.

    Raises:
        WrongInput: neither or both were given, or an argument is invalid.
    """
    if bool(offsets) == (begin is not None or end is not None):
        raise WrongInput(
            "a backfill needs a range: --from and --to, or --offsets",
            way_out="--from 2024-05-31T00:00:00 --to 2024-06-01T00:00:00;"
            " or --offsets TOPIC:0:100-200",
        )
    if offsets:
        return _ranges_of(offsets)
    first = pipeline.source.earliest() if begin is None else _at(pipeline, "--from", begin)
    last = dict.fromkeys(first, _FOREVER) if end is None else _at(pipeline, "--to", end)
    return {tp: OffsetRange(at, max(at, last[tp])) for tp, at in first.items() if tp in last}


def _at(pipeline: Pipeline, option: str, text: str) -> dict[TopicPartition, int]:
    try:
        moment = parse_moment(text)
    except ValueError:
        raise WrongInput(
            f"{option}: found {text!r}; allowed: an ISO 8601 time",
            way_out="write it as 2024-05-31T18:00:00 (UTC) or 2024-05-31T18:00:00+02:00",
        ) from None
    return pipeline.source.offsets_at(moment.timestamp_ms)


def _ranges_of(offsets: Sequence[str]) -> dict[TopicPartition, OffsetRange]:
    ranges: dict[TopicPartition, OffsetRange] = {}
    for text in offsets:
        match = _OFFSETS.fullmatch(text)
        start, end = (int(match["start"]), int(match["end"])) if match else (0, 0)
        if match is None or start >= end:
            raise WrongInput(
                f"--offsets: found {text!r}; allowed: TOPIC:PARTITION:START-END",
                way_out="offsets from START up to, but not including, END: orders:0:100-200",
            )
        tp = TopicPartition(match["topic"], int(match["partition"]))
        if tp in ranges:
            raise WrongInput(
                f"--offsets: {tp} was given twice", way_out="one range for each partition"
            )
        ranges[tp] = OffsetRange(start, end)
    return ranges


# -- output -------------------------------------------------------------------------------------


def _concluded(pipeline: Pipeline, done: Repaired, code: int) -> Result:
    """The effect; audits again after an execution."""
    after = _audit_again(pipeline) if done.executed else None
    return Result(
        lambda: done.as_json() | {"audit": after and after.as_json()},
        partial(_show, done, after),
        code if after is None else after.exit_code,
    )


def _audit_again(pipeline: Pipeline) -> Report:
    """Audit what was executed; a destination that lacks nothing is not refused any more."""
    refused = pipeline.destination.look().refused
    after = pipeline.audit()
    if refused and after.verdict == "clean":
        pipeline.end_refusal(refused)
    return after


def _show(done: Repaired, after: Report | None) -> None:
    _show_plan(done)
    _show_impossible(done)
    if after is not None:
        counts = done.done.counts
        screen.out.print(
            f"removed: {counted(row=done.done.removed_rows, reject=done.done.removed_rejects)};"
            f" written: {counted(row=counts.rows, reject=counts.rejects)}\n"
        )
        show_report(after)
    elif done.offsets or done.ranges:
        screen.out.print("\na dry run: nothing was written. Add --execute to execute it")
    else:
        screen.out.print("nothing to repair")


def _show_plan(done: Repaired) -> None:
    if done.offsets:
        show([("damage", LEFT), ("offsets", RIGHT)], sorted(done.offsets.items()))
    if done.ranges:
        show(
            [("topic", LEFT), ("partition", RIGHT), ("start", RIGHT), ("end", RIGHT)],
            ((*tp, one.start, one.end) for tp, one in sorted(done.ranges.items())),
        )
    if done.files:
        screen.out.print(f"replaced or removed: {plural(done.files, 'file')}")


def _show_impossible(done: Repaired) -> None:
    if not done.impossible:
        return
    show(
        [("topic", LEFT), ("partition", RIGHT), ("offset", RIGHT), ("damage", LEFT), ("", REST)],
        (
            (*(one.found.partition or ("", "")), one.found.offset, one.found.kind, one.reason)
            for one in done.impossible[:_SHOWN]
        ),
    )
    screen.out.print(f"\n{plural(len(done.impossible), 'finding')} can't be repaired")
    for reason, number in Counter(one.reason for one in done.impossible).most_common():
        screen.out.print(f"  {number:,}: {reason}")


# -- rejects --------------------------------------------------------------------------------


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


# -- offsets --------------------------------------------------------------------------------


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
