"""Handlers of topics, and the worker that calls them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import SecretStr

from oncely.config import PipelineSettings, load, parse
from oncely.core import events
from oncely.core.progress import RunResult
from oncely.errors import ConfigError, OncelyError
from oncely.kinds.handlers.sink import Handler, name_of
from oncely.kinds.kind import kind_of
from oncely.pipeline.pipeline import Pipeline
from oncely.pipeline.standby import OnFenced
from oncely.runtimes.dropping import Drops
from oncely.threads import StopSignal
from oncely.users_function import said, users_function

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., object])

_WRITE_DROP = "def is_test(record) -> bool: ..."
_MOST_THREADS = 64
_WRITE = "def bill(batch: oncely.Batch, tx: psycopg.Connection) -> None: ..."


def _ignore(_: events.Event) -> None:
    """The listener that ignores events."""


class Worker:
    """A member of a consumer group that calls functions inside the transaction of the offsets.

        worker = Worker("billing", brokers="kafka:9092", url="postgresql://…")

        @worker.handle("orders")
        def bill(batch: Batch, tx: psycopg.Connection) -> None:
            for record in batch:
                tx.execute("INSERT INTO bills …", …)

    ``oncely work module:worker`` runs it, in as many processes as wanted.

    Args:
        name: the pipeline's name, which is the ledger's key.
        brokers: ``host:port``, separated by commas.
        url: the PostgreSQL database; ``${VAR}`` is replaced as in a pipeline file.
        tables: other tables and keys of a pipeline file: ``source``, ``decode``, ``filter``,
            ``transform``, ``sink``, ``worker``. By default records are not decoded (``raw``).

    Raises:
        ConfigError: when it is started: names each wrong key.
    """

    def __init__(self, name: str, *, brokers: str, url: str, **tables: Mapping[str, Any]) -> None:
        self.name = name
        self._handlers: dict[str, Handler] = {}
        self._drops: dict[str, Drops] = {}
        self._threads: dict[str, int] = {}
        source, sink = tables.pop("source", {}), tables.pop("sink", {})
        decode = tables.pop("decode", {"format": "raw"})

        def settings() -> PipelineSettings:
            found = {
                "source": {"brokers": brokers, "topics": list(self._handlers), **source},
                "decode": decode,
                "sink": {"kind": "handlers", "url": url, **sink},
            }
            return parse({"name": name, **found, **tables}, of=f"worker {name!r}")

        self._settings: Callable[[], PipelineSettings] = settings

    @classmethod
    def from_file(cls, path: str | Path) -> Worker:
        """A worker for a pipeline file with ``sink.kind = "handlers"``.

        Raises:
            ConfigError: names every invalid key, and the way out.
        """
        settings = load(Path(path))
        if not kind_of(settings.sink.kind).calls_handlers:
            raise ConfigError(
                "sink.kind",
                f"found {settings.sink.kind!r}, and a worker has handlers",
                way_out='write kind = "handlers", or start the file by `oncely work FILE`',
            )
        made = cls(settings.name, brokers="", url="")
        made._settings = lambda: settings
        return made

    def handle(
        self, topic: str, *, drop: Drops | None = None, threads: int = 1
    ) -> Callable[[AnyHandler], AnyHandler]:
        """Register the handler of a topic.

        It is called with a :class:`oncely.Batch` of one partition and the open transaction. What
        it does with that is committed with the offsets, or not at all. It may be called again for
        the same records after an error.

        Args:
            topic: the topic.
            drop: called with each :class:`oncely.Record` before it is decoded;
                those for which it returns true are dropped, and counted as filtered.
            threads: the number of threads that call it, each with records of other keys, in a
                transaction of its own. The records of a key are handled in their order, those
                without a key in any order.

        Raises:
            ConfigError: the topic has a handler, or a function can't be called so.
        """
        if not isinstance(topic, str):
            raise ConfigError(
                "handle", f"found {topic!r}; it takes a topic", way_out='@worker.handle("orders")'
            )

        if not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
            raise ConfigError(
                f"handle({topic!r})",
                f"threads: found {threads!r}; allowed: 1 to {_MOST_THREADS}",
                way_out="write threads=8; each of them has a session of the database",
            )

        def register(handler: AnyHandler) -> AnyHandler:
            if topic in self._handlers:
                raise ConfigError(
                    f"handler of {topic!r}",
                    f"{name_of(self._handlers[topic])} and {name_of(handler)} both want it",
                    way_out="let one handler call both, in the order that is right",
                )
            _refuse_unfit(f"handler of {topic!r}", handler, _WRITE, "a batch", "its transaction")
            if drop is not None:
                _refuse_unfit(f"drop of {topic!r}", drop, _WRITE_DROP, "a record")
                self._drops[topic] = drop
            self._handlers[topic] = handler
            if threads > 1:
                self._threads[topic] = threads
            return handler

        return register

    def relocate(self, brokers: str, url: str, group: str) -> None:
        """From now on read from the beginning, of other brokers, as a member of another group, and
        write into another database. For tests: nothing of the settings leads to a real server."""
        given = self._settings()
        source = {"brokers": brokers, "kafka": {}, "start": "earliest"}
        changed = {
            "source": given.source.model_copy(update=source),
            "sink": given.sink.model_copy(update={"url": SecretStr(url)}),
            "worker": given.worker.model_copy(update={"group": group, "instance": None}),
        }
        self._settings = lambda: given.model_copy(update=changed)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers, by topic."""
        return self._handlers

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the handlers.

        Raises:
            ConfigError: names every invalid key; or topics and handlers differ.
        """
        if not self._handlers:
            raise ConfigError(
                f"worker {self.name!r}",
                "has no handler",
                way_out='decorate a function with @worker.handle("topic")',
            )
        settings = self._settings()
        topics = set(settings.source.topics)
        if differ := sorted(topics ^ self._handlers.keys()):
            lacking = ", ".join(one for one in differ if one in topics)
            problem = f"{lacking} has no handler" if lacking else f"lacks {', '.join(differ)}"
            raise ConfigError("source.topics", problem, way_out="let each topic have one handler")
        return Pipeline(settings).replaced(
            handlers=dict(self._handlers),
            drops=dict(self._drops),
            threads=dict(self._threads),
        )

    def run(
        self,
        until: Literal["latest"] | None = None,
        *,
        stop: StopSignal | None = None,
        listener: events.Listener = _ignore,
        events: str | Path | None = None,
        on_fenced: OnFenced = "end",
    ) -> RunResult:
        """Work until stopped; arguments, result and errors are those of ``Pipeline.work``."""
        return self.pipeline.work(
            until, stop=stop, listener=listener, events=events, on_fenced=on_fenced
        )


def _refuse_unfit(about: str, function: Callable[..., object], way_out: str, *given: str) -> None:
    """Refuse what can't be called with the ``given`` arguments."""
    if not callable(function):
        raise ConfigError(about, f"{function!r} is no function", way_out=way_out)
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    for is_other, kind in (
        (inspect.iscoroutinefunction, "is a coroutine, which would not be awaited"),
        (inspect.isasyncgenfunction, "is a generator, whose body would not run"),
        (inspect.isgeneratorfunction, "is a generator, whose body would not run"),
    ):
        if is_other(called):
            raise ConfigError(about, f"{name_of(function)} {kind}", way_out=way_out)
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        problem = f"{name_of(function)} can't be called with {' and '.join(given)}: {error}"
        raise ConfigError(about, problem, way_out=way_out) from None
    except ValueError:  # a function of C has no signature
        pass


def worker_of(path: str) -> Worker:
    """Import ``package.module:name``.

    Raises:
        ConfigError: it can't be imported, or is no worker.
    """
    module, _, name = path.partition(":")
    if not name:
        raise ConfigError(path, "names no worker", way_out="module:worker, as in billing:worker")
    try:
        with redirect_stdout(sys.stderr), users_function():
            found = getattr(importlib.import_module(module), name)
    except OncelyError:
        raise
    except Exception as error:  # the module may raise any exception
        raise ConfigError(
            path,
            f"can't be imported: {said(error)}",
            way_out="start it in the folder of the module, or put that on PYTHONPATH",
        ) from None
    if not isinstance(found, Worker):
        raise ConfigError(
            path,
            f"is no oncely.Worker, but {type(found).__name__}",
            way_out="name the worker: module:worker",
        )
    return found
