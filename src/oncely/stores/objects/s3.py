"""Settings of an S3-compatible server, and the check that it has conditional writes.

The check is made by obstore: the client of object stores by which delta-rs writes a table's log,
too.
"""

from __future__ import annotations

import configparser
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from oncely.errors import ConfigError, OncelyError, Unavailable
from oncely.secrets import Secrets


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
