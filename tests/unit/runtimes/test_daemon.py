"""Python workers acknowledge what they receive before they read on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from oncely.runtimes.spark import daemon

pytestmark = pytest.mark.skipif(daemon._QUICKACK is None, reason="needs Linux")


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        closing(server.accept()[0]) as theirs,
    ):
        yield ours, theirs


def test_each_read_of_a_connection_turns_the_delay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Noted(socket.socket):
        def setsockopt(self, *given: object) -> None:  # type: ignore[override]
            calls.append(given)
            super().setsockopt(*given)  # type: ignore[call-overload]

        def recv_into(self, *given: object) -> int:  # type: ignore[override]
            calls.append("read")
            return super().recv_into(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(daemon.socket, "socket", Noted)
    on = (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    with connected() as (ours, theirs):
        fd = os.dup(ours.fileno())
        with daemon._Os().fdopen(fd, "rb", 4) as received:
            calls.clear()
            theirs.sendall(b"12345678")
            assert received.read(4) == b"1234"
            theirs.shutdown(socket.SHUT_WR)
            assert received.read() == b"5678"
        assert calls[:2] == [on, "read"]
        assert calls[::2] == [on] * (len(calls) // 2)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_other_files_are_opened_as_always() -> None:
    ours, theirs = socket.socketpair()  # no TCP
    with ours, theirs:
        with daemon._Os().fdopen(os.dup(ours.fileno()), "rb", 4) as received:
            theirs.sendall(b"12")
            assert received.read(2) == b"12"
        with daemon._Os().fdopen(os.dup(ours.fileno()), "wb", 4) as sent:
            sent.write(b"34")
        assert theirs.recv(2) == b"34"


def test_it_stands_for_all_else_of_its_module() -> None:
    assert daemon._Os().getpid() == os.getpid()
