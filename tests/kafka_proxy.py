"""A TCP proxy before a broker that understands Kafka's frames and loses or delays them by kind.

A frame is its size, then (in a request) api key, api version and correlation id, or (in a
response) the correlation id: so a response is known by the request that it answers. The broker
advertises the proxy's port, so every connection of a client comes through here.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.process import HOST

PRODUCE, INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = (
    0, 22, 24, 25, 26, 28,
)  # fmt: skip
LIST_OFFSETS = 2
NAMES = {
    PRODUCE: "Produce",
    INIT_PRODUCER_ID: "InitProducerId",
    ADD_PARTITIONS: "AddPartitionsToTxn",
    ADD_OFFSETS: "AddOffsetsToTxn",
    END_TXN: "EndTxn",
    TXN_OFFSET_COMMIT: "TxnOffsetCommit",
}

Kind = Literal["lose request", "lose response", "hold request", "hold response", "lose broker"]
_OF_REQUESTS: tuple[Kind, ...] = ("lose request", "hold request", "lose broker")


@dataclass
class Fault:
    """What happens once to a frame of one api, after ``skip`` that pass.

    The client's connection is cut then: a client that waits for its timeout learns nothing
    more, only later. A held request stays in flight on its own connection until released. A held
    response comes late, after those to later requests of the same connection. With
    the broker lost, every connection is cut, and no other is made before the fault is over.
    """

    api: int
    kind: Kind
    skip: int = 0
    met: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    _held: tuple[socket.socket, bytes] | None = None

    def release(self, seconds: float = 20.0) -> None:
        """Let the held frame pass, and wait for the broker's answer."""
        assert self._held is not None, "nothing is held"
        receiver, frame = self._held
        receiver.sendall(frame)
        assert self.answered.wait(seconds), "the broker did not answer the late request"


class KafkaProxy:
    """Listens on a port of its own; ``with proxy.fault(...)`` hurts one frame."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._upstream = 0
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._away = False

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self, upstream: int) -> Self:
        self._upstream = upstream
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def close(self) -> None:
        with self._lock:
            for one in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    @contextlib.contextmanager
    def fault(self, api: int, kind: Kind, skip: int = 0) -> Iterator[Fault]:
        fault = Fault(api, kind, skip)
        with self._lock:
            self._faults.append(fault)
        try:
            yield fault
        finally:
            with self._lock:
                self._faults.remove(fault)
                self._away = False

    def leave(self) -> None:
        """Cut every connection, and each new one until the fault is over."""
        with self._lock:
            self._away, cut, self._open = True, self._open, []
        for one in cut:
            _cut(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._away:
                    _cut(client)
                    continue
                try:
                    upstream = socket.create_connection((HOST, self._upstream))
                except OSError:  # a stray client of this port, before the broker listens
                    _cut(client)
                    continue
                with self._lock:
                    self._open += [client, upstream]
                _Connection(self, client, upstream).start()

    def meet(self, api: int, kinds: tuple[Kind, ...]) -> Fault | None:
        """The fault that falls on this frame, if there is one."""
        with self._lock:
            for fault in self._faults:
                if fault.api == api and fault.kind in kinds and not fault.met.is_set():
                    if fault.skip:
                        fault.skip -= 1
                    else:
                        fault.met.set()
                        return fault
        return None


class _Connection:
    def __init__(self, proxy: KafkaProxy, client: socket.socket, upstream: socket.socket) -> None:
        self._proxy, self._client, self._upstream = proxy, client, upstream
        self._asked: dict[int, tuple[int, Fault | None]] = {}
        self._held = False

    def start(self) -> None:
        for work in (self._requests, self._responses):
            threading.Thread(target=work, daemon=True).start()

    def _requests(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                frame = _frame(self._client)
                api, _, correlation = struct.unpack(">hhi", frame[4:12])
                fault = self._proxy.meet(api, _OF_REQUESTS)
                self._asked[correlation] = (api, fault)
                if fault is None:
                    self._upstream.sendall(frame)
                    continue
                if fault.kind == "hold request":
                    self._held = True
                    fault._held = (self._upstream, frame)
                if fault.kind == "lose broker":
                    self._proxy.leave()
                break
        _cut(self._client)
        if not self._held:
            _cut(self._upstream)

    def _responses(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                frame = _frame(self._upstream)
                (correlation,) = struct.unpack(">i", frame[4:8])
                api, fault = self._asked.pop(correlation, (-1, None))
                if fault is not None:
                    fault.answered.set()
                    continue
                if self._proxy.meet(api, ("lose response",)):
                    break
                if late := self._proxy.meet(api, ("hold response",)):
                    late._held = (self._client, frame)
                    late.answered.set()
                    continue
                with contextlib.suppress(OSError):  # the answers to a held request's neighbours
                    self._client.sendall(frame)
        _cut(self._client)
        _cut(self._upstream)


def _frame(source: socket.socket) -> bytes:
    head = _exactly(source, 4)
    return head + _exactly(source, struct.unpack(">i", head)[0])


def _exactly(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _cut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@contextlib.contextmanager
def proxied_broker() -> Iterator[tuple[Broker, KafkaProxy]]:
    """A broker whose clients' listener is advertised at a proxy; the inner one is not."""
    proxy = KafkaProxy()
    broker = Broker()
    broker._properties["advertised.listeners"] = (
        f"CLIENTS://{proxy.bootstrap},INNER://{broker._inner}"
    )
    proxy.start(broker.port)
    try:
        with broker:
            yield broker, proxy
    finally:
        proxy.close()
