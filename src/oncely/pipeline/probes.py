"""``/livez``, ``/readyz`` and ``/metrics`` of a run."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from oncely.clients.http_server import Page, Server
from oncely.core import events
from oncely.errors import OncelyError, WrongInput
from oncely.prometheus import CONTENT_TYPE
from oncely.runtimes.health import Health, Limits, liveness, metrics, readiness
from oncely.secrets import scope
from oncely.threads import Thread, repeat

if TYPE_CHECKING:
    from oncely.pipeline.pipeline import Pipeline

log = logging.getLogger(__name__)
_LOOK_SECONDS = 5.0
_AGES_SECONDS = 15.0
_REJECTS_SECONDS = 60.0


@dataclass(frozen=True)
class Http:
    """The HTTP servers of a run: its probes, and its metrics.

    Attributes:
        address: ``HOST:PORT`` of probes and metrics; without a host only this machine can connect.
        polling_ttl: seconds without a look for records after which ``/livez`` answers 500.
        consuming_ttl: the same without a commit, though there are records.
        metrics: ``HOST:PORT`` of a server of the metrics alone.
    """

    address: str | None = None
    polling_ttl: float = Limits.polling
    consuming_ttl: float = Limits.consuming
    metrics: str | None = None

    def __post_init__(self) -> None:
        if min(self.polling_ttl, self.consuming_ttl) <= 0:
            raise WrongInput("a time to live must be longer than 0 s")


@contextmanager
def probed(
    pipeline: Pipeline,
    http: Http | None,
    listener: events.Listener,
    group: str | None = None,
) -> Iterator[events.Listener]:
    """The listener, and before it the probes if they are wanted.

    ``group``: the group whose lag is shown; None: that of the pipeline file.

    Raises:
        WrongInput: the address is malformed, or can't be listened at.
    """
    with probed_together([Probed(pipeline, listener, group)], http) as (heard,):
        yield heard


class Probed(NamedTuple):
    """A pipeline, its listener, and the group whose lag is shown."""

    pipeline: Pipeline
    listener: events.Listener
    group: str | None = None


@contextmanager
def probed_together(
    given: Sequence[Probed], http: Http | None
) -> Iterator[Sequence[events.Listener]]:
    """As :func:`probed`, for pipelines whose probes and metrics are served together.

    Raises:
        WrongInput: the address is malformed, or can't be listened at.
    """
    if http is None:
        yield [one.listener for one in given]
        return
    healths = [_health(one, http) for one in given]
    with ExitStack() as servers:
        if http.address is not None:
            servers.enter_context(Server("--http", http.address, _pages(healths)))
        if http.metrics is not None:
            page = _pages(healths)["/metrics"]
            pages = {"/": page, "/metrics": page}
            servers.enter_context(Server("--metrics", http.metrics, pages))
        for one, health in zip(given, healths, strict=True):
            servers.enter_context(_watched(one.pipeline, health))
        yield [_both(health, one.listener) for one, health in zip(given, healths, strict=True)]


def _health(given: Probed, http: Http) -> Health:
    settings, pause = given.pipeline.settings, given.pipeline.settings.trigger_seconds
    return Health(
        settings.name,
        given.group or settings.shown_group or settings.name,
        Limits(http.polling_ttl + pause, http.consuming_ttl + pause),
        given.pipeline.secrets,
    )


def _both(first: events.Listener, second: events.Listener) -> events.Listener:
    def heard(event: events.Event) -> None:
        first(event)
        second(event)

    return heard


def _pages(healths: Sequence[Health]) -> dict[str, Callable[[], Page]]:
    def probe(answer: tuple[bool, dict[str, Any]], bad: int) -> Page:
        good, document = answer
        return Page(json.dumps(document) + "\n", "application/json", 200 if good else bad)

    return {
        "/livez": lambda: probe(liveness(healths), 500),
        "/readyz": lambda: probe(readiness(healths), 503),
        "/metrics": lambda: Page(metrics(healths), CONTENT_TYPE),
    }


@contextmanager
def _watched(pipeline: Pipeline, health: Health) -> Iterator[None]:
    """Ask for the ends of the topics in a thread, until the end of the block."""
    over = threading.Event()
    looks = _Looks(replace(pipeline), health)  # its clients are not shared with other threads
    every = min(_LOOK_SECONDS, health.limits.consuming / 4)

    def watch() -> None:
        with scope(pipeline.secrets):
            repeat(over, every, looks.look)

    Thread(watch, "ends").start()
    try:
        yield
    finally:
        over.set()


@dataclass
class _Looks:
    """Looks at topics and ledger, for what no event contains; each kind in its own interval."""

    pipeline: Pipeline
    health: Health
    clock: Callable[[], float] = time.monotonic
    _ages_at: float = 0.0
    _rejects_at: float = 0.0

    def look(self) -> None:
        """Look at whatever is due."""
        for one in (self._ends, self._ages, self._ledger):
            try:
                one()
            except OncelyError as error:
                log.debug("%s: %s", one.__name__, error.message)

    def _ends(self) -> None:
        self.health.ends(self.pipeline.source.stable_end())

    def _ages(self) -> None:
        if self.clock() < self._ages_at:
            return
        self._ages_at = self.clock() + _AGES_SECONDS
        unread = self.health.unread()
        source = self.pipeline.source
        self.health.aged(source.timestamps_at(unread, timeout=_LOOK_SECONDS) if unread else {})

    def _ledger(self) -> None:
        if self.clock() < self._rejects_at and not self.health.suspicious:
            return
        self._rejects_at = self.clock() + _REJECTS_SECONDS
        known = self.pipeline.destination.look()
        self.health.stored(known.positions)
        self.health.rejected(known.rejects)
