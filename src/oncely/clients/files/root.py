"""Nothing is ever written outside the root: what a URL and a path may look like."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

from oncely.clients.files.s3_options import S3Options
from oncely.errors import ConfigError, InvariantViolation

SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")

_WAY_OUT = "write file:///folder, s3://bucket/prefix, gs://bucket/prefix, abfs://… or hdfs://…"
_FORBIDDEN = re.compile(r"[\\\x00-\x1f\x7f-\x9f]")
_LONGEST_PART = 255  # bytes, of a file system
_LONGEST_KEY = 1024  # bytes, of S3
LONGEST_PATH = 904
"""Bytes below the root, in UTF-8."""


def checked_url(url: str, s3: S3Options | None) -> str:
    """The URL without a slash at its end.

    Raises:
        ConfigError: it can't be the root of a store.
    """
    try:
        parts = urlsplit(url)
        secret = parts.password
    except ValueError:
        raise ConfigError("sink.url", "not a URL", way_out=_WAY_OUT) from None
    if parts.scheme not in SCHEMES:
        raise ConfigError("sink.url", f"unknown scheme {parts.scheme!r}", way_out=_WAY_OUT)
    if secret is not None:
        raise ConfigError(
            "sink.url",
            "holds a password",
            way_out="keys belong into [sink.s3] or the environment: a URL is shown in logs",
        )
    if s3 is not None and parts.scheme != "s3":
        raise ConfigError("sink.s3", f"is for s3:// only, not for {parts.scheme}://")
    root = unquote(parts.path).strip("/")
    problem = _no_root(parts, root) or (root and _problem(root))
    if problem:
        raise ConfigError("sink.url", problem, way_out=_WAY_OUT)
    return url.rstrip("/")


def shown_url(url: str) -> str:
    """For logs: without a query, which may hold keys."""
    return url.partition("?")[0]


def below(path: str) -> str:
    """The path, if it leads below the root and nowhere else.

    Raises:
        InvariantViolation: ``..``, an absolute path, empty parts, a backslash, control
            characters, half of a surrogate pair, or too long for any store.
    """
    problem = _problem(path)
    if problem:
        raise InvariantViolation(f"the path {path[:100]!r} {problem}")
    return path


def _no_root(parts: SplitResult, root: str) -> str:
    """Why these parts name no root; nothing if they do."""
    if parts.scheme in ("file", "s3") and (parts.query or parts.fragment or "@" in parts.netloc):
        return "? # and @ have no place in it"
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            return "a folder's path is absolute"
        return "" if root else "the root of the file system is no folder for this"
    if not (parts.netloc or parts.scheme in ("hdfs", "viewfs")):
        return "it names no bucket"
    if len(root.encode()) + 1 + LONGEST_PATH > _LONGEST_KEY:
        return "its path is too long: the names of files need the room"
    return ""


def _problem(path: str) -> str:
    """What is wrong with it, as the end of a sentence; nothing if it is good."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "has empty parts, '.' or '..'"
    if _FORBIDDEN.search(path):
        return "holds a backslash or control characters"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is no text in Unicode"
    if len(encoded) > LONGEST_PATH or any(len(p) > _LONGEST_PART for p in encoded.split(b"/")):
        return "is too long"
    return ""
