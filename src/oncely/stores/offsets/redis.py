"""Positions in Redis: one hash for each pipeline, one field for each topic-partition.

The durability of a save depends on the server's configuration: with ``appendonly yes`` and
``appendfsync always`` it is on disk when the call returns; with ``everysec`` (the default of an
append-only server) a crash of the machine loses the last second; without ``appendonly`` even a
restart loses everything since the last snapshot. A replica that takes over may lack the newest
saves as well. After a lost save records are read twice, for any ``delivery``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, OncelyError, Unavailable
from oncely.extras import require
from oncely.per_process import PerProcess
from oncely.secrets import Secrets
from oncely.stores.offsets.base import (
    OffsetStore,
    StoredPosition,
    decode,
    encode,
    field_of,
    foreign,
    read_field,
)

if TYPE_CHECKING:
    import redis

T = TypeVar("T")

_WAY = "redis://user:password@host:6379/0, or rediss:// for TLS"
_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM")


class RedisStore(OffsetStore):
    """Keeps positions in the hash ``oncely:offsets:<pipeline>``.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, in the syntax of the package ``redis``.
        pipeline: the name of the pipeline.
        timeout: seconds to wait for a response.
    """

    def __init__(self, url: str, pipeline: str, timeout: float = 10.0) -> None:
        self._url, self.pipeline, self.timeout = url, pipeline, timeout
        self._client: PerProcess[redis.Redis] = PerProcess(partial(_connect, url, timeout), _end)

    def __repr__(self) -> str:
        return f"RedisStore({self.where!r}, {self.pipeline!r})"

    @property
    def key(self) -> str:
        """The hash's key."""
        return f"oncely:offsets:{self.pipeline}"

    @property
    def where(self) -> str:
        """Server and key."""
        parts = urlsplit(self._url)
        place = parts.netloc.rpartition("@")[2] + parts.path
        return self._secrets.redact(f"Redis {place}, key {self.key}")

    @property
    def _secrets(self) -> Secrets:
        return Secrets.of(_passwords(self._url))

    def load(self) -> dict[TopicPartition, StoredPosition]:
        """See :meth:`OffsetStore.load`."""
        found = self._ask("read", lambda client: client.hgetall(self.key))
        return {
            read_field(name.decode(errors="replace"), self.where): decode(
                value, self.where, name.decode(errors="replace")
            )
            for name, value in found.items()
        }

    def save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        """See :meth:`OffsetStore.save`. One HSET: all of them, or none."""
        fields: Any = {field_of(tp): encode(stored) for tp, stored in positions.items()}
        if fields:
            self._ask("write", lambda client: client.hset(self.key, mapping=fields))

    def warning(self) -> str:
        """Warns if the server reports that it has no append-only file; CONFIG may be denied."""
        try:
            found = self._ask("read its configuration", lambda c: c.config_get("appendonly"))
        except ConfigError:
            return ""
        if found.get("appendonly") != "no":
            return ""
        return (
            f"{self.where}: the server runs with appendonly no, so a restart may take positions"
            " back and records are read again"
        )

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def _ask(self, doing: str, request: Callable[[redis.Redis], Any]) -> Any:
        require("redis", "offsets.store", "redis")
        from redis.exceptions import RedisError

        try:
            with self._client.use() as client:
                return request(client)
        except RedisError as error:
            raise self._sorted(error, doing) from None

    def _sorted(self, error: Exception, doing: str) -> OncelyError:
        from redis import exceptions as of

        text = f"can't {doing} {self.where}: {self._secrets.redact(str(error))}"
        denied = (of.AuthenticationError, of.NoPermissionError, of.AuthorizationError)
        if isinstance(error, denied) or str(error).startswith(_DENIED):
            way_out = "check user and password, and that the user may HGETALL and HSET the key"
            return ConfigError("offsets.url", text, way_out=way_out)
        if isinstance(error, of.ConnectionError | of.TimeoutError | of.ReadOnlyError):
            return Unavailable(text, way_out="is the server running, and is offsets.url right?")
        if str(error).startswith("WRONGTYPE"):
            return foreign(self.where, "the key", "it is no hash")
        if isinstance(error, of.MovedError):
            text = f"{self.where} is a node of a Redis Cluster"
            way_out = "name a server that holds all keys: clusters are not supported"
            return ConfigError("offsets.url", text, way_out=way_out)
        if "DB index" in str(error):
            return ConfigError("offsets.url", text, way_out=_WAY)
        return Unavailable(text)  # out of memory, a failed snapshot: must be fixed on the server


def _connect(url: str, timeout: float) -> redis.Redis:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # Once, for a connection that the server has closed because it was idle.
            retry=Retry(NoBackoff(), 1),
        )
    except (ValueError, TypeError):  # their texts may quote the URL
        raise ConfigError("offsets.url", "is not a URL of Redis", way_out=_WAY) from None


def _end(client: redis.Redis) -> None:
    client.close()


def _passwords(url: str) -> list[str]:
    parts = urlsplit(url)
    found = [parts.password or "", *parse_qs(parts.query).get("password", [])]
    return [spelling for one in found if one for spelling in (one, unquote(one))]
