"""``[filter]``: records that are dropped before they are decoded, and records that wait."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, InstanceOf, PlainSerializer

from oncely.config.base import RATE, TIME, Section, filled, invalid, parse_seconds, shown, written

_RATE = re.compile(r"([\d_,]+) (?:in|per) (.+)")


@dataclass(frozen=True)
class Rate:
    """So many records of a partition in so much time."""

    records: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.records} in {self.seconds:g} seconds"


@written(RATE)
def _rate(value: object) -> object:
    if isinstance(value, Rate):
        return value
    match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    number = re.sub("[_,]", "", match[1]) if match else ""
    if match is None or not number.isdecimal() or int(number) < 1:
        raise invalid(
            f"found {shown(value)}; allowed: a number of records in a time",
            'write "1000 in 1 second"',
        )
    return Rate(int(number), _time(match[2]))


@written(TIME, "above 0")
def _time(value: object) -> float:
    seconds = parse_seconds(value)
    if seconds <= 0:
        raise invalid(f"found {shown(value)}; allowed: a time above 0", 'write "10 minutes"')
    return seconds


_condition = filled('write drop = "kafka_offset < 1000", or remove it')
Time = Annotated[float, BeforeValidator(_time)]


class FilterSettings(Section):
    """``[filter]``: what happens to a record before it is decoded.

    Attributes:
        drop: a condition in SQL over ``kafka_topic``, ``kafka_partition``, ``kafka_offset``,
            ``kafka_timestamp``, ``key`` and ``value`` (bytes): such records are dropped.
        expire: records that are older than this are dropped.
        delay: records wait until they are so old; with ``oncely work``.
        throttle: the records that are read of each partition in a time; with ``oncely work``.
    """

    drop: Annotated[str, AfterValidator(_condition)] | None = None
    expire: Time | None = None
    delay: Time | None = None
    throttle: (
        Annotated[InstanceOf[Rate], BeforeValidator(_rate), PlainSerializer(str, when_used="json")]
        | None
    ) = None

    @property
    def drops(self) -> bool:
        """True if records may be dropped."""
        return self.drop is not None or self.expire is not None

    @property
    def waits(self) -> str | None:
        """The key of a filter that waits, if there is one."""
        return "delay" if self.delay is not None else "throttle" if self.throttle else None
