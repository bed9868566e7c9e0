"""Redirects the output of Spark's JVM and workers from the terminal to a file."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import IO, Self

from oncely.cli import screen
from oncely.cli.together import Failed
from oncely.errors import ConfigError, TooManyRejects
from oncely.reject_summary import RejectSummary

_KEPT = 10
_ELSEWHERE = "specify a file with --spark-log, or set TMPDIR to a directory of your own"


class SparkLog:
    """A file that is removed after a success; after an error its name is printed.

    Args:
        name: the pipeline, part of the file's name.
        path: the file, which is then always kept; ``-`` for stderr; None for a new file.

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
        errors = error.errors if isinstance(error, Failed) else {self._name: error}
        for name, one in errors.items():
            if isinstance(one, TooManyRejects) and one.refused.reasons:
                self._keep_refused(name, one.refused)
        if self.file is None:
            return
        self.file.close()
        failed = kind is not None and issubclass(kind, Exception)
        if self._given is None and not (failed and self._path.stat().st_size):
            self._path.unlink(missing_ok=True)
        elif failed:
            screen.note(f"Spark's own log: {self._path}")

    def _keep_refused(self, name: str, refused: RejectSummary) -> None:
        """Write reasons and sample into a file beside the log, readable for this user only."""
        beside = self._path.parent if self.file is not None else None
        try:
            path, file = _own(name, ".rejects.jsonl", beside)
        except ConfigError as error:  # it must not replace the error that ends the run
            screen.note(f"the sample of the refused records is not kept: {error}")
            return
        with file:
            file.writelines(f"{line}\n".encode() for line in refused.as_json_lines())
        screen.note(f"reasons and a sample of the refused records: {path}")


def _own(name: str, suffix: str = ".log", folder: Path | None = None) -> tuple[Path, IO[bytes]]:
    """A new file that only this user can read, in a folder of the pipeline; of the files of failed
    runs, the newest of each pipeline are kept.

    Raises:
        ConfigError: its folder is not private to this user.
    """
    pattern = f"*{suffix}" if folder is None else f"{name}-*{suffix}"
    if folder is None:
        above = Path(tempfile.gettempdir()) / f"oncely-logs-{os.getuid()}"
        folder = above / (name.strip(".") or "_")
        for one in (above, folder):
            make_private(one, "--spark-log", _ELSEWHERE)
    older = sorted(folder.glob(pattern), key=lambda log: log.stat().st_mtime, reverse=True)
    for log in older[_KEPT:]:
        log.unlink(missing_ok=True)  # a file that is still written only loses its name
    number, path = tempfile.mkstemp(prefix=f"{name}-", suffix=suffix, dir=folder)
    return Path(path), os.fdopen(number, "ab")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(
            "--spark-log", f"{path}: {error.strerror}", way_out="specify a writable file"
        ) from None


# -- private directories -------------------------------------------------------------------


def is_private(folder: Path) -> bool:
    """True if the directory belongs to this user and other users can neither read nor write it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    # A directory inherits the set-group-ID bit, which is ignored here.
    private = stat.S_IMODE(found.st_mode) & 0o777 == stat.S_IRWXU
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and private


def make_private(folder: Path, key: str, way_out: str) -> None:
    """Create a directory, or accept an existing one if it is private.

    In a world-writable directory, another user could create a directory of a predictable name.

    Args:
        folder: the directory; its parent exists.
        key: the key of the pipeline file, or the option, for errors.
        way_out: the error's ``way_out``.

    Raises:
        ConfigError: it is a link or no directory, belongs to another user, or is open to others; or
            it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # a file, or a dangling link
    except OSError as error:
        raise ConfigError(key, f"{folder}: {error.strerror}", way_out=way_out) from None
    if not is_private(folder):
        raise ConfigError(
            key,
            f"{folder} is not a directory that this user alone has access to: it must be no link,"
            f" belong to user id {os.getuid()} and have mode 0700",
            way_out=f"remove it if it is yours; {way_out}",
        )
