"""Per-worker caches that survive between tasks.

Between two tasks a worker invalidates the caches of its import path and collects garbage. Two
effects make that cost 0.2 to 0.3 s of processor time each, as much as 100,000 records do:

- PySpark's modules come out of a zip archive, and until Python 3.12 ``invalidate_caches`` reads the
  archive's directory at once, for each package in it that was ever imported.
- A full collection goes through every object of every module (100,000 of them), none of which will
  ever be garbage.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from zipimport import zipimporter

_State = tuple[int, int, int] | None


_tasks = itertools.count(1)


class _Unchanged:
    """Replaces an importer's ``invalidate_caches``: reads an archive only if it has changed."""

    def __init__(self, importer: zipimporter) -> None:
        self._read_again, self._archive = importer.invalidate_caches, importer.archive
        self._known: _State = None

    def __call__(self) -> None:
        state = _state(self._archive)  # before it is read: a change meanwhile is noticed next time
        if state is None or state != self._known:
            self._read_again()
            self._known = state


def settle() -> None:
    """Called by every task when it begins; cheap."""
    if next(_tasks) == 2:
        # The first task has imported the modules that tasks need, and its garbage was collected
        # after it.
        gc.freeze()
    for importer in list(sys.path_importer_cache.values()):
        if isinstance(importer, zipimporter) and "invalidate_caches" not in vars(importer):
            vars(importer)["invalidate_caches"] = _Unchanged(importer)


def _state(path: str) -> _State:
    """A state that changes when a file is changed or replaced; None: it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
