"""The certificates are what a strict client accepts, for the right names and purposes only."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from oncely.testing.servers.certificates import Certificates, make_certificates


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "tls")


def _handshake(made: Certificates, ca: Path, name: str, *, client: bool = False) -> None:
    """Shake hands once over a socket pair; raise what the client sees."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.server, made.server_key)
    if client:
        server.load_verify_locations(made.ca)
        server.verify_mode = ssl.CERT_REQUIRED
    there = ssl.create_default_context(cafile=ca)
    there.verify_flags |= ssl.VERIFY_X509_STRICT
    if client:
        there.load_cert_chain(made.client, made.client_key)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as secured:
                secured.sendall(b"hello")
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with there.wrap_socket(ours, server_hostname=name) as secured:
            assert secured.recv(5) == b"hello"
    finally:
        ours.close()
        thread.join(180)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_strict_client_accepts_the_server(made: Certificates, name: str) -> None:
    _handshake(made, made.ca, name)
    _handshake(made, made.ca, name, client=True)


def test_another_name_is_refused(made: Certificates) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(made, made.ca, "127.0.0.2")


def test_another_authority_is_refused(made: Certificates, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(made, other.ca, "localhost")


def test_keys_are_for_the_owner_only(made: Certificates) -> None:
    for key in (made.server_key, made.client_key):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
