"""Connection settings of an S3-compatible server."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from oncely.errors import ConfigError
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
