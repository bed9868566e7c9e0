"""What the processes of the Delta scenarios do: commit, open, reset, replay, and die on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.change import replay as replay_letters
from oncely.core.change import Judge
from oncely.core.claim import Fence, Takeover
from oncely.errors import Fenced, Unavailable
from oncely.kinds.delta.change import DeltaReplay, discard_letters
from oncely.kinds.delta.sink import DeltaSink
from oncely.stores.delta import connect as connect_delta
from oncely.stores.objects.store import connect as connect_files
from oncely.testing.processes import kill_self, stop_self
from tests.deltatools import DeltaPlace
from tests.filestools import ENDS, START, open_sink, publish_all, stage, what
from tests.replaytools import judging
from tests.scenarios.kafka_jobs import Calls
from tests.sinktools import SCHEMA, SOURCE, T0

HALF = "half of it"
KEYS: dict[str, tuple[str, ...]] = {"append": (), "upsert": ("id",)}


class Steps(Calls):
    """Counts the calls to the table and to the store together, in one sequence."""

    def table(self, url: str, s3: Any) -> Any:
        """Reaches the table, counted."""
        return _Watched(connect_delta(url, s3), self)

    def place(self, url: str, s3: Any) -> Any:
        """Opens the store, counted."""
        return _Watched(connect_files(url, s3), self)


class _Watched:
    """A client of which each call is a step; writing has a middle: half a file."""

    def __init__(self, inner: Any, steps: Steps) -> None:
        self._inner, self._steps = inner, steps

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("prepare", "modified"):
            return method

        def call(*args: Any) -> Any:
            if args and isinstance(args[0], str) and args[0].startswith(".oncely"):  # a probe
                return method(*args)
            return self._steps.around(name, lambda: self._do(name, method, *args))

        return call

    def _do(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        if name == "write" and self._steps.when == HALF and self._steps.here("write"):
            path, data = args
            method(path, memoryview(data)[: len(memoryview(data)) // 2])
            self._steps.what()
        return method(*args)


def hooked(place: DeltaPlace, steps: Steps, mode: str = "append", **more: Any) -> DeltaSink:
    """A sink whose every step is counted."""
    return place.sink(keys=KEYS[mode], delta=steps.table, files=steps.place, **more)


# -- a batch -------------------------------------------------------------------------------


def stage_and_publish(
    place: DeltaPlace, mode: str, fence: Fence, at: int, when: str, only: str
) -> list[str]:
    """Stage and publish; at the ``at``-th step the process dies. The steps it took."""
    steps = Steps(at, when, kill_self, only)
    sink = hooked(place, steps, mode)
    publish_all(sink, what(stage(sink, fence)), fence)
    sink.ledger.tidy(fence)
    sink.sweep(fence, 1)
    return steps.names


def restart(place: DeltaPlace, mode: str) -> bool:
    """A new run brings the same batch, staged by itself; whether there was nothing to do."""
    sink = place.sink(keys=KEYS[mode])
    opened = open_sink(sink)  # type: ignore[arg-type]
    if dict(opened.positions) == ENDS:
        return True
    assert dict(opened.positions) == START, opened
    sink.ledger.tidy(opened.fence)
    return publish_all(sink, what(stage(sink, opened.fence)), opened.fence)  # type: ignore[arg-type]


def zombie(place: DeltaPlace, mode: str, fence: Fence, at: int, only: str) -> str:
    """Publish; stop at a step, and say what became of it afterwards."""
    sink = hooked(place, Steps(at, "before", stop_self, only), mode)
    sink.begin_batch()
    try:
        publish_all(sink, what(stage(sink, fence)), fence)  # type: ignore[arg-type]
    except Fenced:
        return "fenced"
    except Unavailable as error:
        return f"unavailable: {error.message}"
    return "published"


# -- opening, resetting, replaying ---------------------------------------------------------


def open_table(place: DeltaPlace, at: int, when: str) -> list[str]:
    """Create the table, or add a column to it, and take the ledger over."""
    steps = Steps(at, when, kill_self)
    open_sink(hooked(place, steps))  # type: ignore[arg-type]
    return steps.names


def reset_to(place: DeltaPlace, to: int, at: int, when: str) -> list[str]:
    """Put T0 back; its dead letters from there on are void."""
    steps = Steps(at, when, kill_self)
    hooked(place, steps).open(Takeover(SOURCE, dict, START, reset=lambda _: {T0: to}))
    return steps.names


def passes(one: Any) -> bool:
    """Of the dead letters, the even ones."""
    return bool(one.offset % 2 == 0)


def replayed(sink: Any, judge: Judge) -> tuple[int, int]:
    """A whole replay, two dead letters at a time."""
    done = replay_letters(DeltaReplay(sink), judge, Backoff(0.01, 0.1, 10), 2)
    return done.moved, done.kept


def replay(place: DeltaPlace, at: int, when: str) -> list[str]:
    """Try all dead letters again."""
    steps = Steps(at, when, kill_self)
    replayed(hooked(place, steps), judging(passes))
    return steps.names


def discard(place: DeltaPlace, at: int, when: str, only: str = "") -> list[str]:
    """Discard some dead letters."""
    steps = Steps(at, when, kill_self, only)
    discarded(hooked(place, steps))
    return steps.names


def discarded(sink: Any) -> None:
    """Those of even offsets."""
    discard_letters(sink, lambda one: one.offset % 2 == 0, True)


def narrow() -> pa.Schema:
    """A table that lacks a column."""
    return pa.schema([SCHEMA.field("id")])
