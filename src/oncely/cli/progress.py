"""The runs of a command's pipelines: what each shows, how several run side by side, and where the
output of their Spark goes.

The output is one live line on a terminal, else one log line for each event. Each of several runs
has a thread of its own, and an error ends one of them. What Spark's JVM and workers print goes to a
file.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, Self

from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from oncely.cli import options, screen
from oncely.cli.screen import FIELDS
from oncely.core import events
from oncely.core.progress import RunState
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import ConfigError, OncelyError, RejectSummary, TooManyRejects
from oncely.pipeline import Pipeline
from oncely.threads import Thread, repeat
from oncely.wording import counted, plural, printable

log = logging.getLogger("oncely.run")
_LOOK_AT_ENDS = 2.0
_LOOK_AT_ENDS_FOR_LOGS = 10.0

Ends = Callable[[], Mapping[TopicPartition, Position]]
"""The present last stable offset of every partition."""


@dataclass
class Tally(RunState):
    """The state of a run, and its begin."""

    began: float = field(default_factory=time.monotonic)

    def summary(self) -> str:
        """One sentence for the end of a run."""
        done, seconds = self.counts, time.monotonic() - self.began
        return (
            f"{plural(done.records, 'record')}: {counted(row=done.rows, reject=done.rejects)}"
            f" in {seconds:,.1f} s"
        )


def sentence(event: events.Logged) -> tuple[int, str]:
    """A log level and one line for an event."""
    match event:
        case events.PipelineOpened():
            how = "first start" if event.first_start else "going on"
            return logging.INFO, (
                f"{event.pipeline}: epoch {event.epoch},"
                f" {how} in {plural(len(event.positions), 'partition')}"
            )
        case events.BatchPlanned():
            ranges = ", ".join(f"{tp} {range_}" for tp, range_ in event.ranges.items())
            return logging.DEBUG, f"batch {event.batch_id} planned: {ranges}"
        case events.RangeCommitted():
            replayed = " (had taken effect before)" if event.replayed else ""
            return logging.DEBUG, (
                f"{event.partition} {event.range} committed: "
                f"{counted(record=event.records, row=event.rows, reject=event.rejects)}{replayed}"
            )
        case events.BatchCommitted():
            return logging.INFO, (
                f"batch {event.batch_id} committed: "
                f"{counted(record=event.records, row=event.rows, reject=event.rejects)}"
                f" in {event.seconds:.2f} s"
            )
        case events.PartitionAdded():
            return logging.INFO, f"{event.partition} is new, read from {event.position}"
        case events.GapFound():
            return logging.WARNING, (
                f"{event.partition}: offsets {event.missing} were deleted from the topic before "
                f"they were read"
            )
        case _:
            return _of_the_run(event)


def _of_the_run(
    event: events.BatchFailed
    | events.FencedOut
    | events.StandingBy
    | events.Draining
    | events.PositionsReset
    | events.RecordsRewritten
    | events.RunClosed
    | events.PartitionsChanged,
) -> tuple[int, str]:
    match event:
        case events.BatchFailed():
            return logging.DEBUG, (  # the error is a log entry of its own
                f"failed, try {event.attempt} follows in {event.retry_in_seconds:.0f} s:"
                f" {event.error}"
            )
        case events.FencedOut():
            if not event.partitions:
                return logging.ERROR, f"epoch {event.ours} is fenced by epoch {event.theirs}"
            named = ", ".join(map(str, sorted(event.partitions)))
            return logging.INFO, (
                f"epoch {event.theirs} of another process has taken over from epoch {event.ours}:"
                f" what is in hand of {named} is dropped, and the group is asked whose they are"
            )
        case events.StandingBy():
            return logging.INFO, "standing by while another replica of the pipeline runs"
        case events.Draining():
            return logging.INFO, "asked to stop: the current batch is finished first"
        case events.PositionsReset():
            return logging.INFO, f"reset with epoch {event.epoch}"
        case events.RecordsRewritten():
            done = counted(row=event.rows, reject=event.rejects)
            return logging.INFO, f"{event.kind}: {done}"
        case events.RunClosed():
            return logging.DEBUG, f"ended{': ' if event.error else ''}{event.error}"
        case events.PartitionsChanged():
            named = ", ".join(map(str, sorted(event.partitions))) or "no partitions"
            return logging.INFO, f"{event.change}: {named}"


class Progress(Protocol):
    """An observer of a run, used as a context manager."""

    tally: Tally

    def __enter__(self) -> Self:
        """Begin the output."""

    def __exit__(self, *_: object) -> None:
        """End the output, leaving the screen like a log."""

    def __call__(self, event: events.Event) -> None:
        """Handle an event; called from several threads."""

    def say(self, what: str) -> None:
        """Show a text before the first event."""


class EndsWatch:
    """Looks at the ends of the topics in a thread of its own."""

    def __init__(self, ask: Ends, seconds: float) -> None:
        self._ask, self._seconds = ask, seconds
        self._over = threading.Event()
        self.ends: Mapping[TopicPartition, Position] = {}

    def start(self) -> None:
        """Begin to look."""
        Thread(partial(repeat, self._over, self._seconds, self._look), "lag").start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()

    def lag(self, positions: Mapping[TopicPartition, Position]) -> int | None:
        """Offsets between positions and the ends of the last look; None if these are unknown."""
        known = {tp: end for tp, end in self.ends.items() if tp in positions}
        return sum(max(0, end - positions[tp]) for tp, end in known.items()) if known else None

    def _look(self) -> None:
        ends: Mapping[TopicPartition, Position] = {}
        try:
            with suppress(OncelyError):
                ends = self._ask()
        finally:
            self.ends = ends


def fields(event: events.Logged, tally: Tally, lag: int | None) -> dict[str, Any]:
    """The further keys of an event's log line in JSON."""
    found: dict[str, Any] = {"event": type(event).__name__, "epoch": tally.epoch or None}
    match event:
        case events.BatchPlanned():
            found |= {"epoch": event.epoch or tally.epoch, "batch": event.batch_id}
        case events.BatchCommitted():
            found |= {
                "epoch": event.epoch or tally.epoch, "batch": event.batch_id,
                "seconds": round(event.seconds, 3), "lag": lag, "records": event.records,
                "rows": event.rows, "rejects": event.rejects, "filtered": event.filtered,
            }  # fmt: skip
        case events.RangeCommitted():
            found |= {
                "epoch": event.epoch or tally.epoch, "topic": event.partition.topic,
                "partition": event.partition.partition,
                "range": [event.range.start, event.range.end], "records": event.records,
                "rows": event.rows, "rejects": event.rejects, "filtered": event.filtered,
            }  # fmt: skip
    return found


