"""What the processes of the files scenarios do: stage and publish, and die or stop on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oncely.core.claim import Fence
from oncely.errors import Fenced, Unavailable
from oncely.kinds.data_file import Scope
from oncely.kinds.files.compact import Compacted, compact
from oncely.kinds.files.sink import FilesSink
from oncely.kinds.files.table import Table
from oncely.stores.objects.store import Connect, FileSystem, connect
from oncely.testing.processes import kill_self, stop_self
from tests.filestools import ENDS, START, FilesPlace, open_sink, publish_all, stage, what
from tests.scenarios.kafka_jobs import Calls

HALF = "half of it"


class Steps(Calls):
    """Counts the calls to producers and to the store together, in one sequence."""

    def place(self, url: str, s3: Any) -> FileSystem:
        """Opens the store, counted."""
        return _Watched(connect(url, s3), self)  # type: ignore[return-value]

    @property
    def files(self) -> Connect:
        """For a :class:`Store`."""
        return self.place


class _Watched:
    """A store of which writing has a middle: half a file, as a crash leaves it."""

    def __init__(self, inner: FileSystem, steps: Steps) -> None:
        self._inner, self._steps = inner, steps

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "write":
            return self._write
        if name != "sync":
            return method
        return lambda *args: self._steps.around(name, lambda: method(*args))

    def _write(self, path: str, data: Any) -> None:
        if path.startswith((".oncely", "_oncely", "_READ_THE_")):  # a probe, or about the root
            self._inner.write(path, data)
            return
        whole = memoryview(data)

        def write() -> None:
            if self._steps.when == HALF and self._steps.here("write"):
                self._inner.write(path, whole[: len(whole) // 2])
                self._steps.what()
            self._inner.write(path, data)

        self._steps.around("write", write)


def hooked(place: FilesPlace, steps: Steps, **more: Any) -> FilesSink:
    """A sink whose every step is counted."""
    return place.sink(kafka=steps.connect, files=steps.files, **more)


def stage_and_publish(place: FilesPlace, fence: Fence, at: int, when: str, only: str) -> list[str]:
    """Stage and publish; at the ``at``-th step the process dies. The steps it took."""
    steps = Steps(at, when, kill_self, only)
    sink = hooked(place, steps)
    sink.prepare()
    steps.names.clear()
    publish_all(sink, what(stage(sink, fence)), fence)
    return steps.names


def compact_and_die(table: Table, at: int, when: str, only: str) -> Compacted:
    """Compact; at the ``at``-th call of that name to a producer the process dies."""
    calls = Calls(at, when, kill_self, only)
    return compact(
        replace(table, pipeline_topics=replace(table.pipeline_topics, connect=calls.connect))
    )


def replace_schema_and_die(
    place: FilesPlace, scope: Scope, schema: str, when: str, only: str
) -> None:
    """Open, and replace a scope's schema; at the first call of that name since the process dies."""
    calls = Calls(-1, when, kill_self, only)
    sink = place.sink(None, kafka=calls.connect)
    fence = open_sink(sink).fence
    calls.at = calls.names.count(only) + 1
    sink.replace_schema(scope, lambda _: schema, fence)


def restart(place: FilesPlace) -> bool:
    """A new run brings the same batch, staged by itself; whether there was nothing to do."""
    sink = place.sink()
    opened = open_sink(sink)
    if dict(opened.positions) == ENDS:
        return True
    assert dict(opened.positions) == START, opened
    return publish_all(sink, what(stage(sink, opened.fence)), opened.fence)


def zombie(place: FilesPlace, fence: Fence, at: int, only: str, **more: Any) -> str:
    """Publish; stop at a step, and say what became of it afterwards."""
    steps = Steps(at, "before", stop_self, only)
    sink = hooked(place, steps, **more)
    sink.prepare()
    steps.names.clear()
    said = ""
    while only not in steps.names:  # a busy machine may take longer than the files may wait
        try:
            sink.begin_batch()
            publish_all(sink, what(stage(sink, fence)), fence)
            said = "published"
        except Fenced:
            said = "fenced"
        except Unavailable as error:
            said = f"unavailable: {error.message}"
    return said


def paused(place: FilesPlace, fence: Fence, step: str, values: dict[str, float]) -> str:
    """As :func:`zombie`, with these values of the pipeline file."""
    return zombie(place, fence, 1, step, **values)
