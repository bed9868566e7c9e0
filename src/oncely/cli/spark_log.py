"""Keeps what Spark's JVM and workers print off the terminal: it goes into a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, Self

from oncely.cli import screen
from oncely.errors import ConfigError, TooManyRejects
from oncely.private import make_private
from oncely.refused import Refused

_KEPT = 10
_ELSEWHERE = "name a file with --spark-log, or set TMPDIR to a directory of your own"


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if isinstance(error, TooManyRejects) and error.refused.reasons:
            self._keep_refused(error.refused)
        if self.file is None:
            return
        self.file.close()
        failed = kind is not None and issubclass(kind, Exception)
        if self._given is None and not (failed and self._path.stat().st_size):
            self._path.unlink(missing_ok=True)
        elif failed:
            screen.note(f"Spark's own log: {self._path}")

    def _keep_refused(self, refused: Refused) -> None:
        """Write reasons and sample into a file that only we can read, beside the log."""
        beside = self._path.parent if self.file is not None else None
        try:
            path, file = _own(self._name, ".rejects.jsonl", beside)
        except ConfigError as error:  # it must not take the place of what ends the run
            screen.note(f"the sample of the refused records is not kept: {error}")
            return
        with file:
            file.writelines(f"{line}\n".encode() for line in refused.as_json_lines())
        screen.note(f"reasons and a sample of the refused records: {path}")


def _own(name: str, suffix: str = ".log", folder: Path | None = None) -> tuple[Path, IO[bytes]]:
    """A new file that only we can read; of those of runs that failed, the newest stay.

    Raises:
        ConfigError: the folder that it would be in is not this user's alone.
    """
    pattern = f"*{suffix}" if folder is None else f"{name}-*{suffix}"
    if folder is None:
        folder = Path(tempfile.gettempdir()) / f"oncely-logs-{os.getuid()}"
        make_private(folder, "--spark-log", _ELSEWHERE)
    older = sorted(folder.glob(pattern), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in older[_KEPT:]:
        log.unlink(missing_ok=True)  # one that is being written loses its name, no more
    number, path = tempfile.mkstemp(prefix=f"{name}-", suffix=suffix, dir=folder)
    return Path(path), os.fdopen(number, "ab")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(
            "--spark-log", f"{path}: {error.strerror}", way_out="name a file that can be written"
        ) from None
