"""``oncely audit``, ``verify``: what is compared, how often, and where the report goes."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.text import Text

from oncely.audit.by_identity import Views, audit_by_id
from oncely.audit.datasets import audit_pair, frame_of, spark_conf
from oncely.audit.evidence import Log
from oncely.audit.of_pipeline import audit, log_of, window_of, with_records
from oncely.audit.page import page
from oncely.audit.readers import reader_of
from oncely.audit.report import KINDS, Finding, Report, Undecided, redacted, verdict_sentence
from oncely.audit.spec import Pair, is_pair, parse_pair
from oncely.audit.watch import Condition, Gauges, RememberingLog, watch
from oncely.cli import screen, verbs
from oncely.cli.opened import STDIN, importable, opened, seconds
from oncely.cli.options import Result
from oncely.cli.progress import SparkLog
from oncely.cli.run import Signals
from oncely.cli.screen import LEFT, RIGHT, show
from oncely.cli.verbs import Audit as Asked
from oncely.config import PipelineSettings, SparkSettings
from oncely.core.ranges import TopicPartition
from oncely.errors import Interrupted, OncelyError, WrongInput
from oncely.pipeline import Pipeline
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark import session
from oncely.runtimes.spark.batch_commit import RowPlan, expected_rows
from oncely.secrets import scope
from oncely.verify.report import FIRST, Broken
from oncely.verify.report import Report as Verified
from oncely.wording import plural

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Audit = Callable[[], Report]


def audit_command(asked: Asked) -> int:
    """Compare, print, write; returns the exit code."""
    _check(asked)
    try:
        with ExitStack() as stack:
            stopped = threading.Event()
            signals = stack.enter_context(Signals(_forced_by_a_second(stopped)))
            name, one = _audit(asked, stack, signals)
            if not asked.watch:
                report = one()
                _write(asked, report)
                found = Result(report.as_json, partial(show_report, report), report.exit_code)
                return found.print(as_json=asked.as_json)
            return _watch(asked, name, one, stopped, stack)
    except (Interrupted, KeyboardInterrupt):
        return _interrupted(asked)


def _check(asked: Asked) -> None:
    if (asked.file is None) == (asked.left is None and asked.right is None):
        raise WrongInput(
            "a pipeline file, or --left and --right", way_out="oncely audit FILE, or oncely audit"
            " --left SPEC --right SPEC --id EXPR",
        )  # fmt: skip
    if (asked.left is None) != (asked.right is None):
        raise WrongInput("--left and --right belong together")
    if not asked.watch and (asked.timeout or asked.metrics or asked.allow_host):
        raise WrongInput("--timeout, --metrics and --allow-host need --watch")


def _interrupted(asked: Asked) -> int:
    if asked.watch:
        return 4 if asked.until else 0
    screen.note("stopped before the comparison ended")
    return 4


def _forced_by_a_second(stopped: threading.Event) -> Callable[[], None]:
    def asked() -> None:
        if stopped.is_set():
            if process := session.java_process():
                process.kill()
            screen.leave_now(1)
        stopped.set()

    return asked


# -- what is compared -----------------------------------------------------------------------------


def _audit(asked: Asked, stack: ExitStack, signals: Signals) -> tuple[str, Audit]:
    """The name of what is compared, and one comparison."""
    file = asked.file
    if file is None or (file != STDIN and is_pair(file)):
        left, right = (asked.left or "", asked.right or "") if file is None else (file, file)
        pair = parse_pair(left, right, asked.match, asked.conf or ())
        screen.hide(pair.secrets)
        return pair.name, _pair_audit(asked, pair, stack, signals)
    pipeline = opened(file)
    if asked.keyed or asked.conf or asked.since or asked.match.get("source_columns"):
        raise WrongInput(
            "--keyed, --conf, --since and --source-columns need --left and --right",
            way_out="a pipeline file says all of that",
        )

    log = stack.enter_context(closing(RememberingLog(log_of(pipeline.settings))))
    if any(asked.match.values()):
        importable(pipeline, file)
        once = _identity_audit(asked, pipeline, log, stack, signals)
    else:
        once = _pipeline_audit(asked, pipeline, log)
    if asked.html is not None:
        return pipeline.settings.name, lambda: with_records(once(), pipeline.settings, log)
    return pipeline.settings.name, once


def _pair_audit(asked: Asked, pair: Pair, stack: ExitStack, signals: Signals) -> Audit:
    since, until = moment("--since", asked.since), moment("--until", asked.until)
    spark = stack.enter_context(_spark(pair.spark, spark_conf(pair.left, pair.right)))
    signals.install()  # a SparkContext installs a handler of its own

    proved: dict[TopicPartition, int] = {}

    def once() -> Report:
        report = audit_pair(
            spark, pair, since=since, until=until, proved=proved, keyed=asked.keyed,
            limit=asked.limit,
        )  # fmt: skip
        if asked.watch and pair.match.source_columns and report.verdict == "clean":
            proved.update({one.partition: one.compared.end for one in report.partitions})
        return report

    return once


def _identity_audit(
    asked: Asked, pipeline: Pipeline, log: Log, stack: ExitStack, signals: Signals
) -> Audit:
    match = asked.match
    left, right = match["id_left"] or match["id"], match["id_right"] or match["id"]
    if not left or not right:
        raise WrongInput("--by needs an id", way_out="add --id EXPR")
    settings = pipeline.settings
    more = spark_conf_of(settings)
    spark = stack.enter_context(_spark(settings.spark, more))
    signals.install()
    views = views_of(pipeline, spark, log)
    until = None if asked.watch else moment("--until", asked.until)

    def once() -> Report:
        with scope(pipeline.secrets):
            return audit_by_id(
                spark, views, left, right, match["by"], until=until, limit=asked.limit
            )

    return once


@contextmanager
def _spark(settings: SparkSettings, more: Mapping[str, str]) -> Iterator[SparkSession]:
    given = settings.spark_conf()
    conf = {**more, **given}
    if "spark.jars" in more and "spark.jars" in given:
        conf["spark.jars"] = f"{given['spark.jars']},{more['spark.jars']}"
    with SparkLog("audit", None) as out:
        spark = session.start("audit", settings.master, conf, out.file)
        try:
            yield spark
        finally:
            session.stop(spark)


def _pipeline_audit(asked: Asked, pipeline: Pipeline, log: Log) -> Audit:
    until = None if asked.watch else moment("--until", asked.until)

    def once() -> Report:
        return audit(pipeline, limit=asked.limit, until=until, log=log, download=asked.download)

    return once


# -- where the report goes ------------------------------------------------------------------------


def _write(asked: Asked, report: Report) -> None:
    if asked.html is not None:
        replaced(asked.html, page(redacted(report, screen.redact), str(asked.file)))


def replaced(path: Path, text: str) -> None:
    """Write a file at once: a reader sees the former content or the new one.

    Raises:
        WrongInput: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent,
                                         delete=False) as made:  # fmt: skip
            made.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(made.name).chmod(0o666 & ~mask)
        os.replace(made.name, path)
    except OSError as error:
        raise WrongInput(f"can't write {path}: {error.strerror}") from None


