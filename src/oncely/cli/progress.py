"""Output of a run: one live line on a terminal, else one log line for each event."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self

from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from oncely.cli import screen
from oncely.cli.logs import FIELDS
from oncely.core import events
from oncely.core.progress import RunState
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import OncelyError
from oncely.reject_summary import printable
from oncely.threads import Thread, repeat
from oncely.wording import counted, plural

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
