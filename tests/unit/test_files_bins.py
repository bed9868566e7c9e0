"""Which small files go together, in which order; entries are not kept."""

from __future__ import annotations

from oncely.kinds.data_file import SourceRange
from oncely.kinds.files.compact import bins
from oncely.kinds.files.manifest import LiveFiles
from tests.manifesttools import a_file


def test_files_of_a_directory_go_together_in_the_order_of_their_rows() -> None:
    files = LiveFiles()
    for path, batch, size in (
        ("x/b", 2, 10),
        ("x/a", 1, 10),
        ("y/c", 3, 10),
        ("x/large", 1, 60),
        ("y/d", 1, 10),
        ("z/alone", 1, 10),
    ):
        where = SourceRange("events", 0, batch * 10, batch * 10 + 5)
        files.put(a_file(path, batch=batch, bytes=size, ranges=[where]))
    found = list(bins(files, {}, target=100, largest=1_000_000))
    assert sorted(found) == [["x/a", "x/b"], ["y/d", "y/c"]]


def test_a_bin_ends_at_the_target_and_at_the_size_of_a_message() -> None:
    files = LiveFiles()
    for n in range(10):
        files.put(a_file(f"x/{n}", batch=n, bytes=30))
    found = list(bins(files, {}, target=100, largest=1_000_000))
    assert found == [[f"x/{n + k}" for k in range(3)] for n in range(0, 9, 3)]
    small = list(bins(files, {}, target=10_000, largest=1_700))
    assert all(len(one) < 10 for one in small)
    assert [path for one in small for path in one] == [f"x/{n}" for n in range(10)][
        : sum(map(len, small))
    ]
