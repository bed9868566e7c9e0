"""What the cluster allows a transaction, asked without beginning one."""

from __future__ import annotations

from typing import Any

from confluent_kafka.admin import ConfigResource, ResourceType

from oncely.errors import ConfigError
from oncely.sources.clients import Asker

_KEY = "transaction.max.timeout.ms"


def longest_transaction(asker: Asker) -> float | None:
    """The longest timeout that a broker takes, in seconds; None where it may not be asked.

    Reading a broker's configuration needs DescribeConfigs on the cluster, which a pipeline needs
    for nothing else: its first transaction tells as well.

    Raises:
        ConfigError: the broker refuses the login.
        Unavailable: no answer.
    """

    def ask(client: Any, wait: float) -> Any:
        broker = next(iter(client.list_topics(timeout=wait).brokers))
        wanted = [ConfigResource(ResourceType.BROKER, str(broker))]
        return client.describe_configs(wanted, request_timeout=wait)

    (found,) = asker.ask("look at the broker's limits", ask).values()
    if isinstance(found, Exception) or _KEY not in found:
        return None
    return int(found[_KEY].value) / 1000


def check_timeout(asker: Asker, seconds: float) -> None:
    """Refuse a timeout that the broker would refuse.

    Raises:
        ConfigError: ``sink.transaction_timeout`` is longer than the broker takes.
        Unavailable: no answer.
    """
    longest = longest_transaction(asker)
    if longest is not None and seconds > longest:
        raise ConfigError(
            "sink.transaction_timeout",
            f"it is {seconds:g} seconds, and the broker takes {longest:g} at most ({_KEY})",
            way_out=f'write "{longest:g} seconds", or raise it on the brokers',
        )
