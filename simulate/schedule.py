"""One seed's source of chance and time, and work that is done step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from random import Random
from typing import Any, Protocol

from oncely.commit.backoff import Backoff
from oncely.errors import Unavailable


class Violation(Exception):
    """A promise of the worker does not hold."""


class Killed(BaseException):
    """The process of this work has ended."""


class Sleeper(Protocol):
    """A process that may be paused.

    Attributes:
        asleep: the number of actions for which it is paused.
    """

    asleep: int


class Schedule:
    """What happens next, drawn from a seed.

    Attributes:
        random: the source of chance.
        now: seconds; time passes when the schedule says so.
        faults: False: nothing fails any more.
    """

    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.faults = True

    def happens(self, share: float) -> bool:
        """True with a probability, as long as there are faults."""
        return self.faults and self.random.random() < share

    def may_fail(self, what: str, share: float = 0.03) -> None:
        """Raise Unavailable with a probability."""
        if self.happens(share):
            raise Unavailable(f"{what}: no answer")

    def play(
        self,
        actions: Iterable[tuple[float, Callable[[], None]]],
        count: int,
        processes: Iterable[Sleeper],
        tell: Callable[[str], None],
    ) -> Iterator[None]:
        """Do actions by chance, and yield after each; there are no faults at the end.

        Args:
            actions: with their weights.
            count: of what is done.
            processes: those that there are at an action; they sleep one action less.
            tell: is told of each action.
        """
        weights, known = zip(*actions, strict=True)
        for action in self.random.choices(known, weights, k=count):
            self.now += self.random.uniform(0, 0.5)
            for one in processes:
                one.asleep = max(0, one.asleep - 1)
            tell(f"{self.now:6.1f} {action.__name__.strip('_')}")
            action()
            yield
        self.faults = False


class Steps:
    """Work in a thread that stops at every :func:`step` until :meth:`go`. One thread runs at a
    time, so an order of steps can be repeated."""

    _here = threading.local()

    def __init__(self, work: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self._killed = False
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def go(self) -> None:
        """Go on to the next step, or to the end."""
        if not self.future.done():
            self._go.release()
            self._stopped.acquire()

    def kill(self) -> None:
        """End the work where it is."""
        self._killed = True
        while not self.future.done():
            self.go()

    def _run(self, work: Callable[[], Any]) -> None:
        self._here.steps = self
        try:
            self._wait()
            self.future.set_result(work())
        except BaseException as error:
            self.future.set_exception(error)
        finally:
            self._stopped.release()

    def _wait(self) -> None:
        self._go.acquire()
        if self._killed:
            raise Killed

    def _step(self) -> None:
        self._stopped.release()
        self._wait()


def step() -> None:
    """Stop here until the schedule goes on; does nothing outside of :class:`Steps`."""
    steps: Steps | None = getattr(Steps._here, "steps", None)
    if steps is not None:
        steps._step()


def _wait(_: float) -> None:
    step()


def patience(**_: object) -> Backoff:
    """In the place of :class:`Backoff`: waiting costs a step, and no time."""
    return Backoff(0.1, 0.1, 0.5, _wait, lambda: 0.0)
