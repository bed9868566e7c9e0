"""Connections between a driver and its tasks that stay: messages to the driver, requests to stop to
the tasks.

Address and key travel with the task. Each side proves to the other that it has the key (HMAC). The
messages themselves are not encrypted. They are bytes, and never unpickled.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Self

from oncely.errors import Unavailable

log = logging.getLogger(__name__)

_STOP, _TAKEN = b"stop", b"taken"
_ASKING, _TELLING = b"?", b"."
_PATIENCE = 60.0  # seconds for an answer of the driver
_PROOF = 10  # seconds in which a connection must have proved its key
_DEAD = (15, 15, 4)  # a host that vanished is noticed after 15 s of silence and 4 probes 15 s apart

Take = Callable[[bytes], object]


@dataclass(frozen=True)
class Address:
    """The place of a driver, and the key of its tasks."""

    host: str
    port: int
    key: bytes = field(repr=False)


class Driver:
    """The driver's side, within a ``with`` block.

    Args:
        host: the name by which tasks reach this machine.
        bind: the address to listen at.
        opened: makes the context of one connection, whose value takes its messages. It is called in
            a thread of the connection.

    Raises:
        Unavailable: it can't listen there.
    """

    def __init__(
        self, host: str, bind: str, opened: Callable[[], AbstractContextManager[Take]]
    ) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        self._links: set[Connection[Any, Any]] = set()
        self._stops = 0
        kind = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            self._listening = socket.create_server((bind, 0), family=kind)
        except OSError as error:
            raise Unavailable(
                f"can't listen at {bind} for the tasks of this driver: {error.strerror or error}",
                way_out="set spark.driver.bindAddress to an address of this machine",
            ) from None
        self.address = Address(host, self._listening.getsockname()[1], os.urandom(32))

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="tasks", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the thread, which close() would not do
        self._listening.close()

    def stop(self) -> None:
        """Ask all tasks to stop, also those that connect later; again: at once."""
        with self._lock:
            self._stops += 1
            for link in self._links:
                _send(link, _STOP)

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[raw], name="task", daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with _connection(raw) as link:
            try:
                _proved(link, self.address.key, first=True)
                with self._opened() as take:
                    self._join(link)
                    self._take_all(link, take)
            except (OSError, EOFError, AuthenticationError) as error:
                log.debug("the connection of a task has ended: %s", error)
            finally:
                with self._lock:
                    self._links.discard(link)

    def _join(self, link: Connection[Any, Any]) -> None:
        with self._lock:
            self._links.add(link)
            for _ in range(self._stops):
                _send(link, _STOP)

    def _take_all(self, link: Connection[Any, Any], take: Take) -> None:
        """Until its end, which is no error of the context."""
        while True:
            try:
                message = link.recv_bytes()
            except (OSError, EOFError):
                return
            take(message[1:])
            if message[:1] == _ASKING:
                with self._lock:
                    link.send_bytes(_TAKEN)


class Task:
    """The task's side.

    Args:
        to: the driver.
        stop: called, in another thread, for each request to stop, and once when the driver is gone.

    Attributes:
        broken: the driver is gone.

    Raises:
        Unavailable: the driver does not answer.
    """

    def __init__(self, to: Address, stop: Callable[[], object]) -> None:
        self._where, self._stop = f"the driver at {to.host}:{to.port}", stop
        self._lock = threading.Lock()
        self._taken = threading.Event()
        self.broken = False
        try:
            raw = socket.create_connection((to.host, to.port), timeout=_PATIENCE)
            raw.settimeout(None)
            self._link = _connection(raw)
            _proved(self._link, to.key, first=False)
        except (OSError, EOFError, AuthenticationError) as error:
            raise Unavailable(
                f"{self._where} did not answer: {error}",
                way_out="let the executors connect to any port of the driver's machine",
            ) from None
        self._thread = threading.Thread(target=self._listen, name="driver", daemon=True)
        self._thread.start()

    def tell(self, message: bytes, *, asking: bool = False) -> None:
        """Send a message; ``asking``: wait until the driver has taken it.

        Raises:
            Unavailable: ``asking``, and the driver does not answer.
        """
        with self._lock:
            self._taken.clear()
            sent = _send(self._link, (_ASKING if asking else _TELLING) + message)
            answered = sent and (not asking or self._taken.wait(_PATIENCE))
        if asking and (self.broken or not answered):
            raise Unavailable(f"{self._where} does not answer")

    def close(self) -> None:
        """End the connection; requests to stop are not awaited any more."""
        self._stop = lambda: None
        with self._link, socket.socket(fileno=os.dup(self._link.fileno())) as raw:
            with suppress(OSError):  # the driver is gone
                raw.shutdown(socket.SHUT_RDWR)
            self._thread.join()  # before the number of its file is free for another one

    def _listen(self) -> None:
        try:
            while True:
                if self._link.recv_bytes() == _TAKEN:
                    self._taken.set()
                else:
                    self._stop()
        except (OSError, EOFError):
            self.broken = True
            self._stop()
            self._taken.set()


def _connection(raw: socket.socket) -> Connection[Any, Any]:
    """The connection of a socket, which notices that the other host has vanished."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("IDLE", "INTVL", "CNT"), _DEAD, strict=True):
        if option := getattr(socket, f"TCP_KEEP{name}", None):  # macOS has no IDLE
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(raw.detach())


def _proved(link: Connection[Any, Any], key: bytes, *, first: bool) -> None:
    """Each side proves the key, within a limited time.

    Raises:
        AuthenticationError: the other side has another key.
        OSError, EOFError: it is gone, or has not answered in time.
    """
    _limit(link, _PROOF)
    for challenge in (deliver_challenge, answer_challenge)[:: 1 if first else -1]:
        challenge(link, key)
    _limit(link, 0)


def _limit(link: Connection[Any, Any], seconds: int) -> None:
    with socket.socket(fileno=os.dup(link.fileno())) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _send(link: Connection[Any, Any], message: bytes) -> bool:
    """Send; False if the other side is gone."""
    try:
        link.send_bytes(message)
    except OSError:
        return False
    return True
