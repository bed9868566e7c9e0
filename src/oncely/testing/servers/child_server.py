"""What the servers that run as our child processes have in common: how they come and go."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Self

from oncely.errors import WrongInput
from oncely.secrets import Secrets, scope
from oncely.testing.servers.process import Process


class ChildServer(ABC):
    """One server with a directory of its own; a context manager that starts and closes it.

    Args:
        directory: where its data lie; it exists.
        temporary: whether :meth:`close` deletes the directory.
    """

    name: ClassVar[str]
    """What messages call it."""

    def __init__(self, directory: Path, *, temporary: bool) -> None:
        self.directory = directory
        self._temporary = temporary
        self._process: Process | None = None
        self._secrets = Secrets()

    @property
    def pid(self) -> int:
        """Of the server's first process.

        Raises:
            WrongInput: it is not running.
        """
        return self._started().pid

    @property
    def running(self) -> bool:
        """Whether the server's first process is there."""
        return self._process is not None and self._process.running

    def start(self) -> Self:
        """Start the server; return when it answers a client.

        Raises:
            Unavailable: it did not come up; with the end of its log.
            WrongInput: its programs are missing.
        """
        if self.running:
            return self
        with scope(self._secrets):  # an error quotes what the server has printed
            process = self._process = self._launch()
            try:
                self._await_ready(process)
            except BaseException:
                self.kill()
                raise
        return self

    @abstractmethod
    def stop(self) -> None:
        """End the server in order. Data and port stay."""

    @abstractmethod
    def kill(self) -> None:
        """Crash the server. Data and port stay."""

    def restart(self) -> None:
        """Stop in order and start again, on the same port with the same data."""
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
        """Return when the server answers; raises Unavailable when it won't."""

    def _started(self) -> Process:
        if self._process is None:
            raise WrongInput(f"{self.name} is not running", way_out="start() it first")
        return self._process

    @property
    def _delete_after(self) -> Path | None:
        """The directory, where nobody else would delete it when this process has died."""
        return self.directory if self._temporary else None
