"""One broker and one PostgreSQL for all processes of a run.

The process that the run was started in keeps the servers, and starts each when the first test
asks for it. xdist's workers ask through a socket and get a view: a server object that is used as
any other, and neither starts nor ends the server.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from oncely.testing.servers.process import ChildServer

Makers = Mapping[str, Callable[[], ChildServer]]


class Keeper:
    """Keeps the servers of a run; :meth:`close` ends them."""

    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self._running: dict[str, ChildServer] = {}
        self._locks = {name: threading.Lock() for name in makers}
        self._ends = ExitStack()
        self._secret = os.urandom(16)
        self._listener: Listener | None = None

    def server(self, name: str) -> ChildServer:
        """The server of that name, started by the first call."""
        with self._locks[name]:
            if name not in self._running:
                self._running[name] = self._ends.enter_context(self._makers[name]())
            return self._running[name]

    def listen(self) -> tuple[str, str]:
        """Where other processes may ask: a socket's path, and the key in hexadecimal digits."""
        if self._listener is None:
            folder = self._ends.enter_context(tempfile.TemporaryDirectory(prefix="oncely-run-"))
            self._listener = Listener(f"{folder}/servers", "AF_UNIX", authkey=self._secret)
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()
        return str(self._listener.address), self._secret.hex()

    def close(self) -> None:
        """End the servers."""
        if self._listener is not None:
            self._listener.close()
        self._ends.close()

    def _serve(self, listener: Listener) -> None:
        while True:
            try:
                caller = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: Connection[Any, Any]) -> None:
        with caller, suppress(EOFError, OSError):
            try:
                caller.send(self.server(caller.recv()))
            except Exception as error:  # the one who asked shall see it
                caller.send(error)


def ask(address: tuple[str, str], name: str) -> Any:
    """A view of the server that the run's first process keeps.

    Raises:
        Exception: what its start has raised there.
    """
    path, secret = address
    with Client(path, "AF_UNIX", authkey=bytes.fromhex(secret)) as keeper:
        keeper.send(name)
        answer = keeper.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer
