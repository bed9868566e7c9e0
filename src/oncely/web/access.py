"""Who may read and who may change: host names, origins, the token, sessions.

A page on loopback is reached by every program of the machine, and, through a browser, by the pages
of any other site. Foreign sites are kept out by their host name (DNS rebinding) and by their origin
(forged requests). A token is asked for if there is one, and if other machines can connect, also
through a proxy on this machine: the address that the server listens at does not say so.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from oncely.errors import ConfigError
from oncely.http_server import is_own_host

TOKEN = "ONCELY_WEB_TOKEN"  # noqa: S105 - the name of the variable
_SHORTEST = 16
_MOST = 1_000  # sessions
_PASSED_ON = ("forwarded", "x-forwarded-", "x-real-ip", "via")  # prefixes of a proxy's headers


def is_loopback(host: str) -> bool:
    """True if only this machine can connect."""
    return host in ("localhost", "::1") or host.startswith("127.")


def checked_token(token: str) -> str:
    """The token of the environment.

    Raises:
        ConfigError: it can be guessed.
    """
    if len(token) < _SHORTEST:
        raise ConfigError(
            TOKEN,
            f"has {len(token)} characters, which can be guessed",
            way_out=f"at least {_SHORTEST}, such as of `openssl rand -hex 16`; or let --token"
            " make one",
        )
    return token


@dataclass(frozen=True)
class Access:
    """The rules of one server.

    Attributes:
        hosts: the host names under which it may be reached, without port.
        token: what a session needs; None: nobody can change anything.
        private: reading needs a session, too.
        cookie: the name of the session's cookie; cookies do not distinguish ports.
        lifetime: of a session, in seconds.
    """

    hosts: frozenset[str]
    token: str | None = field(default=None, repr=False)
    private: bool = False
    cookie: str = "oncely"
    lifetime: float = 12 * 3600.0
    _sessions: dict[str, tuple[str, float]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, host: str, port: int, token: str | None, names: Iterable[str] = ()) -> Access:
        """The rules of a server at this address, reached also under these names."""
        private = token is not None or bool(names) or not is_loopback(host)
        hosts = frozenset(one.lower() for one in (*names, host))
        return cls(hosts, token, private, f"oncely-{port}")

    def is_known_host(self, header: str) -> bool:
        """True if a ``Host`` header names this server."""
        return is_own_host(header, self.hosts)

    def is_private(self, headers: Mapping[str, str]) -> bool:
        """True if reading needs a session: always, or as a proxy has passed the request on."""
        return self.private or any(one.lower().startswith(_PASSED_ON) for one in headers)

    def is_same_origin(self, headers: Mapping[str, str]) -> bool:
        """True if a request that changes something was sent by a page of this server."""
        try:
            origin = urlsplit(headers.get("origin", ""))
        except ValueError:
            return False
        known = origin.scheme in ("http", "https") and origin.netloc == headers.get("host")
        return known and headers.get("sec-fetch-site", "same-origin") == "same-origin"

    def is_foreign(self, headers: Mapping[str, str]) -> bool:
        """True if a browser says that a page of another site has sent the request."""
        site = headers.get("sec-fetch-site", "none")
        own = "origin" not in headers or self.is_same_origin(headers)
        return site not in ("same-origin", "none") or not own

    def log_in(self, token: str) -> str | None:
        """A new session, or None if the token is wrong."""
        if self.token is None or not _equal(token, self.token):
            return None
        while len(self._sessions) >= _MOST:
            self._sessions.pop(next(iter(self._sessions)), None)
        session = secrets.token_urlsafe(32)
        self._sessions[session] = secrets.token_urlsafe(32), time.monotonic() + self.lifetime
        return session

    def log_out(self, session: str) -> None:
        """End a session."""
        self._sessions.pop(session, None)

    def form_token(self, session: str) -> str | None:
        """What forms of the session contain; None if it is no session, or has ended."""
        token, until = self._sessions.get(session, (None, 0.0))
        return token if time.monotonic() < until else None

    def accepts(self, session: str, form_token: str) -> bool:
        """True if a form was made for this session."""
        expected = self.form_token(session)
        return expected is not None and _equal(form_token, expected)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
