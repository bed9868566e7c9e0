"""A database session that kills its own process at the n-th call, before or after it.

``pipeline.replaced(connect=KillAt(n))`` has such sessions. Calls are counted over all sessions of
the process after :attr:`KillAt.armed_by` has occurred in enough statements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from oncely.stores.sql.connection import Connection, Dialect, connect
from oncely.testing.processes import kill_self

LEND, FUNCTION, GIVE_BACK = "LEND", "a statement of the function", "GIVE BACK"
"""The calls of a transaction that is lent to a handler."""


@dataclass
class Counter:
    """The number of calls so far, in this process."""

    calls: int = 0
    met: int = 0
    seen: list[str] = field(default_factory=list)


@dataclass
class KillAt:
    """Opens sessions that count their calls.

    Attributes:
        call: kill at this call, counted from 0; -1 never kills and only counts.
        after: after the call instead of before it.
        armed_by: count from a statement that contains this text; empty: from the first.
        skip: the number of such statements to skip.
    """

    call: int
    after: bool = False
    armed_by: str = ""
    skip: int = 0
    counter: Counter = field(default_factory=Counter)

    def __call__(self, dialect: Dialect, application: str) -> Any:
        """Open a session that counts."""
        return _Killing(connect(dialect, application), self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"call": -1, "counter": Counter()}  # only in the driver

    def meet(self, what: str, *, after: bool) -> None:
        """Called around every call; kills the process at the chosen call."""
        counter = self.counter
        if not after and counter.met <= self.skip and self.armed_by in what:
            counter.met += 1
        if counter.met <= self.skip:
            return
        if not after:
            counter.calls += 1
            counter.seen.append(what)
        if after == self.after and counter.calls - 1 == self.call:
            kill_self()


class _Killing:
    """A session whose methods are a round trip each at most, so a crash can occur before or after
    each."""

    def __init__(self, inner: Connection, plan: KillAt) -> None:
        self._inner, self._plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return method if name == "close" else partial(self._round, name, method)

    @contextmanager
    def lend(self, seconds: float) -> Iterator[Any]:
        """The loan's begin and end, and each statement of the function between them."""
        self._plan.meet(LEND, after=False)
        with self._inner.lend(seconds) as tx:
            self._plan.meet(LEND, after=True)
            tx.wait = partial(self._round, FUNCTION, tx.wait)
            yield tx
            self._plan.meet(GIVE_BACK, after=False)
        self._plan.meet(GIVE_BACK, after=True)

    def _round(self, name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        what = _told(name, arguments)
        self._plan.meet(what, after=False)
        done = method(*arguments, **options)
        self._plan.meet(what, after=True)
        return done


def _told(name: str, arguments: tuple[Any, ...]) -> str:
    """A call as SQL text."""
    match name:
        case "query" | "execute" | "execute_many" | "defer":
            return str(arguments[0])
        case "execute_all":
            return "; ".join(one.sql for one in arguments[0])
        case "copy":
            return f"COPY {arguments[0]}"
        case "check_constraints":
            return "SET CONSTRAINTS"
        case _ if name == FUNCTION:
            return name
    return name.upper()
