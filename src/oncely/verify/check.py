"""The check: values in, the first broken step out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from oncely.config import PipelineSettings
from oncely.core.ranges import TopicPartition
from oncely.verify.history import Proofs, check_ledger
from oncely.verify.log import Log, read
from oncely.verify.reading import Files, Ledger, NamedFile, Rules, read_ledger, rules_of
from oncely.verify.report import Broken, Finding, Report, Unknown
from oncely.verify.runs import story
from oncely.verify.together import begun_in, check_log, check_together, explained_by, proven_by

_NO_LOG = Log()


def check(
    ledger: Ledger,
    log: Log = _NO_LOG,
    rules: Rules = Rules(),  # noqa: B008 - a frozen value
    before: Log | None = None,
) -> Report:
    """Check a ledger, and the event logs of its runs.

    Args:
        ledger: the ledger and the files of a pipeline.
        log: the event logs, read after the ledger.
        rules: what follows from the settings of the pipeline.
        before: the event logs, read before the ledger; None if no run has gone on meanwhile.
    """
    told = story(log, rules)
    grown = before is not None and len(before.lines) < len(log.lines)
    earlier = story(before, rules) if before is not None and grown else told
    found: list[Finding] = [
        *log.problems,
        *check_log(told, rules),
        *check_ledger(
            ledger, rules, Proofs(explained_by(told), begun_in(told), proven_by(told, ledger))
        ),
        *check_together(ledger, told, earlier, rules),
    ]
    if ledger.files is not None:
        found += check_files(ledger.files, ledger)
    broken = [one for one in found if isinstance(one, Broken)]
    unknown = [one for one in found if isinstance(one, Unknown)]
    return Report(
        ledger.pipeline,
        sorted(broken, key=lambda one: one.order),
        list(dict.fromkeys(unknown)),
        _checked(ledger, log),
    )


def verify(settings: PipelineSettings, logs: Sequence[Path]) -> Report:
    """Check the ledger of a pipeline, its manifest, and its event logs.

    Raises:
        WrongInput: a log or the ledger can't be read.
        Unavailable: a server does not answer.
    """
    # A run may go on: what the log contained before is in the ledger, and what the ledger contains
    # is in the log that is read after it.
    before = read(logs, settings.name)
    ledger = read_ledger(settings)
    log = read(logs, settings.name)
    return check(ledger, log, rules_of(settings), before)


def _checked(ledger: Ledger, log: Log) -> dict[str, int]:
    files = ledger.files
    named = {one.path for one in files.named} if files else set()
    return {
        "partitions": len(ledger.positions),
        "ranges": len(ledger.history),
        "events": len(log.lines),
        "files": len(named),
        "orphans": len(files.stored.keys() - named) if files else 0,
    }


# -- files ---------------------------------------------------------------------------------


_Part = tuple[int, int, int, int, str]
"""Epoch, batch, start, end, and a path."""


def check_files(files: Files, ledger: Ledger) -> Iterator[Broken]:
    """Compare the files that belong to the table with the store, and with the ledger."""
    for path in files.again:
        yield Broken("file", f"{path} is named more than once")
    for one in files.named:
        yield from _is_stored(one, files.stored)
        yield from _is_committed(one, ledger)
    for tp, parts in sorted(_parts(files.named).items()):
        yield from _in_order(tp, parts)


def _is_stored(one: NamedFile, stored: Mapping[str, int]) -> Iterator[Broken]:
    order = one.epoch, min((start for start, _ in one.ranges.values()), default=0)
    size = stored.get(one.path)
    if size is None:
        text = f"{one.path} belongs to the table and is not stored"
        yield Broken("file", text, None, order, (_shown(one),))
    elif one.bytes is not None and size != one.bytes:
        text = f"{one.path} has {size} bytes, and was published with {one.bytes}"
        yield Broken("file", text, None, order, (_shown(one),))


def _is_committed(one: NamedFile, ledger: Ledger) -> Iterator[Broken]:
    if one.epoch > ledger.epoch:
        text = f"{one.path} was published by epoch {one.epoch}, and {ledger.epoch} was given last"
        yield Broken("file", text, None, (one.epoch, 0), (_shown(one),))
    for tp, (start, end) in one.ranges.items():
        held = ledger.positions.get(tp)
        undone = any(epoch >= one.epoch for epoch in ledger.resets.get(tp, {}))
        if undone or (held is not None and end <= held.position):
            continue
        at = "no position" if held is None else f"position {held.position}"
        text = f"{one.path} contains records of {tp} [{start}, {end}), which has {at}"
        yield Broken("file", text, tp, (one.epoch, start), (_shown(one),))


def _parts(named: Sequence[NamedFile]) -> dict[TopicPartition, list[_Part]]:
    """The ranges of each batch, by partition."""
    found: dict[TopicPartition, dict[tuple[int, int], _Part]] = {}
    for one in named:
        if not one.batched:
            continue
        for tp, (start, end) in one.ranges.items():
            of, key = found.setdefault(tp, {}), (one.epoch, one.batch)
            known = of.get(key, (*key, start, end, one.path))
            of[key] = (*key, min(start, known[2]), max(end, known[3]), one.path)
    return {tp: list(of.values()) for tp, of in found.items()}


def _in_order(tp: TopicPartition, parts: list[_Part]) -> Iterator[Broken]:
    """Within an epoch a later batch has later offsets: else records were published twice."""
    for (epoch, batch, start, end, path), other in pairwise(sorted(parts)):
        if other[0] == epoch and other[2] < end:
            text = (
                f"{tp} [{other[2]}, {min(end, other[3])}) was published by batch {batch} and by"
                f" batch {other[1]} of epoch {epoch}"
            )
            context = (
                f"batch {batch} {tp} [{start}, {end}): {path}",
                (f"batch {other[1]} {tp} [{other[2]}, {other[3]}): {other[4]}"),
            )
            yield Broken("overlap", text, tp, (epoch, other[2]), context)


def _shown(one: NamedFile) -> str:
    ranges = ", ".join(f"{tp} [{start}, {end})" for tp, (start, end) in one.ranges.items())
    return f"{one.path}: epoch {one.epoch}, batch {one.batch}, {ranges}"
