"""The reader of files: what it takes for a file that was named, and what it does not."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import pytest

from oncely.kinds.files.trial import _ids

SCHEMA = {"type": "record", "name": "Record", "fields": [{"name": "id", "type": "long"}]}


def file(folder: Path, ids: list[int]) -> tuple[Path, dict[str, Any]]:
    """A file, and what its manifest message says of it."""
    data = io.BytesIO()
    fastavro.writer(data, SCHEMA, [{"id": one} for one in ids])
    path = folder / "one.avro"
    path.write_bytes(data.getvalue())
    return path, {"sha256": hashlib.sha256(data.getvalue()).hexdigest(), "rows": len(ids)}


def test_a_file_that_was_named(tmp_path: Path) -> None:
    path, entry = file(tmp_path, [1, 2, 2])
    assert _ids(path, entry) == [1, 2, 2]


def half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    "hurt",
    [Path.unlink, half, lambda path: file(path.parent, [7, 8, 9])],
    ids=["missing", "half of it", "another"],
)
def test_one_that_is_not_what_was_named_holds_nothing(
    tmp_path: Path, hurt: Callable[[Path], object]
) -> None:
    path, entry = file(tmp_path, [1, 2, 3])
    hurt(path)
    assert _ids(path, entry) == []


@pytest.mark.parametrize("data", [b"", b"no Avro", b"Obj\x01\x02"])
def test_one_that_was_named_and_is_broken_holds_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one.avro"
    path.write_bytes(data)
    assert _ids(path, {"sha256": hashlib.sha256(data).hexdigest(), "rows": 0}) == []


def test_fewer_rows_than_were_named_are_none(tmp_path: Path) -> None:
    path, entry = file(tmp_path, [1, 2, 3])
    assert _ids(path, {**entry, "rows": 4}) == []
