"""Staging of encoded messages by tasks of a batch commit, until the driver publishes them.

A task writes one Arrow IPC file, ``<pipeline>/<epoch>/<batch>/<attempt>-<uuid>.arrow`` below the
staging folder: no two attempts share a file, and files of a failed attempt are recognised by their
folder. Only files that successful attempts reported are published. Files need not be durable: a
missing or damaged file fails the batch, which is repeated.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyarrow import fs

from oncely.clients.kafka.producer import lengths
from oncely.core.batch import Chunk, Staged, StagedRowsGone
from oncely.core.claim import Fence
from oncely.core.digest import Recipe, digest_sum, row_digests
from oncely.errors import ConfigError, Unavailable
from oncely.private import check_private, make_private
from oncely.sinks.base import NO_SINGLE_RECORD, row_refused
from oncely.sinks.kafka.messages import Encoded, Limits, encode
from oncely.sinks.kafka.record_format import CONTENT, RecordFormat

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),  # null: the sink's only topic
        ("key", pa.large_binary()),
        ("value", pa.large_binary()),
        ("headers", _HEADERS),  # null: none
    ]
)
_PART = 4_000_000  # bytes that are in memory at once on the way to Kafka
_ROWS = 20_000
_ELSEWHERE = "name a folder of your own in sink.staging"
_OBJECTS = ("s3", "gcs", "abfs")  # stores without folders


@dataclass(frozen=True)
class Staging:
    """The staged files of one pipeline.

    Attributes:
        url: a folder that the driver and all executors can access: a URL that Arrow supports, or an
            absolute path. Never in a repr: it may contain a key.
        pipeline: its name.
    """

    url: str = field(repr=False)
    pipeline: str

    def check(self) -> None:
        """Refuse an invalid folder, and a default folder that is not private to this user.

        Raises:
            ConfigError: the error names ``sink.staging``.
        """
        place, root = self._place()
        if isinstance(place, fs.LocalFileSystem) and (own := _default_top(root)):
            check_private(own, "sink.staging", _ELSEWHERE)

    def write(
        self,
        fence: Fence,
        batch_id: int,
        attempt: int,
        batches: Iterable[pa.RecordBatch],
        recipe: Recipe = CONTENT,
    ) -> Staged:
        """Write an attempt's messages into a file of its own.

        Raises:
            Unavailable: the folder does not accept them.
        """
        name = f"{self._folder}/{fence.epoch}/{batch_id}/{attempt}-{uuid.uuid4().hex}.arrow"
        waiting = iter(batches)
        first = next(waiting, None)
        if first is None:
            return Staged(None, 0)
        place, root = self._place()
        rows = digest = 0
        with (
            self._reached(),
            _new_file(place, f"{root}/{name}") as file,
            pa.ipc.new_file(file, SCHEMA) as writer,
        ):
            for batch in _chained(first, waiting):
                writer.write_batch(batch)
                rows += batch.num_rows
                digest += digest_sum(row_digests(pa.Table.from_batches([batch]), None, recipe))
        return Staged(name, rows, digest % (1 << 64), str(recipe))

    def read(self, name: str, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """A file's messages, a few megabytes at a time; only ``columns``, if given.

        Raises:
            StagedRowsGone: the file is missing or damaged.
            Unavailable: the folder does not respond.
        """
        place, root = self._place()
        wanted = [SCHEMA.get_field_index(one) for one in columns] or None
        options = pa.ipc.IpcReadOptions(included_fields=wanted)
        with self._reached(name), place.open_input_file(f"{root}/{name}") as file:
            reader = pa.ipc.open_file(file, options=options)
            for at in range(reader.num_record_batches):
                yield reader.get_batch(at)

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:
        """Remove files that will not be published, and return their number.

        Removes files of older epochs, which are fenced, and of our own epoch those of batches
        before ``keep_batches_from``, but not those of a newer run.

        Raises:
            Unavailable: the folder does not respond.
        """
        place, root = self._place()
        base = f"{root}/{self._folder}"
        with self._reached():
            found = place.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
        doomed: dict[str, int] = {}
        for one in found:
            parts = PurePosixPath(one.path).relative_to(base).parts
            if folder := _doomed(parts, fence.epoch, keep_batches_from):
                is_file = one.type == fs.FileType.File
                doomed[folder] = doomed.get(folder, 0) + is_file
        removed = 0
        for folder, files in doomed.items():
            # A zombie's task may be writing there; the next sweep removes the rest.
            with suppress(OSError):
                place.delete_dir(f"{base}/{folder}")
                removed += files
        return removed

    @property
    def _folder(self) -> str:
        """The pipeline's name encoded as a folder's name, which is neither ".." nor hidden."""
        name = quote(self.pipeline, safe="")
        return f"%2E{name[1:]}" if name.startswith(".") else name

    def _place(self) -> tuple[Any, str]:
        """The file system, and the folder on it."""
        try:
            place, root = fs.FileSystem.from_uri(self.url)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigError(
                "sink.staging",
                f"{_shown(self.url)!r} can't store files: {_shown(str(error))}",
                way_out="name a folder that the driver and all executors reach, by an absolute"
                " path or a URL such as s3://bucket/folder",
            ) from None
        return place, root.rstrip("/")

    @contextmanager
    def _reached(self, name: str = "") -> Iterator[None]:
        """Convert errors of a file system by consequence."""
        try:
            yield
        except pa.ArrowInvalid as error:
            if not name:
                raise
            raise _gone(name, error) from None
        except OSError as error:
            if name and isinstance(error, FileNotFoundError):
                raise _gone(name, error) from None
            raise self._unreached(error) from None

    def _unreached(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"sink.staging: {_shown(self.url)} can't be used: {_shown(str(error))}",
            way_out="it must be reached, and written, by the driver and all executors",
        )


def _gone(name: str, error: Exception) -> StagedRowsGone:
    return StagedRowsGone(
        f"the staged file {name} is missing or damaged: {_shown(str(error))}; the batch is done"
        " again"
    )


def staged_batches(
    tables: Iterable[pa.Table], form: RecordFormat, limits: Limits
) -> Iterator[pa.RecordBatch]:
    """Rows as encoded messages, in parts that fit into memory.

    Raises:
        Stopped: a row cannot be encoded. After a transform a row belongs to no single record, so it
            cannot become a reject.
    """
    for table in tables:
        for at in range(0, table.num_rows, _ROWS):
            yield from _cut(_encoded(table.slice(at, _ROWS), form, limits))


def _encoded(rows: pa.Table, form: RecordFormat, limits: Limits) -> pa.RecordBatch:
    none, each = np.array([], dtype=np.int64), np.arange(rows.num_rows)
    chunk = Chunk({}, (), each, each, rows, each, None, none, (), lambda _: [])
    found = encode(chunk, form, limits)
    if found.rejections:
        raise row_refused(found.rejections[0].reason, NO_SINGLE_RECORD)
    topics = pa.array(_topics(found), SCHEMA.field("topic").type)
    headers = pa.array(_headers(found), SCHEMA.field("headers").type)
    return pa.RecordBatch.from_arrays([topics, found.key, found.value, headers], schema=SCHEMA)


def _topics(found: Encoded) -> Sequence[str | None]:
    return found.topic if found.only is None else [None] * len(found.topic)


def _headers(found: Encoded) -> Sequence[Any]:
    if found.headers is None:
        return [None] * len(found.value)
    return [[{"key": name, "value": value} for name, value in own] for own in found.headers]


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Slices of a few megabytes; a message that is larger is a slice by itself."""
    sizes = lengths(batch.column("key")) + lengths(batch.column("value"))
    part = (np.cumsum(sizes) - sizes) // _PART
    ends = [*(np.flatnonzero(np.diff(part)) + 1).tolist(), batch.num_rows]
    start = 0
    for end in ends:
        yield batch.slice(start, end - start)
        start = end


