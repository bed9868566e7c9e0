"""Checks of URLs and paths below a root, and errors of disks and object stores by consequence."""

from __future__ import annotations

import errno
import re
from urllib.parse import SplitResult, unquote, urlsplit

from oncely.errors import ConfigError, InvariantViolation, OncelyError, Stopped, Unavailable
from oncely.stores.objects.s3 import S3Options

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


class NoSuchFile(Stopped):
    """A file that should be in the store is missing: it was removed by another program."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)

# pyarrow: "When …: AWS Error ACCESS_DENIED during PutObject operation: …"
_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during (\w+) operation")
_AWS_FULL = re.compile(r"StorageFull|QuotaExceeded|HTTP status 507|No space left|disk quota", re.I)
_AWS_LOGIN = re.compile(
    r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT"
    r"|MISSING_AUTHENTICATION_TOKEN|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken"
    r"|InvalidToken|REQUEST_EXPIRED|XAdminUserNotFound"
)
_READING = ("GetObject", "HeadObject", "DeleteObject")
_MISSING = ("NO_SUCH_KEY", "RESOURCE_NOT_FOUND")
_UNREACHED = ("NETWORK_CONNECTION", "curlCode")


def classify_store_error(error: Exception, doing: str, url: str) -> OncelyError:
    """The error of an operation on a store, as an Oncely error."""
    where = shown_url(url)
    text = f"{where}: {doing}: {_first_line(error)}"
    if not isinstance(error, OSError):  # an error of pyarrow: a wrong argument, out of memory
        return InvariantViolation(f"{text} ({type(error).__name__})")
    if error.errno in _FULL or _AWS_FULL.search(str(error)):
        return Stopped(
            f"{where} is full: {doing}: {_first_line(error)}",
            way_out="free disk space and start again: nothing of the batch was published",
        )
    aws = _AWS.search(str(error))
    if aws is not None:
        return _aws_error(error, aws, text)
    if isinstance(error, FileNotFoundError):
        return NoSuchFile(text, way_out="vacuum never removes files of the manifest")
    if isinstance(error, FileExistsError):
        return InvariantViolation(text)
    if error.errno in _DENIED:
        return ConfigError("sink.url", text, way_out="grant this user read and write permission")
    if error.errno in _NO_FOLDER:
        return ConfigError("sink.url", text, way_out="name a folder")
    return Unavailable(text)


def unreachable(error: Unavailable, s3: S3Options | None) -> OncelyError:
    """No answer to the first request: more likely a wrong address than a temporary failure."""
    if not any(word in error.message for word in _UNREACHED):
        return error
    key = "sink.s3.endpoint" if s3 is not None and s3.endpoint else "sink.url"
    return ConfigError(
        key,
        f"no answer: {error.message}",
        way_out="check that the server is running, and the address",
    )


def _aws_error(error: OSError, aws: re.Match[str], text: str) -> OncelyError:
    kind, status = aws[1], aws[2]
    if _AWS_LOGIN.search(str(error)):
        return ConfigError(
            "sink.s3.access_key",
            f"the credentials are refused: {text}",
            way_out="check access_key, secret_key and session_token, and this machine's clock",
        )
    if kind == "NO_SUCH_BUCKET":
        return ConfigError("sink.url", f"no such bucket: {text}", way_out="create the bucket first")
    if aws[3] in _READING and (kind in _MISSING or status == "404"):
        return NoSuchFile(text, way_out="vacuum never removes files of the manifest")
    if kind == "ACCESS_DENIED" or status in ("401", "403"):
        return ConfigError(
            "sink.url",
            f"permission is denied: {text}",
            way_out="grant this user to list the bucket, and to read, write and delete objects",
        )
    if status in ("301", "307", "400", "404"):
        return ConfigError("sink.s3", text, way_out="check region and endpoint")
    return Unavailable(text)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
