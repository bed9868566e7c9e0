"""Checks of URLs and paths: no operation writes outside the root."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

from oncely.clients.files.s3_options import S3Options
from oncely.errors import ConfigError, InvariantViolation

SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")

_WAY_OUT = "write file:///folder, s3://bucket/prefix, gs://bucket/prefix, abfs://… or hdfs://…"
_FORBIDDEN = re.compile(r"[\\\x00-\x1f\x7f-\x9f]")
_LONGEST_PART = 255  # bytes, limit of file systems
_LONGEST_KEY = 1024  # bytes, limit of S3
LONGEST_PATH = 904
"""Maximum length of a path below the root, in bytes of UTF-8."""


def checked_url(url: str, s3: S3Options | None) -> str:
    """The URL without a slash at its end.

    Raises:
        ConfigError: it cannot be the root of a store.
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
            "contains a password",
            way_out="set keys in [sink.s3] or the environment: a URL is shown in logs",
        )
    if s3 is not None and parts.scheme != "s3":
        raise ConfigError("sink.s3", f"is for s3:// only, not for {parts.scheme}://")
    root = unquote(parts.path).strip("/")
    problem = _no_root(parts, root) or (root and _problem(root))
    if problem:
        raise ConfigError("sink.url", problem, way_out=_WAY_OUT)
    return url.rstrip("/")


def shown_url(url: str) -> str:
    """The URL for logs: without a query, which may contain keys."""
    return url.partition("?")[0]


def address(url: str, path: str) -> str:
    """A file below the root as other programs open it: a local path, or a URL.

    The URL's own escapes are decoded; those of the path are part of the file's name.
    """
    parts = urlsplit(url)
    full = f"{unquote(parts.path)}/{path}"
    return full if parts.scheme == "file" else f"{parts.scheme}://{parts.netloc}{full}"


def below(path: str) -> str:
    """The path, after a check that it is below the root.

    Raises:
        InvariantViolation: ``..``, an absolute path, empty parts, a backslash, control characters,
            half of a surrogate pair, or too long for any store.
    """
    problem = _problem(path)
    if problem:
        raise InvariantViolation(f"the path {path[:100]!r} {problem}")
    return path


def _no_root(parts: SplitResult, root: str) -> str:
    """The reason why these parts are not a root; empty if they are."""
    if parts.scheme in ("file", "s3") and (parts.query or parts.fragment or "@" in parts.netloc):
        return "? # and @ are not allowed in it"
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            return "a folder's path is absolute"
        return "" if root else "the root of the file system is not allowed"
    if not (parts.netloc or parts.scheme in ("hdfs", "viewfs")):
        return "it has no bucket"
    if len(root.encode()) + 1 + LONGEST_PATH > _LONGEST_KEY:
        return "its path is too long: file names are appended to it"
    return ""


def _problem(path: str) -> str:
    """The problem of the path, as the end of a sentence; empty if there is none."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "has empty parts, '.' or '..'"
    if _FORBIDDEN.search(path):
        return "contains a backslash or control characters"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if len(encoded) > LONGEST_PATH or any(len(p) > _LONGEST_PART for p in encoded.split(b"/")):
        return "is too long"
    return ""