def _doomed(parts: Sequence[str], epoch: int, keep_from: int | None) -> str:
    """The folder to be removed with its contents; empty if it is kept."""
    if not parts or not parts[0].isdecimal():
        return ""
    if int(parts[0]) < epoch:
        return parts[0]
    if int(parts[0]) > epoch or keep_from is None or len(parts) < 2 or not parts[1].isdecimal():
        return ""
    return "/".join(parts[:2]) if int(parts[1]) < keep_from else ""


@contextmanager
def _new_file(place: Any, path: str) -> Iterator[IO[bytes] | pa.NativeFile]:
    """A file that appears when it is complete, by a rename; object stores do so by themselves."""
    if not isinstance(place, fs.LocalFileSystem):
        if place.type_name not in _OBJECTS:
            place.create_dir(os.path.dirname(path), recursive=True)
        with place.open_output_stream(path) as stream:
            yield stream
        return
    unfinished = f"{path}.unfinished"
    _make_private(os.path.dirname(path))
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def _make_private(folder: str) -> None:
    """Create a folder and its missing parents, readable for this user only.

    Raises:
        ConfigError: another user has created the default folder.
    """
    if own := _default_top(folder):
        make_private(own, "sink.staging", _ELSEWHERE)
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for one in reversed(missing):
        with suppress(FileExistsError):  # another task has created it
            os.mkdir(one, 0o700)


def default_staging(name: str) -> str:
    """The default staging folder of a pipeline on one machine.

    Args:
        name: the pipeline's part of the path.
    """
    return str(Path(tempfile.gettempdir(), _default_name(), name))


def _default_name() -> str:
    return f"oncely-staging-{os.getuid()}"


def _default_top(folder: str) -> Path | None:
    """The parent folder of :func:`default_staging` for a folder; None if another folder is
    configured."""
    return next((one for one in Path(folder).parents if one.name == _default_name()), None)


def _chained(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _shown(text: str) -> str:
    """A text without users and keys of URLs."""
    return re.sub(r"//[^/@\s]*@", "//", text)
