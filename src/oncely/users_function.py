"""Calls of users' functions: what they return and raise, children that they fork, and pandas.

PyArrow imports pandas where that is installed, to recognise a Series: 0.3 s of processor time in
each process of a run. Only functions of users can give it one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any, NoReturn, TypeVar

import pyarrow as pa

from oncely.errors import Interrupted
from oncely.secrets import redact
from oncely.wording import paragraph

R = TypeVar("R")

_NOT_BEGUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


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


# -- pandas ---------------------------------------------------------------------------------

_PANDAS = "pandas"


class _Absent:
    """A finder by which pandas is not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> None:
        """None for any other module: the next finder is asked."""
        del path, target
        if name == _PANDAS:
            raise ModuleNotFoundError(name, name=name)


def without_pandas() -> None:
    """Let pyarrow find no pandas, once and for all; only for a process of Oncely's own.

    ``to_pandas`` looks for it again. Does nothing after an import of pandas.
    """
    if _PANDAS in sys.modules:
        return
    finder: Any = _Absent()
    sys.meta_path.insert(0, finder)
    try:
        pa.scalar(0)
    finally:
        sys.meta_path.remove(finder)


def with_pandas() -> None:
    """Let pyarrow recognise a Series again, whose NaN are nulls; before a user's function runs."""
    with suppress(ImportError):
        pa.lib._pandas_api.pd  # noqa: B018 - it looks for pandas
