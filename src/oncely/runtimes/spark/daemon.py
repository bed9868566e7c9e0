"""PySpark's daemon, whose workers acknowledge at once what they have received.

The JVM writes the parts of a task one after another. By Nagle's algorithm a small part waits until
the one before it is acknowledged, and the kernel of the worker delays the acknowledgement by 40 ms,
hoping for an answer to send it with. ``TCP_QUICKACK`` turns the delay off until the kernel turns it
on again, so it is set before each read (tcp(7)).

The setting ``spark.python.daemon.module`` names this module.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from typing import Any

from pyspark import daemon

from oncely.extras import MODULES

_QUICKACK = getattr(socket, "TCP_QUICKACK", None)  # Linux alone has it


class _Received(io.RawIOBase):
    """The bytes that a TCP connection receives, acknowledged at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)  # type: ignore[arg-type]
        return self._connection.recv_into(buffer)

    def close(self) -> None:
        self._connection.close()
        super().close()


class _Os:
    """The module ``os`` for PySpark's daemon: its only file to be read is that of a connection."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fdopen(self, fd: int, mode: str, buffering: int = -1) -> Any:
        """Open a file descriptor, which is then closed with the file."""
        if mode == "rb":
            connection = socket.socket(fileno=fd)
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                return io.BufferedReader(_Received(connection), buffering)
            connection.detach()
        return os.fdopen(fd, mode, buffering)


_worker = daemon.worker


def _acknowledging(sock: socket.socket, authenticated: bool) -> Any:
    """A worker after its fork."""
    daemon.os = _Os()
    return _worker(sock, authenticated)


if __name__ == "__main__":
    driver = os.environ.pop(MODULES, "").split(os.pathsep)
    sys.path += (one for one in driver if one and one not in sys.path)
    os.environ.pop("PYTHONSAFEPATH", None)  # for this process, not for programs of the user
    if _QUICKACK is not None:
        daemon.worker = _acknowledging
    daemon.manager()
