from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pyarrow as pa
import pytest

from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import CRASHES, isolate_crashes
from oncely.decode.json import JsonDecoder
from oncely.decode.metadata import TextDecoder, WithKey
from oncely.errors import InvariantViolation

JSON = JsonDecoder(pa.schema({"n": pa.int32()}))


KEY = TextDecoder(pa.schema({"id": pa.string()}), "key")


@dataclass
class Fragile:
    """A JSON decoder that comes to harm on a marker."""

    harm: Callable[[], object]
    marker: bytes = b"KILL"
    inner: Decoder = JSON

    def __post_init__(self) -> None:
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


def test_nothing_is_collected_in_a_child() -> None:
    """A client whose threads are the parent's can't be destroyed there."""
    parent = os.getpid()

    def collected() -> None:
        if os.getpid() != parent and gc.isenabled():
            killed()

    assert gc.isenabled()
    decoded = isolate_crashes(Fragile(collected, b'{"n":1}'), table(b'{"n":1}'))
    assert decoded.rows.num_rows == 1
    assert gc.isenabled()


PLACES: list[set[int]] = [{0}, {99}, {7, 8, 50}, {*range(40, 48)}]


@pytest.mark.parametrize(
    ("harm", "bad"),
    [
        *((os.abort, bad) for bad in PLACES),
        *(
            pytest.param(harm, bad, marks=[pytest.mark.long] * (bad != {7, 8, 50}))
            for harm in (segfault, killed)
            for bad in PLACES
        ),
    ],
)
def test_records_that_kill_are_rejections_and_the_rest_are_rows(
    harm: Callable[[], object], bad: set[int]
) -> None:
    values = [
        b"KILL" if n in bad else b"{" if n % 10 == 3 else b'{"n": %d}' % n for n in range(100)
    ]
    decoded = isolate_crashes(Fragile(harm), table(*values))
    good = [n for n in range(100) if n not in bad and n % 10 != 3]
    assert decoded.rows["n"].to_pylist() == good
    assert decoded.row_record.to_pylist() == good
    assert [r.record for r in decoded.rejections] == [n for n in range(100) if n not in good]
    assert {r.record for r in decoded.rejections if r.reason == CRASHES} == bad
    assert decoded.tombstones is None


def test_without_harm_it_is_the_decoders_own_outcome() -> None:
    decoder = Fragile(os.abort)
    records = table(b'{"n": 1}', b"x", None)
    decoded, plain = isolate_crashes(decoder, records), JSON.decode(records)
    assert decoded.rows == plain.rows
    assert decoded.row_record == plain.row_record
    assert decoded.rejections == plain.rejections
    assert isolate_crashes(decoder, table()).rows.schema == decoder.schema


def test_tombstones_keep_their_records() -> None:
    pairs = [(b"%d" % n, None if n % 2 else b"{}") for n in range(9)]
    pairs[4] = (b"4", b"KILL")
    records = pa.table({"key": [k for k, _ in pairs], "value": [v for _, v in pairs]})
    decoded = isolate_crashes(Fragile(os.abort, inner=WithKey(JSON, KEY)), records)
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

    decoded = isolate_crashes(Crowded(os.abort), table(*[b'{"n": 1}'] * 100))
    assert decoded.row_record.to_pylist() == list(range(100))


def test_an_error_of_the_decoder_is_raised_and_rejects_nothing() -> None:
    class BugError(Exception):
        pass

    def bug() -> None:
        raise BugError

    with pytest.raises(BugError):
        isolate_crashes(Fragile(bug), table(b'{"n": 1}', b"KILL"))


def test_a_child_that_hangs_counts_as_dead() -> None:
    def hang() -> None:
        signal.pause()

    decoded = isolate_crashes(Fragile(hang), table(b"KILL", b'{"n": 1}'), seconds=0.5)
    assert decoded.row_record.to_pylist() == [1]
    assert [r.reason for r in decoded.rejections] == [CRASHES]


def test_a_process_that_can_not_fork_is_told_from_a_bad_record() -> None:
    class Dead(Fragile):
        def decode(self, records: pa.Table) -> Decoded:
            os.abort()

    with pytest.raises(InvariantViolation, match="even without records"):
        isolate_crashes(Dead(os.abort), table(b'{"n": 1}'))


def test_no_child_and_no_open_file_is_left() -> None:
    this = psutil.Process()
    before = this.num_fds(), {child.pid for child in this.children()}
    isolate_crashes(Fragile(os.abort), table(b'{"n": 1}', b"KILL"))
    assert (this.num_fds(), {child.pid for child in this.children()}) == before


def test_a_child_ends_in_time_though_its_parent_was_killed() -> None:
    script = """
import os, signal, sys
import pyarrow as pa
from oncely.decode.isolate_crashes import isolate_crashes
class Hangs:
    def decode(self, records):
        if len(records):
            print(os.getpid(), flush=True)
            signal.pause()
isolate_crashes(Hangs(), pa.table({"value": [b"x"]}), seconds=1)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(180)


def test_a_child_never_runs_what_the_parent_had_planned() -> None:
    """No exit handler, no finally of the caller, no buffered output a second time."""
    script = """
import atexit, os, sys
import pyarrow as pa
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.decode.json import JsonDecoder
atexit.register(lambda: print("exit handler", os.getpid()))
sys.stdout.write("buffered ")
try:
    decoder = JsonDecoder(pa.schema({"n": pa.int32()}))
    isolate_crashes(decoder, pa.table({"value": [b'{"n": 1}']}))
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
