"""Checkpoint directories with the lifetime of one query.

Spark's offset log in them decides the ranges of a batch, so no other user may write there: a
directory has a random name in the folder for temporary files, mode 0700, and is held by a lock on a
file in it. The lock, not a process id, shows a later run that the owner is dead: containers that
share the folder have separate process ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oncely.private import is_private

_PREFIX = "oncely-checkpoint-"
_LEASE = "lease"


@contextmanager
def throwaway_checkpoint() -> Iterator[Path]:
    """A new checkpoint directory, removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lease = _lock(folder, wait=True)
        if lease is not None:
            break  # else a sweep has removed the directory
    try:
        yield folder / "query"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lease)


def sweep_checkpoints() -> int:
    """Remove checkpoints of killed runs; they contain no state that is needed."""
    swept = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not is_private(folder):
            continue
        lease = _lock(folder, wait=False)
        if lease is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lease)
            swept += 1
    return swept


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Lock the directory's lease; None if it is locked by another process, or was removed
    meanwhile."""
    lease = folder / _LEASE
    with suppress(OSError):
        held = os.open(lease, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(held), lease.stat()):
                return held
        except OSError:
            pass
        os.close(held)
    return None
