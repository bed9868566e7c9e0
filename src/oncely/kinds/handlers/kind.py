"""Handlers as a kind of destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncely.errors import ConfigError, Unavailable
from oncely.extras import require
from oncely.kinds.handlers.settings import HandlersSinkSettings
from oncely.kinds.kind import RESTORED, Kind, Parts, Texts

if TYPE_CHECKING:
    from oncely.kinds.destination import Destination


def _destination(parts: Parts) -> Destination:
    from oncely.kinds.handlers.destination import HandlersDestination

    return HandlersDestination(parts)


def _unchecked(parts: Parts, beside: bool) -> str:
    if parts.handlers is not None and not beside:
        return ""
    return (
        "not checked: a handler with several threads, and what it uses besides its transaction,"
        " must be safe for threads; so must what it shares with drop and transform.python, which"
        " another thread calls meanwhile, for later records"
    )


KIND = Kind(
    name="handlers",
    rank=5,
    settings=HandlersSinkSettings,
    destination=_destination,
    require=lambda _: require("sql", "sink.url", "PostgreSQL"),
    dead_letters=lambda _: "oncely_rejects",
    unchecked=_unchecked,
    texts=Texts(
        by_task="what a handler does with its transaction, rejects and the new position of a"
        " topic-partition are one transaction of the database; a partition's records come in order",
        by_driver="",
        ends=(
            "it covers what handlers do with the transaction that they get; what they do elsewhere"
            " (calls, files, other connections) may happen several times",
            RESTORED,
        ),
    ),
    silent_after=(Unavailable, ConfigError),
    spans=False,
    calls_handlers=True,
)
