"""The protocol that a server speaks, to explain why a client of another protocol gets no answer."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Literal

Protocol = Literal["Kafka without TLS", "TLS", "PostgreSQL", "HTTP", ""]

_ID = 0x6F6E6365
_ASKED = struct.pack(">ihhih", 10, 18, 0, _ID, -1)
"""ApiVersions 0 (KIP-35), which a broker answers before a login. PostgreSQL reads the start of a
session of protocol 18.0, and answers with an error."""


def refuses(host: str, port: str, timeout: float = 1.0) -> bool:
    """True if the machine is there, and nothing listens at the port. Arguments as below."""
    try:
        socket.create_connection((host, int(port)), timeout).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        pass
    return False


def protocol_at(host: str, port: str, timeout: float = 1.0) -> Protocol:
    """What the server answers; empty without an answer that tells.

    Args:
        host, port: its address, which may be no valid one.
        timeout: seconds, for the connection and for each read.
    """
    answer = b""
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host, int(port)), timeout) as server,
    ):
        server.sendall(_ASKED)
        while len(answer) < 8 and (more := server.recv(8 - len(answer))):
            answer += more
    if answer[:2] == b"\x15\x03":  # an alert: what it got is no TLS
        return "TLS"
    if answer[4:8] == struct.pack(">i", _ID):
        return "Kafka without TLS"
    if answer[:3] == b"E\x00\x00":
        return "PostgreSQL"
    return "HTTP" if answer[:5] == b"HTTP/" else ""
