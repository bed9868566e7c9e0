"""Keeps what Spark's JVM and workers print off the terminal: it goes into a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, Self

from oncely.cli import screen
from oncely.errors import ConfigError

_KEPT = 10


class SparkLog:
    """A file that is removed when all went well and named when not.

    Args:
        name: the pipeline, part of the file's name.
        path: the file, which is then always kept; ``-`` for stderr; None for one of our own.

    Attributes:
        file: open for writing; None for stderr.
    """

    def __init__(self, name: str, path: Path | None) -> None:
        self._name, self._given = name, path
        self._path = Path()
        self.file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self._given is None:
            self._path, self.file = _own(self._name)
        elif str(self._given) != "-":
            self._path, self.file = self._given, _opened(self._given)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.file is None:
            return
        self.file.close()
        failed = kind is not None and issubclass(kind, Exception)
        if self._given is None and not (failed and self._path.stat().st_size):
            self._path.unlink(missing_ok=True)
        elif failed:
            screen.note(f"Spark's own log: {self._path}")


def _own(name: str) -> tuple[Path, IO[bytes]]:
    """A new file that only we can read; of the logs of runs that failed, the newest stay."""
    folder = Path(tempfile.gettempdir()) / f"oncely-logs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    older = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in older[_KEPT:]:
        log.unlink(missing_ok=True)  # one that is being written loses its name, no more
    number, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)
    return Path(path), os.fdopen(number, "ab")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(
            "--spark-log", f"{path}: {error.strerror}", way_out="name a file that can be written"
        ) from None