def _watch(asked: Asked, name: str, one: Audit, stopped: threading.Event, stack: ExitStack) -> int:
    listener = _Watching(asked, Gauges(screen.redact(name)))
    if asked.metrics is not None:
        stack.enter_context(listener.gauges.server(asked.metrics, asked.allow_host or ()))
    timeout = seconds("--timeout", asked.timeout) if asked.timeout else None
    condition = Condition(
        moment("--until", asked.until), timeout, late=asked.file is None or is_pair(asked.file)
    )
    every = seconds("--every", asked.every)
    try:
        return watch(one, listener, condition, every=every, stop=stopped)
    except Interrupted:
        damaged = listener.last is not None and listener.last.verdict == "damaged"
        return 1 if damaged else _interrupted(asked)


@dataclass
class _Watching:
    """Prints and keeps the reports of a watch."""

    asked: Asked
    gauges: Gauges
    last: Report | None = None

    def audited(self, report: Report) -> None:
        self.last = report
        self.gauges.audited(report)
        _write(self.asked, report)
        if self.asked.as_json:
            screen.show_json(report.as_json())
            return
        until = report.complete_until.wall_time
        told = f"; complete until {until:%Y-%m-%d %H:%M:%S} UTC" if until else ""
        screen.out.print(
            f"{report.at:%Y-%m-%d %H:%M:%S} {report.verdict}: {verdict_sentence(report)}{told}"
        )

    def failed(self, error: OncelyError) -> None:
        self.gauges.failed(error)
        screen.note(f"no answer, trying again: {error.message}")


