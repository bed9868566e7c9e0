"""What a run tells while it runs: one live line on a terminal, else one log line an event."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from oncely.cli import screen
from oncely.core import events
from oncely.core.topics import Position, TopicPartition
from oncely.errors import OncelyError

log = logging.getLogger("oncely.run")
_LOOK_AT_ENDS = 2.0

Ends = Callable[[], Mapping[TopicPartition, Position]]
"""The last stable offset of every partition, asked now."""


@dataclass
class Tally:
    """What a run has done so far."""

    began: float = field(default_factory=time.monotonic)
    epoch: int = 0
    records: int = 0
    rows: int = 0
    rejects: int = 0
    positions: dict[TopicPartition, Position] = field(default_factory=dict)

    def hear(self, event: events.Event) -> None:
        """Take what counts out of an event."""
        match event:
            case events.PipelineOpened():
                self.epoch = event.epoch
                self.positions = dict(event.positions)
            case events.PartitionAdded():
                self.positions[event.partition] = event.position
            case events.GapFound():
                self.positions[event.partition] = event.missing.end
            case events.BatchCommitted():
                self.records += event.records
                self.rows += event.rows
                self.rejects += event.rejects
                self.positions.update(event.positions)

    def summary(self) -> str:
        """One sentence for the end of a run."""
        seconds = time.monotonic() - self.began
        return (
            f"{self.records:,} records: {self.rows:,} rows, {self.rejects:,} rejects"
            f" in {seconds:,.1f} s"
        )


def sentence(event: events.Event) -> tuple[int, str]:
    """A log level and one line for an event."""
    match event:
        case events.PipelineOpened():
            how = "first start" if event.first_start else "going on"
            return logging.INFO, (
                f"{event.pipeline}: epoch {event.epoch}, {how} in {len(event.positions)} partitions"
            )
        case events.BatchPlanned():
            ranges = ", ".join(f"{tp} {range_}" for tp, range_ in event.ranges.items())
            return logging.DEBUG, f"batch {event.batch_id} planned: {ranges}"
        case events.RangeCommitted():
            replayed = " (had taken effect before)" if event.replayed else ""
            return logging.DEBUG, (
                f"{event.partition} {event.range} committed: {event.records:,} records,"
                f" {event.rows:,} rows, {event.rejects:,} rejects{replayed}"
            )
        case events.BatchCommitted():
            return logging.INFO, (
                f"batch {event.batch_id} committed: {event.records:,} records,"
                f" {event.rows:,} rows, {event.rejects:,} rejects in {event.seconds:.2f} s"
            )
        case events.PartitionAdded():
            return logging.INFO, f"{event.partition} is new, read from {event.position}"
        case events.GapFound():
            return logging.WARNING, (
                f"{event.partition}: offsets {event.missing} left the topic before they were read"
            )
        case events.BatchFailed():
            return logging.WARNING, (
                f"failed, try {event.attempt} follows in {event.retry_in_seconds:.0f} s:"
                f" {event.error}"
            )
        case events.FencedOut():
            return logging.ERROR, f"epoch {event.ours} is fenced by epoch {event.theirs}"
        case events.Draining():
            return logging.INFO, "asked to stop: the batch in hand is finished first"


class Progress(Protocol):
    """Listens to a run, between enter and exit."""

    tally: Tally

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(self, *_: object) -> None:
        """Leave the screen as a log would."""

    def __call__(self, event: events.Event) -> None:
        """Hear an event; called from several threads."""

    def say(self, what: str) -> None:
        """Tell what is going on before the first event."""


class LogLines:
    """For a file, a pipe, a supervisor: one line an event."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to tidy up."""

    def __call__(self, event: events.Event) -> None:
        """Log the event."""
        with self._lock:
            self.tally.hear(event)
        log.log(*sentence(event))

    def say(self, what: str) -> None:
        """Log it."""
        log.info("%s", what)


class LiveLine:
    """For a person: rows, rejects, lag and the last batch in one line that stays in place.

    Warnings and what happens once are printed above it.
    """

    def __init__(self, name: str, ends: Ends) -> None:
        self.tally = Tally()
        self._name, self._ask_ends = name, ends
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._ends: Mapping[TopicPartition, Position] = {}
        self._doing = "starting"
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            get_renderable=self._line, console=screen.err, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        threading.Thread(target=self._watch_ends, name="lag", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._live.stop()

    def __call__(self, event: events.Event) -> None:
        """Take the event into the line; what happens once is printed above it."""
        with self._lock:
            self.tally.hear(event)
            match event:
                case events.BatchCommitted():
                    self._doing = f"last batch {event.records:,} records in {event.seconds:.1f} s"
                case events.Draining():
                    self._doing = "stopping after this batch; Ctrl-C again ends now"
        if not isinstance(event, events.BatchCommitted | events.Draining):
            log.log(*sentence(event))

    def say(self, what: str) -> None:
        """Show it at the end of the line."""
        self._doing = what

    def _watch_ends(self) -> None:
        while not self._over.wait(_LOOK_AT_ENDS):
            try:
                self._ends = self._ask_ends()
            except OncelyError:
                self._ends = {}

    def _line(self) -> Table:
        with self._lock:
            tally, doing = self.tally, self._doing
            known = {tp: end for tp, end in self._ends.items() if tp in tally.positions}
            lag = sum(max(0, end - tally.positions[tp]) for tp, end in known.items())
        parts = [(self._name, "bold"), (f"{tally.rows:,} rows", "green")]
        if tally.rejects:
            parts.append((f"{tally.rejects:,} rejects", "yellow"))
        if known:
            parts.append((f"lag {lag:,}", "cyan" if lag else "green"))
        parts.append((doing, "dim"))
        text = Text("  ").join(Text(part, style) for part, style in parts)
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(self._spinner, text)
        return line
