"""The base of servers that run as child processes: start, stop, crash."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

from oncely.errors import WrongInput
from oncely.secrets import Secrets, scope
from oncely.testing.servers.process import ForeignProcess, Process


class ChildServer(ABC):
    """A server with a directory of its own; a context manager that starts and closes it.

    Pickled, it becomes a view of the running server in another process: a view has the same
    methods, but refuses to start or end the server.

    Args:
        directory: the directory of its data; it exists.
        temporary: True if :meth:`close` deletes the directory.
    """

    name: ClassVar[str]
    """The server's name in messages."""

    def __init__(self, directory: Path, *, temporary: bool) -> None:
        self.directory = directory
        self._temporary = temporary
        self._process: Process | ForeignProcess | None = None
        self._secrets = Secrets()

    @property
    def pid(self) -> int:
        """The pid of the server's first process.

        Raises:
            WrongInput: it is not running.
        """
        return self._started().pid

    @property
    def running(self) -> bool:
        """True if the server's first process is running."""
        return self._process is not None and self._process.running

    def start(self) -> Self:
        """Start the server; return when it responds to a client.

        Raises:
            Unavailable: it did not start; with the end of its log.
            WrongInput: its programs are missing.
        """
        if self.running:
            return self
        if isinstance(self._process, ForeignProcess):
            self._process.refuse()
        with scope(self._secrets):  # an error quotes the server's log
            process = self._process = self._launch()
            try:
                self._await_ready(process)
            except BaseException:
                self.kill()
                raise
        return self

    @abstractmethod
    def stop(self) -> None:
        """Stop the server. Data and port are kept."""

    @abstractmethod
    def kill(self) -> None:
        """Crash the server. Data and port are kept."""

    def restart(self) -> None:
        """Stop and start again, on the same port with the same data."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop, and delete the directory if it was a temporary one."""
        if self._temporary:
            self.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            self.stop()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _launch(self) -> Process:
        """Prepare the directory and start the process."""

    @abstractmethod
    def _await_ready(self, process: Process) -> None:
        """Return when the server responds; raises Unavailable if it does not."""

    def __getstate__(self) -> dict[str, Any]:
        process = self._process and self._process.view()
        return {**self.__dict__, "_process": process, "_temporary": False}

    def _started(self) -> Process | ForeignProcess:
        if self._process is None:
            raise WrongInput(f"{self.name} is not running", way_out="start() it first")
        return self._process

    @property
    def _delete_after(self) -> Path | None:
        """The directory, if it must be deleted after the death of this process."""
        return self.directory if self._temporary else None
