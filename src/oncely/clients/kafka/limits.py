"""Limits of cluster and process for transactions, queried without beginning one."""

from __future__ import annotations

import os
import resource
from typing import Any

from confluent_kafka.admin import ConfigResource, ResourceType

from oncely.clients.kafka.client import KafkaAdmin
from oncely.errors import ConfigError

TOGETHER = 8
"""Producer instances that a process has open at the same time."""

_KEY = "transaction.max.timeout.ms"
_FILES = 8  # open files of a producer on a cluster of one broker: sockets and pipes
_FILES_PER_BROKER = 3
_OTHER_FILES = 32  # the consumer, the admin client, files that tasks stage


def longest_transaction(admin: KafkaAdmin) -> float | None:
    """The longest timeout that a broker allows, in seconds; None if the query is not permitted.

    Reading a broker's configuration needs DescribeConfigs on the cluster, which a pipeline needs
    for no other purpose: its first transaction reports the limit as well.

    Raises:
        ConfigError: the broker refuses the login.
        Unavailable: no answer.
    """

    def ask(client: Any, wait: float) -> Any:
        # The metadata of all topics would contain the brokers, too, and megabytes.
        broker = client.describe_cluster(request_timeout=wait).result(wait).nodes[0]
        wanted = [ConfigResource(ResourceType.BROKER, str(broker.id))]
        return client.describe_configs(wanted, request_timeout=wait)

    (found,) = admin.ask("read the broker's configuration", ask).values()
    if isinstance(found, Exception) or _KEY not in found:
        return None
    return int(found[_KEY].value) / 1000


def check_timeout(admin: KafkaAdmin, seconds: float) -> None:
    """Refuse a timeout that the broker would refuse.

    Raises:
        ConfigError: ``sink.transaction_timeout`` is longer than the broker allows.
        Unavailable: no answer.
    """
    longest = longest_transaction(admin)
    if longest is not None and seconds > longest:
        raise ConfigError(
            "sink.transaction_timeout",
            f"it is {seconds:g} seconds, and the broker allows {longest:g} at most ({_KEY})",
            way_out=f'write "{longest:g} seconds", or raise it on the brokers',
        )


def check_open_files(admin: KafkaAdmin, producers: int = TOGETHER) -> None:
    """Refuse a limit of open files that so many producers would reach.

    librdkafka reports no error if it cannot open a socket: it retries until the caller's timeout.

    Raises:
        ConfigError: ``ulimit -n`` of this process is too low.
        Unavailable: no answer.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    answer = admin.one(
        "describe the cluster",
        lambda client, wait: {"cluster": client.describe_cluster(request_timeout=wait)},
    )
    each = _FILES + _FILES_PER_BROKER * (len(answer["cluster"].nodes) - 1)
    here = len(os.listdir("/dev/fd"))
    needed = here + producers * each + _OTHER_FILES
    if needed > limit:
        raise ConfigError(
            "ulimit -n",
            f"this process may open {limit} files and needs {needed}: {here} are open, and"
            f" {producers} producers with {each} each write at the same time",
            way_out=f"ulimit -n {max(1024, needed)}; under systemd LimitNOFILE=, in a container"
            " --ulimit nofile=",
        )
