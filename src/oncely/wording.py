"""Numbers and times in words."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def counted(**numbers: int) -> str:
    """``2 records, 1 row``, in the order of the arguments, which are nouns."""
    return ", ".join(plural(number, noun) for noun, number in numbers.items())


def duration(seconds: float) -> str:
    """A time in a readable form."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
