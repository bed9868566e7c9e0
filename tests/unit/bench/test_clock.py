"""The benchmark's clock reads the stamps of all batches of a topic, markers of transactions too."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bench.kafka.clock import appended

HEAD = struct.Struct(">qiibIhiqq")  # of a record batch of magic 2 (KIP-98)
APPEND_TIME, TRANSACTIONAL, CONTROL = 0x08, 0x10, 0x20


def batch(stamp: int, attributes: int = APPEND_TIME | TRANSACTIONAL, magic: int = 2) -> bytes:
    rest = b"records"
    return HEAD.pack(0, HEAD.size - 12 + len(rest), 0, magic, 0, attributes, 0, 1, stamp) + rest


def segment(folder: Path, *batches: bytes) -> None:
    folder.mkdir(exist_ok=True)
    number = len(list(folder.iterdir()))
    (folder / f"{number:020}.log").write_bytes(b"".join(batches))


def test_the_last_stamp_is_the_commit(tmp_path: Path) -> None:
    assert appended(tmp_path, "t") == (0.0, 0.0)
    segment(tmp_path / "t-0", batch(2_000), batch(3_500))
    segment(tmp_path / "t-1", batch(1_500))
    assert appended(tmp_path, "t") == (1.5, 3.5)
    segment(tmp_path / "t-1", batch(4_250, APPEND_TIME | TRANSACTIONAL | CONTROL))
    assert appended(tmp_path, "t") == (1.5, 4.25)


def test_other_topics_and_what_is_not_written_yet_do_not_count(tmp_path: Path) -> None:
    segment(tmp_path / "t-0", batch(2_000), batch(9_000)[:20])
    segment(tmp_path / "t-0-1", batch(9_000))
    segment(tmp_path / "another-0", batch(9_000))
    assert appended(tmp_path, "t") == (2.0, 2.0)


@pytest.mark.parametrize("wrong", [batch(1, TRANSACTIONAL), batch(1, magic=1)])
def test_another_format_is_refused(tmp_path: Path, wrong: bytes) -> None:
    segment(tmp_path / "t-0", batch(1), wrong)
    with pytest.raises(ValueError, match="a batch of magic"):
        appended(tmp_path, "t")