def moment(option: str, text: str | None) -> datetime | None:
    """A time of the command line.

    Raises:
        WrongInput: it is no time.
    """
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise WrongInput(
            f"{option}: {text!r} is no time", way_out="ISO 8601: 2026-11-21T12:00:00Z"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def views_of(pipeline: Pipeline, spark: SparkSession, log: Log) -> Views:
    """The parts of a pipeline that the view needs.

    Raises:
        ConfigError: there is no view of this sink.
    """
    # After a Spark transform, the ids of decoded records are compared.
    unchanged = pipeline.spark_transform is not None
    plan = RowPlan(pipeline.decoder, Unchanged() if unchanged else pipeline.row_transform)
    settings = pipeline.settings
    return Views(
        settings,
        partial(expected_rows, plan),
        partial(_rows, pipeline, spark, TemporaryDirectory(prefix="oncely-audit-")),
        partial(window_of, settings),
        log,
    )


def spark_conf_of(settings: PipelineSettings) -> dict[str, str]:
    """The settings of a session that reads the destination."""
    found = reader_of(settings).dataset(settings.sink)
    return {} if found is None else spark_conf(found)


def _rows(pipeline: Pipeline, spark: SparkSession, folder: TemporaryDirectory[str]) -> DataFrame:
    from oncely import files

    settings = pipeline.settings
    reader = reader_of(settings)
    if (found := reader.dataset(settings.sink)) is not None:
        return frame_of(spark, found)
    if reader.rows is None:
        return files.read(spark, pipeline)
    return reader.rows(spark, settings, pipeline.row_schema, Path(folder.name))


# -- the report -----------------------------------------------------------------------------

_STYLES = {"clean": "bold green", "damaged": "bold red", "unknown": "bold yellow"}
_PROOFS = {
    "offsets": "each row contains the offset of its record",
    "content": "rows do not contain offsets: their values were compared",
    "counts": "rows do not contain offsets: only their number was compared",
}
_HEADINGS = {
    "lost": "Lost records: neither a row nor a dead letter, or too few rows",
    "duplicated": "Duplicated records: too many rows, or a row and a dead letter",
    "altered": "Altered rows: other values than were committed",
    "unexpected": "Unexpected rows: of no record, or beyond the position",
}


def show_report(report: Report) -> None:
    """Print the verdict, then the partitions, then the damage."""
    out = screen.out
    out.print(Text.assemble((report.verdict, _STYLES[report.verdict]), f"  {_summary(report)}"))
    out.print(Text(f"proof: {_PROOFS[report.proof]}", style="dim"))
    for line in (*report.limits, *_complete(report)):
        out.print(Text(line, style="dim"))
    out.print()
    _show_partitions(report)
    for kind in KINDS:
        _show_findings(kind, [one for one in report.findings if one.kind == kind], report)
    if report.undecided:
        out.print(Text("\nNot proved", style="bold yellow"))
        for one in report.undecided:
            out.print(f"  {_where_undecided(one)}{one.reason}")


def _summary(report: Report) -> str:
    counts = ", ".join(f"{report.found[kind]:,} {kind}" for kind in KINDS if report.found.get(kind))
    whole = f"{report.accounted:,} of {plural(report.records, 'record')} accounted for"
    holes = f", {plural(report.holes, 'hole')}" if report.holes else ""
    return f"{report.pipeline}: {counts + '; ' if counts else ''}{whole}{holes}"


def _complete(report: Report) -> Iterator[str]:
    complete = report.complete_until
    if complete.wall_time:
        yield f"complete until {_shown(complete.wall_time)}"
    if complete.event_time:
        yield f"the last record of that is from {_shown(complete.event_time)}"


def _shown(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _show_partitions(report: Report) -> None:
    show(
        [
            ("partition", LEFT),
            ("from", RIGHT),
            ("position", RIGHT),
            ("end", RIGHT),
            ("records", RIGHT),
            ("accounted", RIGHT),
            ("holes", RIGHT),
        ],
        (
            (
                one.partition,
                one.compared.start,
                one.compared.end,
                one.end,
                one.records,
                Text(f"{one.accounted:,}", style="" if one.accounted == one.records else "red"),
                one.holes,
            )
            for one in report.partitions
        ),
    )


def _show_findings(kind: str, findings: Sequence[Finding], report: Report) -> None:
    if not findings:
        return
    screen.out.print(Text(f"\n{_HEADINGS[kind]}", style="bold red"))
    for line in _lines(findings):
        screen.out.print(f"  {line}")
    left = report.found[kind] - len(findings)  # type: ignore[index]
    if left > 0 and all(one.offset is not None for one in findings):
        screen.out.print(f"  and {left:,} more; --limit shows them")


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Findings with the same explanation on one line, consecutive offsets as a range."""
    for (tp, detail), some in groupby(findings, lambda one: (one.partition, one.detail)):
        offsets = [one.offset for one in some]
        shown = _ranges([one for one in offsets if one is not None])
        where = f"{tp} offset {shown}: " if shown else f"{tp}: " if tp else ""
        yield f"{where}{detail}"


def _ranges(offsets: Sequence[int]) -> str:
    runs: list[tuple[int, int]] = []
    for one in offsets:
        if runs and one == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], one)
        else:
            runs.append((one, one))
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)


def _where_undecided(one: Undecided) -> str:
    if one.partition is None:
        return ""
    return f"{one.partition} {one.range}: " if one.range else f"{one.partition}: "


# -- verify --------------------------------------------------------------------------------


_UNKNOWN = 20  # reasons that are printed


def verify_file(asked: verbs.Verify) -> Result:
    """Check ledger, manifest and event logs."""
    found = opened(asked.file).verify(asked.events or ())
    return Result(found.as_json, partial(_verified, found), found.exit_code)


def _verified(found: Verified) -> None:
    for one in found.unknown[:_UNKNOWN]:
        screen.note(f"unknown: {one.text}")
    if len(found.unknown) > _UNKNOWN:
        screen.note(f"and {len(found.unknown) - _UNKNOWN:,} more that are unknown")
    if found.broken:
        _show_broken(found.broken[0], len(found.broken) - 1)
    checked = ", ".join(f"{count:,} {name}" for name, count in found.checked.items() if count)
    conclusions = {
        "holds": "every step follows from the one before it",
        "broken": "a step is broken",
        "unknown": "no step is broken, as far as it is known",
    }
    screen.out.print(f"{found.pipeline}: {conclusions[found.verdict]} ({checked or 'nothing'})")


def _show_broken(one: Broken, more: int) -> None:
    epoch, offset = one.order
    where = "" if one.order == FIRST else f", epoch {epoch}, offset {offset}"
    screen.out.print(Text(f"broken ({one.rule}{where}): {one.text}", style="bold red"))
    if one.context:
        screen.out.print("around it:")
        for line in one.context:
            screen.out.print(Text(f"  {line}", no_wrap=True, overflow="ignore"), crop=False)
    if more:
        screen.out.print(f"{more:,} other findings may be consequences of it; --json counts them")
