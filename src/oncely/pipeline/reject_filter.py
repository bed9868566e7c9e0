"""Dead letters chosen by reason, partition and time."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from oncely.config.base import parse_seconds
from oncely.core.batch import Reject
from oncely.errors import WrongInput
from oncely.sources.start import parse_moment

_PARTITIONS = r"[\w.-]+(:\s*\d+\s*(,\s*\d+\s*)*)?"


@dataclass(frozen=True)
class RejectFilter:
    """Dead letters that have all of these properties.

    Attributes:
        reason: a part of the reason; capitals do not matter.
        partitions: ``topic`` or ``topic:0,1``; empty: all.
        since, before: the least timestamp of the record, and the end of the timestamps, in ms since
            1970. A record without a timestamp is never chosen by them.
    """

    reason: str = ""
    partitions: tuple[str, ...] = ()
    since: int | None = None
    before: int | None = None

    def __call__(self, one: Reject) -> bool:
        """True if the dead letter has the properties."""
        topic, number = one.partition
        named = [
            text.rpartition(":") if ":" in text else (text, "", "") for text in self.partitions
        ]
        inside = [
            not numbers or str(number) in map(str.strip, numbers.split(","))
            for name, _, numbers in named
            if name == topic
        ]
        at = one.timestamp_ms
        return (
            self.reason.lower() in one.reason.lower()
            and (any(inside) or not self.partitions)
            and (self.since is None or (at is not None and at >= self.since))
            and (self.before is None or (at is not None and at < self.before))
        )


def filter_of(
    reason: str | None,
    partition: Sequence[str] | None,
    since: str | None,
    before: str | None = None,
    *,
    dashes: str = "--",
) -> RejectFilter:
    """The filter of options, or of the fields of a form.

    Args:
        reason, partition: see :class:`RejectFilter`.
        since, before: ISO 8601, or an age before now; None: any time.
        dashes: precede the names of options in errors.

    Raises:
        WrongInput: ``since`` or ``before`` is no time, or ``partition`` has another form.
    """
    for text in partition or ():
        if not re.fullmatch(_PARTITIONS, text, re.ASCII):
            raise WrongInput(
                f"{dashes}partition: {text!r} names no partitions",
                way_out="write TOPIC or TOPIC:0,1",
            )
    times = _moment(f"{dashes}since", since), _moment(f"{dashes}before", before)
    return RejectFilter(reason or "", tuple(partition or ()), *times)


def _moment(option: str, text: str | None) -> int | None:
    """A time, or an age before now, in ms since 1970."""
    if text is None:
        return None
    with suppress(ValueError):
        return parse_moment(text).timestamp_ms
    with suppress(ValueError):
        return int((time.time() - _age(text)) * 1000)
    raise WrongInput(
        f"{option}: {text!r} is no time",
        way_out='write ISO 8601, 2026-01-31T12:00:00Z, or an age: 90d, "12 hours"',
    )


def _age(text: str) -> float:
    """Seconds; in addition to the times of a pipeline file, days."""
    days = re.fullmatch(r"(\d{1,6})\s*(?:d|days?)", text.strip().lower())
    return int(days[1]) * 86_400.0 if days else parse_seconds(text)