class LogLines:
    """For a file, a pipe or a supervisor: one line for each event.

    Args:
        ends: asked for the lag of the lines; None: they have none.
    """

    def __init__(self, ends: Ends | None = None) -> None:
        self.tally = Tally()
        self._lock = threading.Lock()
        self._ends = EndsWatch(ends or dict, _LOOK_AT_ENDS_FOR_LOGS)
        self._watching = ends is not None

    def __enter__(self) -> Self:
        if self._watching:
            self._ends.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.stop()

    def __call__(self, event: events.Event) -> None:
        """Log the event."""
        with self._lock:
            self.tally.take(event)
            lag = self._ends.lag(self.tally.positions)
        if not isinstance(event, events.Polled):
            log.log(*sentence(event), extra={FIELDS: fields(event, self.tally, lag)})

    def say(self, what: str) -> None:
        """Log the text."""
        log.info("%s", what)


class LiveLines:
    """The live lines of a command's pipelines at the bottom of the terminal."""

    def __init__(self) -> None:
        self._lines: list[LiveLine] = []
        self._live = Live(
            get_renderable=self.shown, console=screen.err, refresh_per_second=8, transient=True
        )

    def add(self, line: LiveLine) -> None:
        """Show a line below the others."""
        self._lines = [*self._lines, line]
        self._live.start()

    def remove(self, line: LiveLine) -> None:
        """Show a line no longer."""
        self._lines = [one for one in self._lines if one is not line]
        if not self._lines:
            self._live.stop()

    def shown(self) -> Group:
        """The lines as they are now."""
        return Group(*[one.shown() for one in self._lines])


