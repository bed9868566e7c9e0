"""What belongs to one process: clients that are created at first use, and calls of functions."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Generic, NoReturn, TypeVar

from oncely.errors import Interrupted
from oncely.reject_summary import paragraph
from oncely.secrets import redact

C = TypeVar("C")
R = TypeVar("R")

_NOT_BEGUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


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


class FunctionEnded(Exception):
    """A user's function has raised a BaseException, such as SystemExit."""


@contextmanager
def users_function() -> Iterator[None]:
    """Around every call of a user's function: it can't end this process, nor double it.

    A child that it forks would go on as a second worker, on the sockets of this process. It ends
    where the function ends, by ``os._exit``, as one of multiprocessing does: nothing is closed in
    the name of its parent.

    Raises:
        FunctionEnded: instead of a BaseException, which callers would take for the end of the
            process; those of signals pass.
    """
    ours = os.getpid()
    try:
        yield
    except (Exception, Interrupted):
        raise
    except BaseException as error:
        if os.getpid() != ours or (isinstance(error, KeyboardInterrupt) and _may_be_a_signal()):
            raise
        ended = FunctionEnded(said(error)).with_traceback(error.__traceback__)
        raise ended from error
    finally:
        if os.getpid() != ours:
            _end(sys.exc_info()[1])


def returned(result: R) -> R:
    """The result of a user's function.

    Raises:
        TypeError: the function has begun nothing yet.
    """
    if isinstance(result, _NOT_BEGUN):
        kind = "coroutine" if isinstance(result, CoroutineType) else "generator"
        raise TypeError(f"it has returned a {kind}, whose body has not run")
    return result


def said(error: BaseException) -> str:
    """The kind of an error of a user's function, and its text."""
    try:
        text = str(error)
    except BaseException as broken:  # its __str__ is the user's, too
        text = f"its text can't be read ({type(broken).__name__})"
    if isinstance(error, FunctionEnded):
        return text
    return f"{type(error).__name__}: {text}".strip().removesuffix(":")


def _may_be_a_signal() -> bool:
    """True where Python itself raises KeyboardInterrupt for SIGINT."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _end(error: BaseException | None) -> NoReturn:
    code: object = 1 if error else None
    if isinstance(error, SystemExit):
        code = error.code
    elif error:
        print(paragraph(redact("".join(traceback.format_exception(error)))), file=sys.stderr)
    if isinstance(code, str):
        print(code, file=sys.stderr)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0 if code is None else int(code) & 255 if isinstance(code, int) else 1)


_all: weakref.WeakSet[Lazy[Any]] = weakref.WeakSet()
_inherited: list[object] = []


def _forked() -> None:
    for one in list(_all):
        one.forked()


os.register_at_fork(after_in_child=_forked)
