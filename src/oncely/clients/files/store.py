"""The store of a files sink: whole files below one root, errors sorted, passing ones repeated.

Nobody looks at a file before the manifest names it, and names are unique to an attempt. So a
file needs no second name and no rename: what a task leaves behind half done is an orphan.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa

from oncely.clients.files import s3_uploads
from oncely.clients.files.errors import NoSuchFile, sorted_error, unreachable
from oncely.clients.files.filesystem import Bytes, Connect, FileSystem, Stored, connect
from oncely.clients.files.root import below, checked_url, shown_url
from oncely.clients.files.s3_options import S3Options
from oncely.errors import ConfigError, InvariantViolation, OncelyError, Unavailable

__all__ = ["NoSuchFile", "S3Options", "Store", "Stored"]

T = TypeVar("T")

_logger = logging.getLogger("oncely.sinks.files")
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0  # seconds
_THREADS = 8
_PROBE = ".oncely-probe-"


@dataclass(eq=False)
class Store:
    """A root and what lies below it. Picklable; connects at first use in each process.

    Paths are relative to the root, ``/`` between the parts. A path that leads elsewhere is
    refused by every method (InvariantViolation: paths are made by us, never by a record).

    Every method raises: Unavailable after the retries, Stopped when the disk is full,
    ConfigError when the store refuses credentials, permission or bucket.

    Attributes:
        url: ``file:///folder``, ``s3://bucket/prefix``, or what pyarrow.fs knows (gs, abfs, hdfs).
        s3: for ``s3://``.
        connect: makes the port; tests put faults in here.

    Raises:
        ConfigError: a URL that can't be one, naming ``sink.url``.
    """

    url: str
    s3: S3Options | None = field(default=None, repr=False)
    connect: Connect = field(default=connect, repr=False)

    def __post_init__(self) -> None:
        self.url = checked_url(self.url, self.s3)
        self._reset()

    def __repr__(self) -> str:
        return f"Store({shown_url(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "s3": self.s3, "connect": self.connect}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def local(self) -> bool:
        """Whether it is a folder of this machine."""
        return self.url.startswith("file:")

    def write(self, path: str, data: Bytes) -> None:
        """Write a whole file. On a disk it is durable after :meth:`durable` only."""
        below(path)
        # Again with the same name and bytes: whichever try arrives, and in whatever order.
        self._again(f"write {path}", lambda place: place.write(path, data))

    def read(self, path: str) -> bytes:
        """A whole file.

        Raises:
            NoSuchFile: it is not there.
        """
        below(path)
        return self._again(f"read {path}", lambda place: place.read(path))

    def open(self, path: str) -> pa.NativeFile:
        """A file for reading ranges of it; errors of later calls are pyarrow's own.

        Raises:
            NoSuchFile: it is not there.
        """
        below(path)
        return self._again(f"open {path}", lambda place: place.open(path))

    def exists(self, path: str) -> bool:
        """Whether a file is there."""
        below(path)
        try:
            self._again(f"look for {path}", lambda place: place.modified(path))
        except NoSuchFile:
            return False
        return True

    def list(self) -> Iterator[Stored]:
        """All files below the root, in no order; what comes or goes meanwhile may be missing."""
        yield from self._again("list", lambda place: list(place.files()))

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files; what is not there any more is fine."""
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(self._delete, paths):
                pass

    def durable(self) -> None:
        """What this object has written survives a power cut: fsync on a disk."""
        self._once("sync", lambda place: place.sync())

    def now(self) -> datetime:
        """The store's clock: what it would stamp a file with. S3 tells whole seconds."""
        path = f"{_PROBE}{uuid.uuid4().hex}"
        self.write(path, b"probe")
        try:
            return self._again("look at the clock", lambda place: place.modified(path))
        finally:
            with suppress(OncelyError):
                self._delete(path)

    def check(self) -> None:
        """Root reachable, readable and writable: a probe is written, read, listed and removed.

        Raises:
            ConfigError: it is not, with the reason and the key to look at.
            Unavailable: the server answers that it is busy.
        """
        path = f"{_PROBE}{uuid.uuid4().hex}"

        def probe(place: FileSystem) -> None:
            place.prepare()
            place.write(path, b"probe")
            try:
                seen = place.read(path)
                if seen != b"probe":
                    raise InvariantViolation(f"{self!r} gave back other bytes than were written")
                place.modified(path)
            finally:
                place.delete(path)

        try:
            self._once("check", probe)
        except Unavailable as error:
            raise unreachable(error, self.s3) from None
        except NoSuchFile as error:
            raise ConfigError("sink.url", error.message) from None

    def abort_uploads(
        self, older_than: datetime, ours: Callable[[str], bool], *, dry_run: bool = False
    ) -> int:
        """Abort multipart uploads that were begun before and never completed; returns how many.

        Their parts cost money and no listing shows them. Nothing to do but on S3.

        Args:
            older_than: when they were begun, at the latest.
            ours: whether the path of an upload, below the root, is one that we may have begun:
                others may write below the root, which may be a whole bucket.
            dry_run: only count them.

        Raises:
            ConfigError: the keys can't be found, see :mod:`oncely.clients.files.s3_uploads`.
        """
        if not self.url.startswith("s3:"):
            return 0
        options = self.s3 or S3Options()
        return s3_uploads.abort(self.url, options, older_than, ours, dry_run=dry_run)

    def _delete(self, path: str) -> None:
        below(path)
        with suppress(NoSuchFile):
            self._again(f"delete {path}", lambda place: place.delete(path))

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._place: tuple[int, FileSystem] | None = None

    def _connected(self) -> FileSystem:
        with self._lock:
            # A client of the process that forked this one holds locks and sockets of threads
            # that don't exist here.
            if self._place is None or self._place[0] != os.getpid():
                self._place = (os.getpid(), self.connect(self.url, self.s3))
            return self._place[1]

    def _once(self, doing: str, call: Callable[[FileSystem], T]) -> T:
        try:
            return call(self._connected())
        except (OSError, pa.ArrowException) as error:
            told = sorted_error(error, doing, self.url)
            if self.s3 is not None:
                told.hide(self.s3.secrets)
            raise told from error

    def _again(self, doing: str, call: Callable[[FileSystem], T]) -> T:
        """Make a call that may be made twice, until it is answered or the tries are used up."""
        left, seconds = (self.s3 or S3Options()).retries, _FIRST_WAIT
        while True:
            try:
                return self._once(doing, call)
            except Unavailable as error:
                if not left or self.local:
                    raise
                _logger.debug("once more in %.1f s: %s", seconds, error)
            threading.Event().wait(seconds)
            left, seconds = left - 1, min(_LONGEST_WAIT, seconds * 2)
