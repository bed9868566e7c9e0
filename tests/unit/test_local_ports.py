"""Ports are free, differ, and lie outside the range that clients are given."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oncely.errors import WrongInput
from oncely.testing.servers import process as local_ports
from oncely.testing.servers.process import HOST, free_port, is_free


def test_ports_differ_although_nobody_listens_yet() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == len(ports)


def test_ports_of_two_processes_differ_although_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 20 ports, another process has 15."""
    lowest = next(at for at in range(16_000, 30_000, 20) if all(map(is_free, range(at, at + 20))))
    script = (
        "from oncely.testing.servers import process as ports\n"
        f"ports._LOWEST, ports._HIGHEST = {lowest}, {lowest + 19}\n"
        "print(*[ports.free_port() for _ in range(15)], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin
        assert other.stdout
        theirs = {int(port) for port in other.stdout.readline().split()}
        monkeypatch.setattr(local_ports, "_LOWEST", lowest)
        monkeypatch.setattr(local_ports, "_HIGHEST", lowest + 19)
        monkeypatch.setattr(local_ports, "_given", set())
        ours = {free_port() for _ in range(4)}
        other.stdin.write("\n")
    assert len(theirs) == 15
    assert not ours & theirs


@pytest.mark.parametrize("what", ["link", "other"])
def test_a_file_that_somebody_else_has_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The name can be guessed, and everybody may make files in the folder."""
    name = tmp_path / f"oncely-ports-{os.getuid()}"
    (tmp_path / "theirs").touch()
    if what == "link":
        name.symlink_to("theirs")
    else:
        monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
        name.with_name(f"oncely-ports-{os.getuid()}").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    local_ports._reservations.cache_clear()
    try:
        with pytest.raises(WrongInput, match="is not a file of yours"):
            free_port()
    finally:
        local_ports._reservations.cache_clear()


def test_a_client_can_not_be_given_a_servers_port() -> None:
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(limits.read_text().split()[0]) if limits.exists() else 49152
    assert all(free_port() < first for _ in range(300))


def test_a_port_with_a_listener_is_not_free() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
