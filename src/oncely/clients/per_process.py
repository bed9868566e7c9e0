"""A client that is created at first use, separately in each process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class Lazy(Generic[C]):
    """Holds at most one client, for one user at a time; pickled without it.

    Args:
        make: connects; picklable.
        end: disconnects.
    """

    def __init__(self, make: Callable[[], C], end: Callable[[C], object]) -> None:
        self._make, self._end = make, end
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._client: C | None = None
        self._using = threading.RLock()
        _all.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_end": self._end}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew()

    @contextmanager
    def use(self) -> Iterator[C]:
        """The client; discarded if the block raises, because its state is unknown then."""
        with self._using:
            if self._client is None:
                self._client = self._make()
            try:
                yield self._client
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the client, if there is one; never raises."""
        with self._using:
            client, self._client = self._client, None
            if client is not None:
                with suppress(Exception):
                    self._end(client)

    def forked(self) -> None:
        """Forget the parent's client, without using its connection.

        Closing it here would send a farewell in the parent's name, or wait for threads that a fork
        does not copy. So it is kept until this process ends, and so is the parent's lock, which a
        thread that does not exist here may hold.
        """
        _inherited.append((self._client, self._using))
        self._begin_anew()


_all: weakref.WeakSet[Lazy[Any]] = weakref.WeakSet()
_inherited: list[object] = []


def _forked() -> None:
    for one in list(_all):
        one.forked()


os.register_at_fork(after_in_child=_forked)
