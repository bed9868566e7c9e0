"""Whether pyarrow imports pandas.

Its first conversion of any value imports pandas where that is installed, to recognise a Series:
0.3 s of processor time in each process of a run. Only functions of users can give it one.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import pyarrow as pa

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
