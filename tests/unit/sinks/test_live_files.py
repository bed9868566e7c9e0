"""Many files of a table fit into memory, and are what their messages say."""

from __future__ import annotations

import tracemalloc

import pytest

from oncely.kinds.data_file import SourceRange, encode
from oncely.kinds.files.manifest import LiveFiles
from oncely.kinds.files.records import ManifestFile, path_key, read_manifest
from tests.manifesttools import a_file

FILES = 5_000
LIMIT = 700  # bytes of memory for one file


def file(n: int) -> ManifestFile:
    """An entry as a pipeline with three levels of directories publishes it."""
    user, hour = f"user{n % 1000}", f"{n % 24:02}"
    where = {"user": user, "date": "2026-11-21", "hour": hour}
    folder = "/".join(f"{key}={value}" for key, value in where.items())
    return a_file(
        f"{folder}/events-0-{n * 1000:020}-e3-b{n}-t5-{n * 7919:016x}-000001.avro",
        rows=1000 + n,
        bytes=20_480 + n,
        sha256=f"{n:064x}",
        partition=where,
        event_time=(f"2026-11-21T{hour}:00:00.{n % 1000:03}000Z", f"2026-11-21T{hour}:59:59Z"),
        ranges=[SourceRange("events", 0, n * 1000, n * 1000 + 1077)],
        scope=(user,),
        schema=f"{n % 1000:016x}",
        pipeline="events",
        batch=n,
    )


def test_a_file_takes_less_than_a_kilobyte() -> None:
    messages = [(path_key(one.path), encode(one)) for one in map(file, range(FILES))]
    tracemalloc.start()
    try:
        files = LiveFiles()
        for key, value in messages:
            _, found = read_manifest(key, value)
            assert found is not None
            files.put(found)
        found = None
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / FILES < LIMIT


def test_entries_come_back_as_they_were() -> None:
    files = LiveFiles()
    entries = [
        file(7),
        a_file("mixed", event_time=None, ranges=[], partition={"user": None}, scope=(None,)),
        a_file("whole", replaces=["a", "b"], version=1, format="parquet"),
    ]
    for one in entries:
        files.put(one)
    assert list(files.values()) == entries
    assert [files[one.path] for one in entries] == entries
    assert list(files) == [one.path for one in entries]


def test_a_copy_stays_as_it_was() -> None:
    files = LiveFiles()
    files.put(a_file("a"))
    before = files.copy()
    files.put(a_file("b"))
    assert files.remove("a")
    assert not files.remove("a")
    assert list(before) == ["a"]
    assert list(files) == ["b"]
    assert "a" not in files
    with pytest.raises(KeyError):
        files["a"]