class LiveLine:
    """For a terminal: rows, rejects, lag and the last batch in one live line.

    Warnings and rare events are printed above it.

    Args:
        name: the name of the pipeline.
        ends: asked for the lag.
        lines: the lines of the command, of which this is one.
    """

    def __init__(self, name: str, ends: Ends, lines: LiveLines | None = None) -> None:
        self.tally = Tally()
        self._name = name
        self._lock = threading.Lock()
        self._ends = EndsWatch(ends, _LOOK_AT_ENDS)
        self._doing = "starting"
        self._spinner = Spinner("dots")
        self._lines = lines or LiveLines()

    def __enter__(self) -> Self:
        self._lines.add(self)
        self._ends.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.stop()
        self._lines.remove(self)

    def __call__(self, event: events.Event) -> None:
        """Update the line; rare events are printed above it."""
        with self._lock:
            self.tally.take(event)
            match event:
                case events.BatchCommitted():
                    records = plural(event.records, "record")
                    self._doing = f"last batch {records} in {event.seconds:.1f} s"
                case events.RunClosed():
                    self._doing = f"failed: {event.error}" if event.error else "ended"
                case events.Draining():
                    self._doing = "stopping after this batch; Ctrl-C again ends now"
        if not isinstance(event, events.BatchCommitted | events.Draining | events.Polled):
            log.log(*sentence(event))

    def say(self, what: str) -> None:
        """Show the text at the end of the line."""
        self._doing = what

    def shown(self) -> Text:
        """The line as it is now."""
        with self._lock:
            tally, doing = self.tally, self._doing
            lag = self._ends.lag(tally.positions)
        parts = [(self._name, "bold"), (plural(tally.counts.rows, "row"), "green")]
        if tally.counts.rejects:
            parts.append((plural(tally.counts.rejects, "reject"), "yellow"))
        if lag is not None:
            parts.append((f"lag {lag:,}", "cyan" if lag else "green"))
        parts.append((doing, "dim"))
        text = Text("  ").join(Text(printable(screen.redact(part)), style) for part, style in parts)
        frame = str(self._spinner.render(time.monotonic()))
        return Text(" ", no_wrap=True, overflow="ellipsis").join([Text(frame, "cyan"), text])


# -- the output of Spark --------------------------------------------------------------------

_KEPT = 10
_ELSEWHERE = "specify a file with --spark-log, or set TMPDIR to a directory of your own"


class SparkLog:
    """A file that is removed after a success; after an error its name is printed.

    Args:
        name: the pipeline, part of the file's name.
        path: the file, which is then always kept; ``-`` for stderr; None for a new file.

    Attributes:
        file: open for writing; None for stderr.
    """

    def __init__(self, name: str, path: Path | None) -> None:
        self._name, self._given = name, path
        self._path = Path()
        self.file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self._given is None:
            self._path, self.file = _own(self._name)
        elif str(self._given) != "-":
            self._path, self.file = self._given, _opened(self._given)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        errors = error.errors if isinstance(error, Failed) else {self._name: error}
        for name, one in errors.items():
            if isinstance(one, TooManyRejects) and one.refused.reasons:
                self._keep_refused(name, one.refused)
        if self.file is None:
            return
        self.file.close()
        failed = kind is not None and issubclass(kind, Exception)
        if self._given is None and not (failed and self._path.stat().st_size):
            self._path.unlink(missing_ok=True)
        elif failed:
            screen.note(f"Spark's own log: {self._path}")

    def _keep_refused(self, name: str, refused: RejectSummary) -> None:
        """Write reasons and sample into a file beside the log, readable for this user only."""
        beside = self._path.parent if self.file is not None else None
        try:
            path, file = _own(name, ".rejects.jsonl", beside)
        except ConfigError as error:  # it must not replace the error that ends the run
            screen.note(f"the sample of the refused records is not kept: {error}")
            return
        with file:
            file.writelines(f"{line}\n".encode() for line in refused.as_json_lines())
        screen.note(f"reasons and a sample of the refused records: {path}")


