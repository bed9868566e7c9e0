"""The dialect of a URL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from oncely.errors import ConfigError
from oncely.extras import require
from oncely.stores.sql.connection import Dialect

_WAYS = "postgresql://user:password@host:port/database, or sqlite:////absolute/path.db"


def dialect_for(url: str, connect_timeout: float = 10.0) -> Dialect:
    """The dialect of ``url``, without opening a session.

    Args:
        url: ``postgresql://…`` in libpq's syntax; or ``sqlite:///`` and a verbatim path, so
            ``sqlite:////data/x.db`` is absolute and ``sqlite:///x.db`` is relative to the working
            directory of the process (SQLAlchemy's convention).
        connect_timeout: seconds; for SQLite, the time that a writer waits for another. libpq uses
            whole seconds, at least two.

    Raises:
        ConfigError: another scheme, not a URL of its scheme, or no driver is installed.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() in ("postgresql", "postgres"):
        return _postgres(f"{scheme.lower()}://{rest}", max(2, math.ceil(connect_timeout)))
    if separator and scheme.lower() == "sqlite":
        return _sqlite(rest, connect_timeout)
    shown = f"{scheme}://…" if separator else "it"
    raise ConfigError("sink.url", f"{shown} is not a supported database", way_out=_WAYS)


def _postgres(url: str, connect_timeout: int) -> Dialect:
    require("sql", "sink.url", "PostgreSQL")
    import psycopg

    from oncely.stores.sql.postgres import PostgresDialect

    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
        misread = _misread(parts)
    except psycopg.ProgrammingError:  # its text may quote the password
        misread = True
    if misread:
        raise ConfigError(
            "sink.url",
            "is not a valid URL of libpq",
            way_out=f"percent-encode special characters in user and password; {_WAYS}",
        )
    return PostgresDialect(url, connect_timeout)


def _misread(parts: Mapping[str, object]) -> bool:
    """True if a password with a plain ``@`` or ``/`` is parsed as another part of the URL.

    libpq's message would be "could not translate host name" with the rest of the password.
    """
    ports = str(parts.get("port", "")).replace(",", "")
    elsewhere = "@" in f"{parts.get('host', '')}{parts.get('dbname', '')}"
    return elsewhere or not (ports == "" or ports.isdecimal())


def _sqlite(rest: str, connect_timeout: float) -> Dialect:
    from oncely.stores.sql.sqlite import Sqlite

    path = rest.removeprefix("/").partition("?")[0]
    if not rest.startswith("/") or not path.strip("/") or path.startswith(":"):
        raise ConfigError(
            "sink.url",
            "SQLite needs a file: a database in memory ends with its session",
            way_out="sqlite:////absolute/path.db",
        )
    return Sqlite(str(Path(path).absolute()), connect_timeout)
