"""Uploads of files: several at a time if the store is remote."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from oncely.clients.files.store import Bytes, Store
from oncely.errors import OncelyError

_IN_FLIGHT = 64_000_000  # bytes


class Uploads:
    """Writes files; errors of an earlier file are raised by a later call.

    A local disk accepts a small file faster than a thread can be woken.
    """

    def __init__(self, store: Store, threads: int) -> None:
        self._store = store
        self._threads = None if store.local else ThreadPoolExecutor(threads, "oncely-upload")
        self._most = 4 * threads
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._bytes = 0
        self._begun: list[str] = []

    def write(self, path: str, data: Bytes) -> None:
        """Write a file, now or later."""
        self._begun.append(path)
        if self._threads is None:
            self._store.write(path, data)
            return
        size = len(data)
        while self._pending and (
            self._bytes + size > _IN_FLIGHT or len(self._pending) >= self._most
        ):
            self._await_oldest()
        self._bytes += size
        self._pending.append((size, self._threads.submit(self._store.write, path, data)))

    def complete(self) -> None:
        """Wait until all files are written, and durable."""
        while self._pending:
            self._await_oldest()
        self._close()
        self._store.durable()

    def undo(self) -> None:
        """Delete all files that were begun, as far as the store allows; vacuum removes the rest."""
        for _, future in self._pending:
            future.cancel()
        self._close()
        with suppress(OncelyError):
            self._store.delete(self._begun)
        self._begun = []

    def _await_oldest(self) -> None:
        size, future = self._pending.popleft()
        self._bytes -= size
        future.result()

    def _close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)
