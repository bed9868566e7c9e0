"""The store of a files sink: whole files below one root, errors classified, transient ones retried.

Files are not read before the manifest names them, and names are unique to an attempt. So a file
needs no temporary name and no rename: an incomplete file of a task is an orphan.

:class:`FileSystem` is the port at which tests inject faults: a folder of this machine, or any file
system of pyarrow.fs. It raises the errors of the operating system or pyarrow, and does not
classify, repeat or check anything; :class:`Store` does.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from oncely.errors import ConfigError, InvariantViolation, OncelyError, Unavailable
from oncely.per_process import PerProcess
from oncely.stores.objects.root import (
    NoSuchFile,
    S3Options,
    address,
    below,
    checked_url,
    classify_store_error,
    shown_url,
    unreachable,
)

Bytes: TypeAlias = "bytes | memoryview | pa.Buffer"

_FEW = 32  # files; for more files, one syncfs costs less than an fsync of each
_SDK_TRIES = 3


@dataclass(frozen=True)
class StoredFile:
    """A file in the listing of a store: path below the root, size in bytes, time of its last
    change."""

    path: str
    bytes: int
    modified: datetime


class FileSystem(Protocol):
    """The calls that a store makes. Paths are checked and are below the root."""

    def prepare(self) -> None:
        """Create the root, if the file system has directories."""

    def write(self, path: str, data: Bytes) -> None:
        """Write a whole file; creates folders as needed."""

    def read(self, path: str) -> bytes:
        """The content of a file."""

    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading ranges of it."""

    def files(self) -> Iterator[StoredFile]:
        """All files below the root, in any order."""

    def modified(self, path: str) -> datetime:
        """The time of a file's last change, by the store's own clock."""

    def delete(self, path: str) -> None:
        """Remove a file."""

    def sync(self) -> None:
        """Make everything that was written durable across a power failure."""


Connect = Callable[[str, S3Options | None], FileSystem]


def connect(url: str, s3: S3Options | None) -> FileSystem:
    """The file system of a checked URL."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Folder(Path(unquote(parts.path)))
    from pyarrow.fs import FileSystem as ArrowFileSystem

    if parts.scheme == "s3":
        root = f"{parts.netloc}/{unquote(parts.path).strip('/')}".rstrip("/")
        return Remote(s3_filesystem(s3 or S3Options()), root)
    filesystem, root = ArrowFileSystem.from_uri(url)
    return Remote(filesystem, root.rstrip("/"))


def s3_filesystem(options: S3Options) -> Any:
    """pyarrow's S3 client. It retries few times: the store repeats whole calls."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    return S3FileSystem(
        access_key=options.access_key,
        secret_key=options.secret_key,
        session_token=options.session_token,
        region=options.region or ("us-east-1" if options.endpoint else None),
        endpoint_override=options.address,
        scheme=options.scheme,
        connect_timeout=options.connect_timeout,
        request_timeout=options.request_timeout,
        # A small file is then one PutObject, instead of three requests of a multipart upload.
        allow_delayed_open=True,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_SDK_TRIES),
    )


