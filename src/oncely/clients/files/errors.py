"""Errors of disks and object stores, classified by consequence."""

from __future__ import annotations

import errno
import re

from oncely.clients.files.root import shown_url
from oncely.clients.files.s3_options import S3Options
from oncely.errors import ConfigError, InvariantViolation, OncelyError, Stopped, Unavailable


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
