"""A process that saves positions of its own: ``python -m tests.saver``.

It reads one pickled ``(store, partition, first, times)``, says ``ready``, and begins at the next
line of its input. Each position that is saved is said. It imports what the store needs only.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from oncely.core.ranges import TopicPartition
from oncely.stores.offsets.base import OffsetStore, StoredPosition

_HERE = Path(__file__).resolve().parent.parent


class Saver:
    """The process, seen from the test."""

    def __init__(
        self, store: OffsetStore, tp: TopicPartition, *, first: int = 1, times: int = 1
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.saver"],
            cwd=_HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        pickle.dump((store, tp, first, times), self.process.stdin)
        self.process.stdin.flush()

    def ready(self) -> None:
        """Wait until it is."""
        assert self._line() == b"ready\n", self.process.wait(180)

    def go(self) -> None:
        """Let it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def saved(self) -> int:
        """Wait for the next position that is saved."""
        return int(self._line())

    def finish(self) -> list[int]:
        """Wait for its end; what it has said since."""
        out, _ = self.process.communicate(timeout=120)
        return [int(line) for line in out.split()]

    def kill(self) -> list[int]:
        """SIGKILL it; what it has said since."""
        self.process.kill()
        return self.finish()

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def main() -> None:
    """Save as told."""
    store, tp, first, times = pickle.load(sys.stdin.buffer)
    print("ready", flush=True)
    sys.stdin.buffer.readline()
    for position in range(first, first + times):
        store.save({tp: StoredPosition(position, 1, "cluster-1", "id-of-t")})
        print(position, flush=True)


if __name__ == "__main__":
    main()