class Remote:
    """Files below a root of a pyarrow file system. They are durable when written."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs, self._root = filesystem, root

    def prepare(self) -> None:
        """Create the folder on HDFS; an object store accepts any key."""
        if self._fs.type_name == "hdfs":
            self._fs.create_dir(self._root, recursive=True)

    def write(self, path: str, data: Bytes) -> None:
        """Stream the file; large files are uploaded in parts."""
        full = self._full(path)
        if self._fs.type_name == "hdfs":
            self._fs.create_dir(full.rpartition("/")[0], recursive=True)
        with self._fs.open_output_stream(full, compression=None) as stream:
            stream.write(data)

    def read(self, path: str) -> bytes:
        """Read the file as a stream."""
        with self._fs.open_input_file(self._full(path)) as stream:
            read: bytes = stream.read()
            return read

    def open(self, path: str) -> pa.NativeFile:
        """Open the file for random access."""
        return self._fs.open_input_file(self._full(path))

    def files(self) -> Iterator[StoredFile]:
        """One recursive listing; pyarrow requests its pages."""
        from pyarrow.fs import FileSelector, FileType

        base = f"{self._root}/"
        selector = FileSelector(self._root, recursive=True, allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            if info.type == FileType.File and info.path.startswith(base):
                yield StoredFile(info.path[len(base) :], info.size, _utc(info.mtime))

    def modified(self, path: str) -> datetime:
        """The time of the store."""
        from pyarrow.fs import FileType

        info = self._fs.get_file_info(self._full(path))
        if info.type != FileType.File:
            raise FileNotFoundError(path)
        return _utc(info.mtime)

    def delete(self, path: str) -> None:
        """Remove the file."""
        self._fs.delete_file(self._full(path))

    def sync(self) -> None:
        """Does nothing: a store responds after the file is stored."""

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"


class Folder:
    """Files in a folder of this machine, or in one that all machines mount."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._handle: int | None = None  # of the root: syncfs reports errors since it was opened
        self._pending: set[str] = set()
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)

    def prepare(self) -> None:
        """Create the folder."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "Not a folder", str(self._root)) from None

    def write(self, path: str, data: Bytes) -> None:
        """Write the file; a partly written file is removed."""
        target = f"{self._root}/{path}"
        folder = target.rpartition("/")[0]
        with self._lock:
            if self._handle is None:
                self.prepare()
                self._handle = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
            self._make(folder)
        try:
            _write(target, data)
        except FileNotFoundError:  # the empty folder was removed in the meantime
            os.makedirs(folder, exist_ok=True)
            _write(target, data)
        with self._lock:
            self._pending.add(target)

    def _make(self, folder: str) -> None:
        """Create a folder below the root, which exists."""
        if folder in self._known or len(folder) <= len(str(self._root)):
            return
        self._make(folder.rpartition("/")[0])
        with suppress(FileExistsError):
            os.mkdir(folder)
        self._known.add(folder)

    def read(self, path: str) -> bytes:
        """Read the file."""
        return (self._root / path).read_bytes()

    def open(self, path: str) -> pa.NativeFile:
        """Map the file into memory."""
        return pa.memory_map(str(self._root / path))

    def files(self) -> Iterator[StoredFile]:
        """Walk the tree; links are not followed, and files that vanish meanwhile are left out."""
        folders = [""]
        while folders:
            folder = folders.pop()
            with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{folder}{entry.name}/")
                        continue
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield StoredFile(f"{folder}{entry.name}", status.st_size, _when(status))

    def modified(self, path: str) -> datetime:
        """The time of the file system."""
        return _when((self._root / path).stat())

    def delete(self, path: str) -> None:
        """Remove the file. Empty folders are kept: a task may be about to write into them."""
        target = f"{self._root}/{path}"
        with self._lock:
            self._pending.discard(target)
        os.unlink(target)

    def sync(self) -> None:
        """Sync the files and their directory entries to the disk."""
        with self._lock:
            files, self._pending = self._pending, set()
        if not files:
            return
        if len(files) > _FEW and self._handle is not None and _syncfs(self._handle):
            return
        folders = {f for file in files for f in Path(file).parents if f.is_relative_to(self._root)}
        for one in [*map(Path, files), *folders, self._root.parent]:
            _fsync(one)


def _write(target: str, data: Bytes) -> None:
    # O_EXCL: names are unique to an attempt, so an existing file is never replaced.
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
    except BaseException:
        with suppress(OSError):
            os.unlink(target)
        raise
    finally:
        os.close(handle)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _syncfs(handle: int) -> bool:
    """Sync a whole file system (Linux); False if the call does not exist."""
    try:
        call = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError):
        return False
    if call(handle) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return True


def _when(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, UTC)


def _utc(when: datetime | None) -> datetime:
    if when is None:
        raise OSError("the store returns no time of a file's last change")
    return when if when.tzinfo else when.replace(tzinfo=UTC)


__all__ = ["NoSuchFile", "S3Options", "Store", "StoredFile"]

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0  # seconds
_THREADS = 8
_PROBE = ".oncely-probe-"


@dataclass(eq=False)
class Store:
    """A root and the files below it. Picklable; connects at first use in each process.

    Paths are relative to the root, ``/`` between the parts. A path outside the root is refused by
    every method (InvariantViolation: paths are generated by Oncely, never by a record).

    Every method raises: Unavailable after the retries, Stopped when the disk is full, ConfigError
    when the store refuses credentials, permission or bucket.

    Attributes:
        url: ``file:///folder``, ``s3://bucket/prefix``, or another scheme of pyarrow.fs (gs, abfs,
            hdfs).
        s3: the settings for ``s3://``.
        connect: creates the file system; tests inject faults here.

    Raises:
        ConfigError: an invalid URL; the error names ``sink.url``.
    """

    url: str
    s3: S3Options | None = field(default=None, repr=False)
    connect: Connect = field(default=connect, repr=False)

    def __post_init__(self) -> None:
        self.url = checked_url(self.url, self.s3)
        self._place = PerProcess(partial(self.connect, self.url, self.s3))

    def __repr__(self) -> str:
        return f"Store({shown_url(self.url)!r})"

    @property
    def local(self) -> bool:
        """True if it is a folder of this machine."""
        return self.url.startswith("file:")

    def address(self, path: str) -> str:
        """A file's address for other programs: a local path, or a URL."""
        return address(self.url, below(path))

    def write(self, path: str, data: Bytes) -> None:
        """Write a whole file. On a disk it is durable after :meth:`durable` only."""
        below(path)
        # Repeated with the same name and bytes: the result does not depend on the order of arrival.
        self._again(f"write {path}", lambda place: place.write(path, data))

    def read(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            NoSuchFile: it does not exist.
        """
        below(path)
        return self._again(f"read {path}", lambda place: place.read(path))

    def open(self, path: str) -> pa.NativeFile:
        """A file for reading ranges of it; later calls raise errors of pyarrow.

        Raises:
            NoSuchFile: it does not exist.
        """
        below(path)
        return self._again(f"open {path}", lambda place: place.open(path))

    def exists(self, path: str) -> bool:
        """True if the file exists."""
        below(path)
        try:
            self._again(f"look for {path}", lambda place: place.modified(path))
        except NoSuchFile:
            return False
        return True

    def list(self) -> Iterator[StoredFile]:
        """All files below the root, in any order; files that are created or deleted meanwhile
        may be missing."""
        yield from self._again("list", lambda place: list(place.files()))

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files; missing files are ignored."""
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(self._delete, paths):
                pass

    def durable(self) -> None:
        """Make all files of this object durable across a power failure: fsync on a disk."""
        self._once("sync", lambda place: place.sync())

    def now(self) -> datetime:
        """The present time of the store's clock, as in a file's time stamp. S3 returns whole
        seconds."""
        path = f"{_PROBE}{uuid.uuid4().hex}"
        self.write(path, b"probe")
        try:
            return self._again("read the clock", lambda place: place.modified(path))
        finally:
            with suppress(OncelyError):
                self._delete(path)

    def check(self) -> None:
        """Check that the root is reachable, readable and writable, with a probe file.

        Raises:
            ConfigError: it is not; the error contains the reason and the key to check.
            Unavailable: the server responds that it is busy.
        """
        path = f"{_PROBE}{uuid.uuid4().hex}"

        def probe(place: FileSystem) -> None:
            place.prepare()
            place.write(path, b"probe")
            try:
                seen = place.read(path)
                if seen != b"probe":
                    raise InvariantViolation(f"{self!r} returned other bytes than were written")
                place.modified(path)
            finally:
                place.delete(path)

        try:
            self._once("check", probe)
        except Unavailable as error:
            raise unreachable(error, self.s3) from None
        except NoSuchFile as error:
            raise ConfigError("sink.url", error.message) from None

    def _delete(self, path: str) -> None:
        below(path)
        with suppress(NoSuchFile):
            self._again(f"delete {path}", lambda place: place.delete(path))

    def _once(self, doing: str, call: Callable[[FileSystem], T]) -> T:
        try:
            return call(self._place.get())
        except (OSError, pa.ArrowException) as error:
            classified = classify_store_error(error, doing, self.url)
            if self.s3 is not None:
                classified.hide(self.s3.secrets)
            raise classified from error

    def _again(self, doing: str, call: Callable[[FileSystem], T]) -> T:
        """Repeat an idempotent call until it succeeds or the retries are used up."""
        left, seconds = (self.s3 or S3Options()).retries, _FIRST_WAIT
        while True:
            try:
                return self._once(doing, call)
            except Unavailable as error:
                if not left or self.local:
                    raise
                _logger.debug("retry in %.1f s: %s", seconds, error)
            threading.Event().wait(seconds)
            left, seconds = left - 1, min(_LONGEST_WAIT, seconds * 2)


_IN_FLIGHT = 64_000_000  # bytes


class Uploads:
    """Writes files; errors of an earlier file are raised by a later call.

    A local disk accepts a small file faster than a thread can be woken.
    """

    def __init__(self, store: Store, threads: int) -> None:
        self._store = store
        self._threads = None if store.local else ThreadPoolExecutor(threads, "oncely-upload")
        self._most = 4 * threads
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._bytes = 0
        self._begun: list[str] = []

    def write(self, path: str, data: Bytes) -> None:
        """Write a file, now or later."""
        self._begun.append(path)
        if self._threads is None:
            self._store.write(path, data)
            return
        size = len(data)
        while self._pending and (
            self._bytes + size > _IN_FLIGHT or len(self._pending) >= self._most
        ):
            self._await_oldest()
        self._bytes += size
        self._pending.append((size, self._threads.submit(self._store.write, path, data)))

    def complete(self) -> None:
        """Wait until all files are written, and durable."""
        while self._pending:
            self._await_oldest()
        self._close()
        self._store.durable()

    def undo(self) -> None:
        """Delete all files that were begun, as far as the store allows; vacuum removes the rest."""
        for _, future in self._pending:
            future.cancel()
        self._close()
        with suppress(OncelyError):
            self._store.delete(self._begun)
        self._begun = []

    def _await_oldest(self) -> None:
        size, future = self._pending.popleft()
        self._bytes -= size
        future.result()

    def _close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)
