from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pyarrow as pa
import pytest

from oncely.decode.base import Decoded
from oncely.decode.build import KeySpec, build_decoder
from oncely.decode.careful import CRASHES, decode_carefully
from oncely.errors import InvariantViolation

JSON = build_decoder("json", "n INT")


@dataclass
class Fragile:
    """A JSON decoder that comes to harm on a marker."""

    harm: Callable[[], object]
    marker: bytes = b"KILL"
    key: KeySpec | None = None

    def __post_init__(self) -> None:
        self.inner = build_decoder("json", "n INT", key=self.key)
        self.schema, self.needs = self.inner.schema, self.inner.needs
        self.decoded: list[int] = []

    def decode(self, records: pa.Table) -> Decoded:
        if self.marker in records["value"].to_pylist():
            self.harm()
        self.decoded.append(len(records))
        return self.inner.decode(records)


def table(*values: bytes | None) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.binary())})


def segfault() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("harm", [os.abort, segfault, killed])
@pytest.mark.parametrize("bad", [{0}, {99}, {7, 8, 50}, {*range(40, 48)}])
def test_records_that_kill_are_rejections_and_the_rest_are_rows(
    harm: Callable[[], object], bad: set[int]
) -> None:
    values = [
        b"KILL" if n in bad else b"{" if n % 10 == 3 else b'{"n": %d}' % n for n in range(100)
    ]
    decoded = decode_carefully(Fragile(harm), table(*values))
    good = [n for n in range(100) if n not in bad and n % 10 != 3]
    assert decoded.rows["n"].to_pylist() == good
    assert decoded.row_record.to_pylist() == good
    assert [r.record for r in decoded.rejections] == [n for n in range(100) if n not in good]
    assert {r.record for r in decoded.rejections if r.reason == CRASHES} == bad
    assert decoded.tombstones is None


def test_without_harm_it_is_the_decoders_own_outcome() -> None:
    decoder = Fragile(os.abort)
    records = table(b'{"n": 1}', b"x", None)
    decoded, plain = decode_carefully(decoder, records), JSON.decode(records)
    assert decoded.rows == plain.rows
    assert decoded.row_record == plain.row_record
    assert decoded.rejections == plain.rejections
    assert decode_carefully(decoder, table()).rows.schema == decoder.schema


def test_tombstones_keep_their_records() -> None:
    pairs = [(b"%d" % n, None if n % 2 else b"{}") for n in range(9)]
    pairs[4] = (b"4", b"KILL")
    records = pa.table({"key": [k for k, _ in pairs], "value": [v for _, v in pairs]})
    decoded = decode_carefully(Fragile(os.abort, key=KeySpec("string", name="id")), records)
    assert decoded.row_record.to_pylist() == [0, 2, 6, 8]
    assert decoded.tombstone_record.to_pylist() == [1, 3, 5, 7]
    assert decoded.tombstones is not None
    assert decoded.tombstones["id"].to_pylist() == ["1", "3", "5", "7"]
    assert [(r.record, r.reason) for r in decoded.rejections] == [(4, CRASHES)]


def test_harm_that_only_many_records_do_rejects_none() -> None:
    class Crowded(Fragile):
        def decode(self, records: pa.Table) -> Decoded:
            if len(records) > 30:
                os.abort()
            return super().decode(records)

    decoded = decode_carefully(Crowded(os.abort), table(*[b'{"n": 1}'] * 100))
    assert decoded.row_record.to_pylist() == list(range(100))


def test_an_error_of_the_decoder_is_raised_and_rejects_nothing() -> None:
    class BugError(Exception):
        pass

    def bug() -> None:
        raise BugError

    with pytest.raises(BugError):
        decode_carefully(Fragile(bug), table(b'{"n": 1}', b"KILL"))


def test_a_child_that_hangs_counts_as_dead() -> None:
    def hang() -> None:
        signal.pause()

    decoded = decode_carefully(Fragile(hang), table(b"KILL", b'{"n": 1}'), seconds=0.5)
    assert decoded.row_record.to_pylist() == [1]
    assert [r.reason for r in decoded.rejections] == [CRASHES]


def test_a_process_that_can_not_fork_is_told_from_a_bad_record() -> None:
    class Dead(Fragile):
        def decode(self, records: pa.Table) -> Decoded:
            os.abort()

    with pytest.raises(InvariantViolation, match="even without records"):
        decode_carefully(Dead(os.abort), table(b'{"n": 1}'))


def test_no_child_and_no_open_file_is_left() -> None:
    this = psutil.Process()
    before = this.num_fds(), {child.pid for child in this.children()}
    decode_carefully(Fragile(os.abort), table(b'{"n": 1}', b"KILL"))
    assert (this.num_fds(), {child.pid for child in this.children()}) == before


def test_a_child_ends_in_time_though_its_parent_was_killed() -> None:
    script = """
import os, signal, sys
import pyarrow as pa
from oncely.decode.careful import decode_carefully
class Hangs:
    def decode(self, records):
        if len(records):
            print(os.getpid(), flush=True)
            signal.pause()
decode_carefully(Hangs(), pa.table({"value": [b"x"]}), seconds=1)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(60)


def test_a_child_never_runs_what_the_parent_had_planned() -> None:
    """No exit handler, no finally of the caller, no buffered output a second time."""
    script = """
import atexit, os, sys
import pyarrow as pa
from oncely.decode.build import build_decoder
from oncely.decode.careful import decode_carefully
atexit.register(lambda: print("exit handler", os.getpid()))
sys.stdout.write("buffered ")
try:
    decode_carefully(build_decoder("json", "n INT"), pa.table({"value": [b'{"n": 1}']}))
finally:
    print("finally", os.getpid())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert [done.stdout.count(word) for word in ("buffered", "finally", "exit handler")] == [
        1,
        1,
        1,
    ]
