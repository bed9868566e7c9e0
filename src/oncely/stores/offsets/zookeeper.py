"""Positions in ZooKeeper: a node for each topic-partition,
``<path>/<pipeline>/<topic>/<partition>``.

ZooKeeper responds to a write when a majority of its servers has it on disk. It is designed for few
and small writes: save once per batch, not once per record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, OncelyError, Unavailable
from oncely.extras import require
from oncely.per_process import PerProcess
from oncely.stores.offsets.base import (
    OffsetStore,
    StoredPosition,
    decode,
    encode,
    field_of,
    foreign,
)

if TYPE_CHECKING:
    from kazoo.client import KazooClient

_logger = logging.getLogger(__name__)


def _quietly(record: logging.LogRecord) -> bool:
    """Log at DEBUG: relevant errors are also returned by a call."""
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return _logger.isEnabledFor(logging.DEBUG)


_logger.addFilter(_quietly)
_AT_ONCE = 1_000  # nodes in a transaction: a request has at most a megabyte (jute.maxbuffer)
_TRIES = 5


class ZooKeeperStore(OffsetStore):
    """Keeps positions in nodes below ``path``.

    Args:
        hosts: ``host:port``, separated by commas.
        pipeline: the name of the pipeline.
        path: the parent node of all pipelines' nodes; created if it is missing.
        timeout: seconds to wait for a response.
    """

    def __init__(
        self, hosts: str, pipeline: str, path: str = "/oncely", timeout: float = 10.0
    ) -> None:
        self.hosts, self.pipeline, self.timeout = hosts, pipeline, timeout
        self.root = f"{path.rstrip('/')}/{_node(pipeline)}"
        self._client: PerProcess[KazooClient] = PerProcess(partial(_connect, hosts, timeout), _end)

    def __repr__(self) -> str:
        return f"ZooKeeperStore({self.hosts!r}, {self.pipeline!r})"

    @property
    def where(self) -> str:
        """Servers and path."""
        return f"ZooKeeper {self.hosts}, path {self.root}"

    def load(self) -> dict[TopicPartition, StoredPosition]:
        """See :meth:`OffsetStore.load`."""
        found: dict[TopicPartition, StoredPosition] = self._ask("read", self._read)
        return found

    def save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        """See :meth:`OffsetStore.save`. All in one transaction, up to 1000 of them."""
        texts = {self._path(tp): encode(stored) for tp, stored in sorted(positions.items())}
        paths = list(texts)
        for at in range(0, len(paths), _AT_ONCE):
            part = {path: texts[path] for path in paths[at : at + _AT_ONCE]}
            self._ask("write", partial(self._write, part))

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _path(self, tp: TopicPartition) -> str:
        return f"{self.root}/{field_of(tp)}"

    def _read(self, asking: _Asking) -> dict[TopicPartition, StoredPosition]:
        # A server may be behind the others; sync brings it up to date with earlier writes.
        asking.all(asking.client.sync_async, [self.root])
        [topics] = asking.all(asking.client.get_children_async, [self.root])
        topics = topics or []
        below = asking.all(
            asking.client.get_children_async, [f"{self.root}/{topic}" for topic in topics]
        )
        known = [
            self._named(topic, number)
            for topic, numbers in zip(topics, below, strict=True)
            for number in numbers or ()
        ]
        values = asking.all(asking.client.get_async, [self._path(tp) for tp in known])
        return {
            tp: decode(value[0], self.where, field_of(tp))
            for tp, value in zip(known, values, strict=True)
            if value is not None
        }

    def _named(self, topic: str, number: str) -> TopicPartition:
        if not (number.isascii() and number.isdecimal()):
            raise foreign(self.where, f"{topic}/{number}", "the node does not name a partition")
        return TopicPartition(topic, int(number))

    def _write(self, texts: Mapping[str, bytes], asking: _Asking) -> None:
        """Set existing nodes and create missing ones; repeated if another writer interferes."""
        from kazoo.exceptions import NodeExistsError, NoNodeError

        topics = sorted({path.rpartition("/")[0] for path in texts})
        bad: Exception | None = None
        for _ in range(_TRIES):
            there = asking.all(asking.client.exists_async, list(texts))
            if not all(there):
                asking.all(asking.client.ensure_path_async, topics)
            transaction = asking.client.transaction()
            for (path, text), known in zip(texts.items(), there, strict=True):
                put = transaction.set_data if known else transaction.create
                put(path, text)
            bad = _reason(asking.one(transaction.commit_async()))
            if not isinstance(bad, NodeExistsError | NoNodeError):
                break
        if bad is not None:
            raise bad

    def _ask(self, doing: str, request: Callable[[_Asking], Any]) -> Any:
        require("zookeeper", "offsets.store", "zookeeper")
        from kazoo.exceptions import KazooException
        from kazoo.handlers.threading import KazooTimeoutError

        try:
            with self._client.use() as client:
                return request(_Asking(client, self.timeout))
        except (KazooException, KazooTimeoutError) as error:
            raise self._sorted(error, doing) from None

    def _sorted(self, error: Exception, doing: str) -> OncelyError:
        from kazoo import exceptions as of

        text = f"can't {doing} {self.where}: {str(error) or type(error).__name__}"
        if isinstance(
            error, of.NoAuthError | of.AuthFailedError | of.SessionClosedRequireSaslError
        ):
            way_out = "grant read, create and write below offsets.path, or name another path"
            return ConfigError("offsets.path", text + ": the servers deny it", way_out=way_out)
        return Unavailable(text, way_out="are the servers running, and is offsets.hosts right?")


class _Asking:
    """The requests of one call, with a common deadline."""

    def __init__(self, client: KazooClient, timeout: float) -> None:
        self.client = client
        self._deadline = time.monotonic() + timeout

    def one(self, answer: Any) -> Any:
        """Wait for a result; a client without a connection would wait forever."""
        return answer.get(timeout=max(0.0, self._deadline - time.monotonic()))

    def all(self, request: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        """Request all paths at once; None for a node that does not exist."""
        from kazoo.exceptions import NoNodeError

        found: list[Any] = []
        for answer in [request(path) for path in paths]:
            try:
                found.append(self.one(answer))
            except NoNodeError:
                found.append(None)
        return found


def _connect(hosts: str, timeout: float) -> KazooClient:
    from kazoo.client import KazooClient

    try:
        client = KazooClient(hosts, timeout=timeout, logger=_logger)
    except ValueError:
        raise ConfigError(
            "offsets.hosts", f"found {hosts!r}", way_out='write "zk-1:2181,zk-2:2181"'
        ) from None
    client.start(timeout)
    return client


def _end(client: KazooClient) -> None:
    client.stop()
    client.close()


def _node(name: str) -> str:
    """An encoded name that is valid for a node: no slash, and neither "." nor ".."."""
    safe = quote(name, safe="")
    return safe.replace(".", "%2E") if safe in (".", "..") else safe


def _reason(answers: Sequence[object]) -> Exception | None:
    """The reason of a failed transaction: every operation has a result, one of them the reason."""
    from kazoo.exceptions import RolledBackError, RuntimeInconsistency

    bad = [one for one in answers if isinstance(one, Exception)]
    certain = [e for e in bad if not isinstance(e, RolledBackError | RuntimeInconsistency)]
    return next(iter(certain or bad), None)
