"""Values of the pipeline file other than texts and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, InstanceOf, PlainSerializer

from oncely.clients.sql.connection import TableName
from oncely.config.base import invalid, shown
from oncely.config.written import INTERVAL, SHARE, SIZE, START, TABLE, TIME, form_of, written
from oncely.sources.start import Moment, Start, parse_moment

Rounding = Literal["refuse", "allow"]


@dataclass(frozen=True)
class RejectBudget:
    """The number of records that may be rejected: a share of the records that were read, or a
    number.

    Attributes:
        share: between 0 and 1; exact, because 29 of 100 is within 29%.
        count: a number of records.
    """

    share: Fraction | None = None
    count: int | None = None

    def __str__(self) -> str:
        return f"{float(self.share * 100):g}%" if self.share is not None else str(self.count)

    @property
    def unlimited(self) -> bool:
        """True for 100%."""
        return self.share is not None and self.share >= 1

    def allowed(self, records: int) -> int:
        """The number of rejects among ``records`` records that is still within the budget."""
        if self.share is None:
            return self.count or 0
        return records * self.share.numerator // self.share.denominator


_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")


@written(SHARE)
def parse_budget(value: object) -> RejectBudget:
    """Parse ``"1%"`` or ``100``. Raises a problem for any other value."""
    if isinstance(value, RejectBudget):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return RejectBudget(count=value)
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or Fraction(match[1]) > 100:
        raise invalid(
            f"found {shown(value)}; allowed: a share from 0% to 100%, or a number of records",
            'write "1%", "0.5%" or 100; "100%" never stops the pipeline',
        )
    return RejectBudget(share=Fraction(match[1]) / 100)


def filled(way_out: str) -> Callable[[str], str]:
    """A check that a text is not blank."""

    def check(value: str) -> str:
        if not value.strip():
            raise invalid("is empty", way_out)
        return value

    return check


Budget = Annotated[
    InstanceOf[RejectBudget],
    BeforeValidator(parse_budget),
    PlainSerializer(str, when_used="json"),
]


_WORDS = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0}
_UNITS = {
    **_WORDS,
    **{f"{word}s": seconds for word, seconds in _WORDS.items()},
    **{"ms": 0.001, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0},
}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([a-z]+)")


@written(TIME)
def parse_seconds(value: object) -> float:
    """Parse ``"1 second"``, ``"500 ms"``, ``"2 minutes"`` as seconds."""
    match = _DURATION.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise invalid(
            f"found {shown(value)}; allowed: a number with ms, seconds, minutes or hours",
            'write "1 second", "500 ms" or "2 minutes"',
        )
    return float(match[1]) * unit


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kmg]?i?b)")
_BYTES = {"b": 1, **{f"{unit}b": 1000**n for n, unit in enumerate("kmg", 1)},
          **{f"{unit}ib": 1024**n for n, unit in enumerate("kmg", 1)}}  # fmt: skip


@written(SIZE)
def parse_size(value: object) -> int:
    """Parse ``"64 MiB"``, ``"100 MB"`` or a number as bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    unit = _BYTES.get(match[2]) if match else None
    if match is None or unit is None:
        raise invalid(
            f"found {shown(value)}; allowed: a number with KiB, MiB, GiB, KB, MB or GB",
            'write "64 MiB"',
        )
    return int(Fraction(match[1]) * unit)


N = TypeVar("N", int, float)


def between(
    parse: Callable[[object], N], least: float, most: float, limits: str, way_out: str
) -> Callable[[object], N]:
    """A parser that refuses what is outside of limits.

    Args:
        parse: :func:`parse_seconds` or :func:`parse_size`.
        least, most: the limits, which are allowed themselves.
        limits: the same in words.
        way_out: of the error.
    """

    def parser(value: object) -> N:
        found = parse(value)
        if not least <= found <= most:
            raise invalid(f"found {shown(value)}; allowed: {limits}", way_out)
        return found

    form = form_of(parse)
    return written(form, limits)(parser) if form else parser


@dataclass(frozen=True)
class CommitInterval:
    """The greatest distance between records and positions, or the size of one transaction.

    Attributes:
        records: maximum number of offsets.
        seconds: maximum number of seconds.
    """

    records: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.records is not None:
            return f"{self.records:,} records"
        return f"{self.seconds:g} seconds"


@written(INTERVAL)
def parse_interval(value: object) -> CommitInterval:
    """Parse ``10_000`` (records) or ``"5 seconds"``. Raises a problem for any other value."""
    if isinstance(value, CommitInterval):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return CommitInterval(records=value)
    if isinstance(value, str) and (seconds := parse_seconds(value)) > 0:
        return CommitInterval(seconds=seconds)
    raise invalid(
        f"found {shown(value)}; allowed: a number of records, or a time",
        'write 10_000 or "5 seconds"',
    )


@written(START)
def parse_start(value: object) -> Start:
    """Parse ``earliest``, ``latest`` or a time."""
    if isinstance(value, Moment):
        return value
    words: tuple[Literal["earliest", "latest"], ...] = ("earliest", "latest")
    for word in words:
        if value == word:
            return word
    try:
        if isinstance(value, str | date):
            return parse_moment(value)
    except ValueError:
        pass
    raise invalid(
        f"found {shown(value)}; allowed: earliest, latest, or an ISO 8601 time",
        'write "earliest", or a time like "2024-05-31T18:00:00Z" (UTC without an offset)',
    )


_PART = r'"(?:[^"]|"")+"|[A-Za-z_\u0080-\uffff][\w$]*'
_TABLE = re.compile(rf"\s*(?:({_PART})\s*\.\s*)?({_PART})\s*")


@written(TABLE)
def parse_table(value: object) -> TableName:
    """Parse ``table`` or ``schema.table`` as SQL does: a name in double quotes may be any text."""
    if isinstance(value, TableName):
        return value
    match = _TABLE.fullmatch(value) if isinstance(value, str) else None
    if match is None or "\0" in match[0]:
        raise invalid(
            f"found {shown(value)}; allowed: a table, or schema.table",
            """quote a name with other characters: 'public."my table"'""",
        )
    schema, name = (_unquoted(part) if part else None for part in match.groups())
    return TableName(schema, name or "")


def folded(value: object) -> list[str]:
    """The unquoted names of a table with capitals, which PostgreSQL folds to lower case."""
    match = _TABLE.fullmatch(value) if isinstance(value, str) else None
    parts = [part for part in match.groups() if part] if match else []
    return [part for part in parts if not part.startswith('"') and part != part.lower()]


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def quoted(table: TableName) -> str:
    """A table in the form that :func:`parse_table` reads."""
    parts = [part for part in table if part]
    plain = re.compile(r"[a-z_][a-z0-9_$]*")
    return ".".join(p if plain.fullmatch(p) else '"' + p.replace('"', '""') + '"' for p in parts)


Table = Annotated[
    InstanceOf[TableName],
    BeforeValidator(parse_table),
    PlainSerializer(quoted, when_used="json"),
]
