"""The encoding of a position in stores of texts: readable JSON."""

from __future__ import annotations

import msgspec

from oncely.core.ranges import TopicPartition
from oncely.errors import Stopped
from oncely.ledgers.stores.base import Stored


def encode(stored: Stored) -> bytes:
    """``{"position":17,"epoch":3,"cluster_id":"…","topic_id":"…"}``."""
    return msgspec.json.encode(stored)


def decode(text: bytes, where: str, of: object) -> Stored:
    """Parse the text of :func:`encode`.

    Args:
        text: the value.
        where: the store, for the message.
        of: the key of the value, for the message.

    Raises:
        Stopped: it has another form.
    """
    try:
        return checked(msgspec.json.decode(text, type=Stored), where, of)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise foreign(where, of, str(error)) from None


def checked(stored: Stored, where: str, of: object) -> Stored:
    """The value, if position and epoch are valid.

    Raises:
        Stopped: they are not.
    """
    if stored.position < 0 or stored.epoch < 0:
        raise foreign(where, of, "a negative number")
    return stored


def foreign(where: str, of: object, problem: str) -> Stopped:
    """The error for foreign content in a store."""
    return Stopped(
        f"{where}: the value of {of} was not written by an offset store of Oncely: {problem}",
        way_out="check which other program writes there; give the pipeline a place of its own in "
        "[offsets],"
        " or remove what is there, and say where to begin by `oncely offsets reset`",
    )


def field(tp: TopicPartition) -> str:
    """``topic/partition``; a topic's name contains no slash."""
    return f"{tp.topic}/{tp.partition}"


def read_field(text: str, where: str) -> TopicPartition:
    """Parse the text of :func:`field`.

    Raises:
        Stopped: it has another form.
    """
    topic, _, number = text.rpartition("/")
    if not topic or "/" in topic or not (number.isascii() and number.isdecimal()):
        raise foreign(where, repr(text), "it does not name a topic and a partition")
    return TopicPartition(topic, int(number))
