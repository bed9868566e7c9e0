"""Ports are free, differ, and lie outside the range that clients are given."""

from __future__ import annotations

import socket
from pathlib import Path

from oncely.testing.servers.ports import HOST, free_port, is_free


def test_ports_differ_although_nobody_listens_yet() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == len(ports)


def test_a_client_can_not_be_given_a_servers_port() -> None:
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(limits.read_text().split()[0]) if limits.exists() else 49152
    assert all(free_port() < first for _ in range(300))


def test_a_port_with_a_listener_is_not_free() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
