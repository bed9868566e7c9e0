"""Database URLs: the kind of database, and a form without the password."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import unquote

from pydantic import PlainSerializer, SecretStr

from oncely.config.base import invalid, shown
from oncely.secrets import MASK

# A password may contain an unescaped @, / or ?: then everything up to the last @ is treated as the
# password, since hiding too much is the safer error. The part before the first @ is a secret as
# well.
_LOGIN = re.compile(r"(?P<head>[A-Za-z][\w+.-]*://[^:@/?\s]*):(?P<password>\S*)@")
_SHORT_LOGIN = re.compile(r"://[^:@/?\s]*:(?P<password>[^@\s]*)@")
_QUERY = re.compile(r"(?P<head>[?&](?:password|sslpassword)=)(?P<password>[^&\s]*)", re.IGNORECASE)
_PATTERNS = (_LOGIN, _SHORT_LOGIN, _QUERY)
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]\s]*)(?::\d*)?")


def passwords(text: str) -> list[str]:
    """Every password of a URL in ``text``, verbatim and URL-decoded."""
    found = [m["password"] for p in _PATTERNS for m in p.finditer(text)]
    return [spelling for one in found if one for spelling in (one, unquote(one))]


def without_password(url: str) -> str:
    """The URL with every password replaced by ``***``."""
    masked = _LOGIN.sub(rf"\g<head>:{MASK}@", url)
    return _QUERY.sub(rf"\g<head>{MASK}", masked)


def _for_display(url: SecretStr) -> str:
    return without_password(url.get_secret_value())


Url = Annotated[SecretStr, PlainSerializer(_for_display, when_used="json")]
"""A URL whose password is never shown; in JSON it is ``***``."""

EXAMPLE = 'url = "postgresql://user:${PASSWORD}@host:5432/database"'
"""An example of the URL of a database, as a line of the file."""


def dialect(url: str) -> Literal["postgresql", "sqlite"]:
    """The kind of database of a ``sink.url``. Raises a problem for all others."""
    scheme, separator, rest = url.partition("://")
    match scheme.lower():
        case "postgresql" | "postgres" if separator and rest:
            _check_login(rest)
            return "postgresql"
        case "sqlite" if separator:
            _check_sqlite(rest)
            return "sqlite"
    raise invalid(
        "not a URL of a database that can be written to; allowed: postgresql://, sqlite:///",
        'write "postgresql://user:${PASSWORD}@host:5432/database" or "sqlite:///file.db"',
    )


def _check_login(rest: str) -> None:
    """The login must end where libpq ends it, at the first @."""
    login, _, behind = rest.partition("?")[0].rpartition("@")
    hosts = behind.partition("/")[0].split(",")
    wrong_login = re.search(r"[@/\s]|%(?![0-9A-Fa-f]{2})", login)
    if wrong_login or not all(_HOST.fullmatch(host) for host in hosts):
        raise invalid(
            "its login, host and port are ambiguous",
            "write postgresql://user:password@host:port/database; in user and password, also when "
            "they are filled in, write @ as %40, / as %2F, ? as %3F, % as %25, a space as %20",
        )
    for host in hosts:
        port = host.rpartition("]")[2].partition(":")[2]
        if port and not 0 < int(port) < 65_536:
            raise invalid(f"{shown(port)} is no port", "ports are 1 to 65535")


def _check_sqlite(rest: str) -> None:
    if not rest.startswith("/"):
        raise invalid("a SQLite URL has no host", 'write three slashes: "sqlite:///file.db"')
    path, _, query = rest[1:].partition("?")
    if not path.strip("/") or ":memory:" in path or "mode=memory" in query:
        raise invalid(
            "a SQLite database in memory ends with its connection, and the ledger with it",
            'name a file: "sqlite:///file.db" (relative) or "sqlite:////var/data/file.db"',
        )
