"""Positions in a file: for a pipeline whose tasks all run on one machine.

One JSON file for each pipeline, in a directory. It is never changed in place: the new text is
written beside it, made durable, and renamed over it, so a reader gets either the complete old text
or the complete new text. A writer holds a lock (flock) on a second file from reading the old text
to the rename; otherwise two tasks would each revert the other's partitions.

On a network file system lock and rename may be weaker than on a disk.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, OncelyError, Unavailable
from oncely.stores.offsets.base import OffsetStore, StoredPosition, checked, foreign
from oncely.threads import tries

_AGAIN = 0.005  # seconds
_MINE_TO_MEND = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)


class _Content(msgspec.Struct):
    """The file: topic to partition to position."""

    written_by: Literal["oncely"]
    pipeline: str
    positions: dict[str, dict[int, StoredPosition]]


@dataclass(frozen=True)
class FileStore(OffsetStore):
    """Keeps positions in ``<directory>/<pipeline>.json``.

    Attributes:
        directory: created if it is missing.
        pipeline: the name of the pipeline.
        timeout: seconds to wait for another writer.
    """

    directory: Path
    pipeline: str
    timeout: float = 30.0

    @property
    def file(self) -> Path:
        """The pipeline's file."""
        return self.directory / f"{quote(self.pipeline, safe='')}.json"

    @property
    def where(self) -> str:
        """The file."""
        return f"file {self.file}"

    def load(self) -> dict[TopicPartition, StoredPosition]:
        """See :meth:`OffsetStore.load`. Waits for no lock."""
        try:
            text = self.file.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._sorted(error, "read") from None
        content = self._content(text)
        return {
            TopicPartition(topic, number): checked(stored, self.where, f"{topic}/{number}")
            for topic, numbers in content.positions.items()
            for number, stored in numbers.items()
        }

    def save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        """See :meth:`OffsetStore.save`."""
        try:
            self._make_directory()
            with self._locked():
                tree: dict[str, dict[int, StoredPosition]] = {}
                for tp, stored in sorted({**self.load(), **positions}.items()):
                    tree.setdefault(tp.topic, {})[tp.partition] = stored
                content = _Content("oncely", self.pipeline, tree)
                self._replace(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
        except OSError as error:
            raise self._sorted(error, "write") from None

    def close(self) -> None:
        """Nothing is open between calls."""

    def _content(self, text: bytes) -> _Content:
        try:
            content = msgspec.json.decode(text, type=_Content)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise foreign(self.where, "its content", str(error)) from None
        if content.pipeline != self.pipeline:  # the file was copied or renamed
            raise foreign(self.where, "pipeline", f"it belongs to {content.pipeline!r}")
        return content

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            _sync(self.directory.parent)

    def _replace(self, text: bytes) -> None:
        """Replace the file's content. Only the holder of the lock writes the new file."""
        new = self.file.with_name(f"{self.file.name}.new")
        with new.open("wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        new.rename(self.file)
        _sync(self.directory)  # the rename itself

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; the kernel releases it when its holder dies."""
        lock = os.open(self.file.with_name(f"{self.file.name}.lock"), os.O_CREAT | os.O_RDWR, 0o666)
        try:
            self._lock(lock)
            try:
                yield
            finally:
                # Closing would not suffice: a process that was forked meanwhile has the file open,
                # too.
                fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)

    def _lock(self, lock: int) -> None:
        for _ in tries(self.timeout, _AGAIN):
            with suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise Unavailable(
            f"{self.where}: another process held its lock for {self.timeout:g} s",
            way_out=f"`fuser {self.file}.lock` shows it: let it finish, or end it",
        )

    def _sorted(self, error: OSError, doing: str) -> OncelyError:
        text = f"can't {doing} {error.filename or self.file}: {error.strerror}"
        if isinstance(error, _MINE_TO_MEND):
            return ConfigError(
                "offsets.path", text, way_out="name a directory that this user may write to"
            )
        return Unavailable(f"{self.where}: {text}")


def _sync(directory: Path) -> None:
    """Make the directory's entries durable."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
