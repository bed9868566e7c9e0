"""Roots of files: their URLs and paths, checked, and errors of disks and object stores by
consequence.

Of an S3-compatible server there are the settings, and the check that it has conditional writes. The
check is made by obstore: the client of object stores by which delta-rs writes a table's log,
too.
"""

from __future__ import annotations

import configparser
import errno
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from oncely.errors import ConfigError, InvariantViolation, OncelyError, Stopped, Unavailable
from oncely.secrets import Secrets

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


# -- S3 -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class S3Options:
    """``[sink.s3]``. Without keys the AWS client uses those of environment, profile or role.

    Attributes:
        endpoint: ``http(s)://host[:port]`` of the server; None for Amazon S3.
        region: None: the server's default; at Amazon, the bucket's region.
        access_key, secret_key, session_token: credentials; both keys or none.
        connect_timeout: seconds for a connection.
        request_timeout: seconds without a byte after which a request fails.
        retries: the number of retries after a transient error.

    Raises:
        ConfigError: an invalid endpoint, or one key without the other.
    """

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    connect_timeout: float = 5.0
    request_timeout: float = 30.0
    retries: int = 5

    def __post_init__(self) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            raise ConfigError(
                "sink.s3.access_key",
                "access_key and secret_key belong together",
                way_out="give both, or neither for the credentials of the environment",
            )
        if self.session_token is not None and self.access_key is None:
            raise ConfigError("sink.s3.session_token", "a token without the keys it belongs to")
        if self.endpoint is None:
            return
        wrong = "write http(s)://host[:port], without a path and without credentials"
        try:
            parts = urlsplit(self.endpoint)
            good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            raise ConfigError("sink.s3.endpoint", "no address", way_out=wrong) from None
        bare = not (parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)
        if not (good and bare):
            raise ConfigError("sink.s3.endpoint", "not the address of a server", way_out=wrong)

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return urlsplit(self.endpoint).scheme if self.endpoint else "https"

    @property
    def address(self) -> str | None:
        """``host[:port]``; None for Amazon S3."""
        return urlsplit(self.endpoint).netloc if self.endpoint else None

    @property
    def secrets(self) -> Secrets:
        """The keys as secrets, for the error texts of the client."""
        return Secrets.of([self.secret_key, self.session_token])


_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


def require_conditional_writes(url: str, options: S3Options | None) -> None:
    """Refuse a server that lets two writers create the same object: it cannot contain a log.

    Amazon S3 is not checked: it supports ``If-None-Match`` since 2024.

    Raises:
        ConfigError: the server does not refuse the second writer.
        Unavailable: no answer.
    """
    if options is None or options.endpoint is None:
        return
    import obstore
    from obstore.exceptions import BaseError

    path, refused = f".oncely-probe-{uuid.uuid4().hex}", False
    try:
        bucket = _bucket(url, options)
        _create(bucket, path)  # False, too, where the answer was lost and the client wrote again
        refused = not _create(bucket, path)
        obstore.delete(bucket, path)
    except (BaseError, OSError) as error:
        if "501 Not Implemented" not in str(error):
            raise _classified(error, options) from None
    if not refused:
        raise ConfigError(
            "sink.s3.endpoint",
            "the server has no conditional writes (If-None-Match): two writers could both commit"
            " the same version of the table",
            way_out="use a server that has them, or a file system",
        )


def _create(bucket: Any, path: str) -> bool:
    """Create an empty object; False if it exists."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    try:
        obstore.put(bucket, path, b"", mode="create")
    except (AlreadyExistsError, PreconditionError):
        return False
    return True


def _bucket(url: str, options: S3Options) -> Any:
    from obstore.store import from_url

    return from_url(
        url,
        endpoint=options.endpoint,
        region=options.region or "us-east-1",
        virtual_hosted_style_request=False,  # overrides the environment
        client_options={
            "allow_http": options.scheme == "http",
            "connect_timeout": timedelta(seconds=options.connect_timeout),
            "timeout": timedelta(seconds=options.request_timeout),
        },
        retry_config={"max_retries": options.retries},
        credential_provider=_credentials(options),
    )


def _credentials(options: S3Options) -> Callable[[], dict[str, Any]] | None:
    """The keys of ``[sink.s3]``, or of the profile, which obstore does not read; None: obstore
    looks for those of the environment or of the machine's role."""
    keys = [options.access_key, options.secret_key, options.session_token]
    if keys[0] is None and "AWS_ACCESS_KEY_ID" not in os.environ:
        file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
        profiles = configparser.RawConfigParser()
        profiles.read(Path(file).expanduser())
        profile = os.environ.get("AWS_PROFILE") or "default"
        keys = [profiles.get(profile, one, fallback=None) for one in _KEYS]
    if not keys[0] or not keys[1]:
        return None
    known = {"access_key_id": keys[0], "secret_access_key": keys[1], "token": keys[2]}
    return lambda: {**known, "expires_at": None}


def _classified(error: Exception, options: S3Options) -> OncelyError:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = " ".join(str(error).partition("\n\n")[0].split())[:500]
    text = f"conditional writes: {options.secrets.redact(text)}"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | FileNotFoundError):
        way_out = "check the keys; they need s3:PutObject and s3:DeleteObject"
        return ConfigError("sink.s3.access_key", text, way_out=way_out)
    return Unavailable(text)
