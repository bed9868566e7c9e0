"""Free TCP ports on 127.0.0.1."""

from __future__ import annotations

import fcntl
import functools
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from oncely.errors import WrongInput

HOST = "127.0.0.1"
_LOWEST, _HIGHEST = 15_000, 32_000
_TRIES = 200
_CHANCE = random.SystemRandom()  # with equal seeds, two processes would draw the same ports
_given: set[int] = set()  # a process can lock a byte twice


def free_port() -> int:
    """Return a port without a listener, below the range that the system assigns to clients.

    It is reserved until this process ends, also among processes: a server that starts for seconds
    or is stopped does not listen.

    A server that is restarted needs its port again. A port from the clients' (ephemeral) range
    might be used by another outgoing connection meanwhile; worse, a client that keeps trying to
    reach the stopped server on such a port can be assigned the same port and connect to itself.
    """
    highest = min(_HIGHEST, max(_first_ephemeral() - 1, _LOWEST + 1000))
    for _ in range(_TRIES):
        port = _CHANCE.randint(_LOWEST, highest)
        if port not in _given and _reserve(port):
            _given.add(port)
            if is_free(port):
                return port
    raise OSError(f"no free port between {_LOWEST} and {highest}")


def _reserve(port: int) -> bool:
    """Lock the port's byte in a file that all processes of the user share."""
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    return True


@functools.cache
def _reservations() -> int:
    """The file stays open: closing it releases the locks, which a forked child does not own.

    Its name can be guessed, and every user of the machine can make a file or a link of that name.
    """
    path = Path(tempfile.gettempdir()) / f"oncely-ports-{os.getuid()}"
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(file).st_uid == os.getuid():
            return file
        os.close(file)
    raise WrongInput(f"{path} is not a file of yours", way_out="delete it, or set TMPDIR")


def is_free(port: int) -> bool:
    """True if a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return _HIGHEST
