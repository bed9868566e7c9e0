"""Rejects of a pipeline that has exceeded its reject budget: counts, reasons and a sample.

None of them was written, so this is the only place where they are visible. Executors send the
sample unchanged; it is shortened when it is shown, after secrets were redacted: an executor does
not have every secret, and a truncated secret would not be recognised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncely.secrets import Secrets, redact

SAMPLE = 20
"""Records in a sample, at most."""

_GROUPS = 10
_EXAMPLES = 5  # records in the text of an error; the file contains the whole sample
KEPT = 16_384
"""Maximum bytes of a value that are sent to the driver."""
_REASON = 300  # characters
_VALUE = 200
# Parts that differ between records with the same mistake: quoted values, numbers, and the values in
# PostgreSQL's details: "Key (email)=(a@b.example) already exists", "Failing row contains (1, a)". A
# reason may be cut before the second quote.
_VARIABLE = re.compile(
    r"(?<!\w)'[^']*(?:'|$)|\"[^\"]*(?:\"|$)|(?:(?<==)|(?<=contains ))\(.*|\d+(?:\.\d+)?", re.DOTALL
)


def printable(text: str, longest: int | None = None) -> str:
    """A text of unknown origin on one line, in the order of its characters, and cut if it is long.

    Control characters, line ends, marks that reverse the direction of the text, and lone surrogates
    become escapes such as ``\\u202e``.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"


def paragraph(text: str) -> str:
    """A text of unknown origin whose line breaks stay: what :func:`printable` escapes otherwise is
    escaped, and the lines after the first are indented, so that none looks like a line of Oncely's.
    """
    return BREAK.sub(r"\g<0>  ", "\n".join(map(printable, text.split("\n"))))


BREAK = re.compile(r"(?<=[^\n])\n+(?=[^\n ])")
"""Line breaks within a text that begin a line without indentation."""


def json_line(value: Any, *, narrow: bool = False) -> str:
    """A value as JSON on one line; what :func:`printable` escapes is an escape of JSON.

    Args:
        value: may contain texts of unknown origin.
        narrow: ASCII only.
    """
    return json_escaped(json.dumps(value, ensure_ascii=narrow, default=str))


def json_escaped(line: str) -> str:
    """A line of JSON with the escapes of :func:`json_line`; its value is the same."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


class RejectSample(NamedTuple):
    """A rejected record and the reason. The value is None if it is unknown, or for a tombstone."""

    topic: str
    partition: int
    offset: int
    stage: str
    reason: str
    value: bytes | None

    def without(self, secrets: Secrets) -> RejectSample:
        """A copy with reason and value redacted."""
        text = "" if self.value is None else self.value.decode(errors="replace")
        clean = secrets.redact(text)
        value = self.value if clean == text else clean.encode()
        return self._replace(reason=secrets.redact(self.reason), value=value)

    def shown(self) -> dict[str, object]:
        """The record as written to the file: shortened, without secrets."""
        value = None if self.value is None else _short(self.value.decode(errors="replace"), _VALUE)
        place = {"topic": self.topic, "partition": self.partition, "offset": self.offset}
        return {
            **place,
            "stage": self.stage,
            "reason": _short(self.reason, _REASON),
            "value": value,
        }

    def __str__(self) -> str:
        shown = self.shown()
        value = "no value" if shown["value"] is None else f"value {shown['value']}"
        return f"{self.topic}-{self.partition} offset {self.offset}: {shown['reason']}; {value}"


@dataclass(frozen=True)
class RejectSummary:
    """A summary of rejects.

    Attributes:
        reasons: the most frequent reasons, each in the words of its first record, with the number
            of records. Reasons that differ only in numbers and quoted values are counted together.
        records: a sample, with records of every reason.
    """

    reasons: tuple[tuple[str, int], ...] = ()
    records: tuple[RejectSample, ...] = ()

    @classmethod
    def of(
        cls,
        reasons: Sequence[str],
        records: Callable[[Sequence[int]], Iterable[RejectSample]],
    ) -> RejectSummary:
        """Count reasons and choose a sample.

        Args:
            reasons: the reason of each reject.
            records: returns the records at some indices.
        """
        groups = by_reason(reasons)
        frequent = tuple((reasons[own[0]], len(own)) for own in groups[:_GROUPS])
        return cls(frequent, tuple(records(_sample(groups))))

    def without(self, secrets: Secrets) -> RejectSummary:
        """A copy with reasons and values redacted."""
        reasons = tuple((secrets.redact(reason), count) for reason, count in self.reasons)
        return RejectSummary(reasons, tuple(one.without(secrets) for one in self.records))

    def lines(self) -> list[str]:
        """Lines for a text: reasons with their counts, then examples."""
        found = [f"{count:,} x {_short(reason, _REASON)}" for reason, count in self.reasons]
        return [*found, *(f"for example {one}" for one in self.records[:_EXAMPLES])]

    def as_json_lines(self) -> Iterator[str]:
        """Lines for a file: one for each reason, then one for each record of the sample."""
        for reason, count in self.reasons:
            yield json_line({"reason": _short(reason, _REASON), "records": count})
        for one in self.records:
            yield json_line(one.shown())


def masked(reason: str) -> str:
    """The reason without quoted values and numbers, which may be parts of the record."""
    return _VARIABLE.sub("…", reason)


def by_reason(reasons: Sequence[str]) -> list[list[int]]:
    """Indices by reason, ignoring numbers and quoted values; the largest group first."""
    groups: dict[str, list[int]] = {}
    for at, reason in enumerate(reasons):
        groups.setdefault(masked(reason), []).append(at)
    return sorted(groups.values(), key=len, reverse=True)


def _sample(groups: Sequence[Sequence[int]]) -> list[int]:
    """Indices of at most :data:`SAMPLE` records, taken from the groups in turn."""
    longest = max(map(len, groups), default=0)
    dealt = [own[turn] for turn in range(min(longest, SAMPLE)) for own in groups if turn < len(own)]
    return dealt[:SAMPLE]


def _short(text: str, length: int) -> str:
    clean = redact(text)
    return clean if len(clean) <= length else f"{clean[:length]}… ({len(clean):,} characters)"