def _own(name: str, suffix: str = ".log", folder: Path | None = None) -> tuple[Path, IO[bytes]]:
    """A new file that only this user can read, in a folder of the pipeline; of the files of failed
    runs, the newest of each pipeline are kept.

    Raises:
        ConfigError: its folder is not private to this user.
    """
    pattern = f"*{suffix}" if folder is None else f"{name}-*{suffix}"
    if folder is None:
        above = Path(tempfile.gettempdir()) / f"oncely-logs-{os.getuid()}"
        folder = above / (name.strip(".") or "_")
        for one in (above, folder):
            make_private(one, "--spark-log", _ELSEWHERE)
    older = sorted(folder.glob(pattern), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in older[_KEPT:]:
        log.unlink(missing_ok=True)  # a file that is still written only loses its name
    number, path = tempfile.mkstemp(prefix=f"{name}-", suffix=suffix, dir=folder)
    return Path(path), os.fdopen(number, "ab")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(
            "--spark-log", f"{path}: {error.strerror}", way_out="specify a writable file"
        ) from None


# -- private directories -------------------------------------------------------------------


def is_private(folder: Path) -> bool:
    """True if the directory belongs to this user and other users can neither read nor write it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    # A directory inherits the set-group-ID bit, which is ignored here.
    private = stat.S_IMODE(found.st_mode) & 0o777 == stat.S_IRWXU
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and private


def make_private(folder: Path, key: str, way_out: str) -> None:
    """Create a directory, or accept an existing one if it is private.

    In a world-writable directory, another user could create a directory of a predictable name.

    Args:
        folder: the directory; its parent exists.
        key: the key of the pipeline file, or the option, for errors.
        way_out: the error's ``way_out``.

    Raises:
        ConfigError: it is a link or no directory, belongs to another user, or is open to others; or
            it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # a file, or a dangling link
    except OSError as error:
        raise ConfigError(key, f"{folder}: {error.strerror}", way_out=way_out) from None
    if not is_private(folder):
        raise ConfigError(
            key,
            f"{folder} is not a directory that this user alone has access to: it must be no link,"
            f" belong to user id {os.getuid()} and have mode 0700",
            way_out=f"remove it if it is yours; {way_out}",
        )


# -- several runs ---------------------------------------------------------------------------


@dataclass
class Run:
    """The run of a pipeline.

    Attributes:
        pipeline: it.
        progress: its output.
        listener: called with its events.
        alone: the command has no other pipeline.
        done: it has ended by itself, and all of its records are committed.
        error: why it has failed.
        summary: its counts at its end.
    """

    pipeline: Pipeline
    progress: Progress
    listener: events.Listener
    alone: bool
    done: bool = False
    error: BaseException | None = None
    summary: str = ""

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self.pipeline.settings.name

    def naming(self) -> AbstractContextManager[None]:
        """Name the pipeline in log entries of this context."""
        return nullcontext() if self.alone else screen.among_others(self.name)

    def say(self, what: str) -> None:
        """Show what is being done."""
        with self.naming():
            self.progress.say(what)

    def end(self) -> list[str]:
        """Lines that tell how it has ended."""
        told = self.summary
        if self.error is not None:
            message, way_out = screen.complaint(self.error, debug=options.log["debug"])
            told = message + (f"\n  way out: {way_out}" if way_out else "")
        return (told if self.alone else f"{self.name}: {told}").splitlines()


def finished(pipeline: Pipeline, progress: Progress, *, done: bool) -> Run:
    """A run that has ended, the only one of its command."""
    summary = progress.tally.summary()
    return Run(pipeline, progress, progress, alone=True, done=done, summary=summary)


class Failed(OncelyError):
    """Some of several pipelines have failed.

    Args:
        runs: all of the command.

    Attributes:
        errors: the errors by pipeline.
        exit_code: the highest of them: 3 before 2 before 1.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        failed = sum(one.error is not None for one in runs)
        super().__init__(f"{failed} of {len(runs)} pipelines failed")
        self.errors = {one.name: one.error for one in runs if one.error is not None}
        self.exit_code = max(
            one.exit_code if isinstance(one, OncelyError) else 1 for one in self.errors.values()
        )
        self._runs = runs

    @property
    def details(self) -> list[str]:
        """How each has ended."""
        return [line for one in self._runs for line in one.end()]


def each(runs: Sequence[Run], work: Callable[[Run], object]) -> None:
    """Do a work for all runs side by side, until all are through; errors are kept in the runs."""
    threads = [Thread(partial(_attempt, run, work), run.name) for run in runs]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def _attempt(run: Run, work: Callable[[Run], object]) -> None:
    with run.naming():
        try:
            run.error = None
            run.done = bool(work(run))
        except BaseException as error:
            run.error = error
        finally:
            run.summary = run.progress.tally.summary()


def telling(work: Callable[[Run], object]) -> Callable[[Run], object]:
    """The work, whose end is logged at once if other pipelines go on."""

    def told(run: Run) -> object:
        if run.alone:
            return work(run)
        try:
            done = work(run)
        except BaseException as error:
            message, _ = screen.complaint(error, debug=True)
            trace = error if options.log["debug"] else None
            log.error("failed, and ends alone: %s", message.splitlines()[0], exc_info=trace)
            raise
        log.info("ended: %s", run.progress.tally.summary())
        return done

    return told


def refuse_failed(runs: Sequence[Run], *, unless_any_is_left: bool = False) -> None:
    """Raise the errors of runs that have failed.

    Args:
        runs: all of the command.
        unless_any_is_left: only if all have failed.

    Raises:
        Failed: there are several pipelines.
        BaseException: the error of the only one.
    """
    failed = [one for one in runs if one.error is not None]
    if not failed or (unless_any_is_left and len(failed) < len(runs)):
        return
    raise (failed[0].error if failed[0].alone else None) or Failed(runs)
