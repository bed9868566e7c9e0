"""Damage as a value, and the comparison of what was done with what the audit reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from oncely.audit import Report
from oncely.audit.report import FindingKind, Verdict

_WORSE: Sequence[Verdict] = ("clean", "unknown", "damaged")

Place = tuple[int, int]
"""Partition and offset."""


class Named(NamedTuple):
    """A finding that the audit must report."""

    finding: FindingKind
    partition: int
    offset: int


@dataclass(frozen=True)
class Damage:
    """One damage.

    Attributes:
        kind: its name in the result.
        places: the damaged records; each must be named.
        findings: the kinds of finding that name them. Several where rows do not contain their
            offsets: an altered row is a row that is lost, and one that nobody expects.
        verdict: of a report that is right, if there is no other damage.
        text: what the report must tell where no record can be named.
        partitions: those that must be told as undecided, each with this text.
    """

    kind: str
    places: frozenset[Place] = frozenset()
    findings: tuple[FindingKind, ...] = ()
    verdict: Verdict = "damaged"
    text: str = ""
    partitions: frozenset[int] = frozenset()

    @classmethod
    def at(cls, kind: str, places: Iterable[Place], *findings: FindingKind) -> Damage:
        """Damage of these records."""
        return cls(kind, frozenset(places), findings)

    @classmethod
    def unknown(cls, kind: str, text: str, partitions: Iterable[int]) -> Damage:
        """Damage after which nothing of these partitions can be proved."""
        return cls(kind, verdict="unknown", text=text, partitions=frozenset(partitions))

    @classmethod
    def moved(cls, kind: str, partition: int, lost: Iterable[Place]) -> Damage:
        """A position that was moved: forward over lost records, or back before rows that are right;
        then the ledger is what is wrong."""
        places = frozenset(lost)
        text = "the ledger does not account for"
        return cls.at(kind, places, "lost") if places else cls.unknown(kind, text, [partition])

    @classmethod
    def noted(cls, kind: str, text: str) -> Damage:
        """Damage without an effect on records, which the report tells."""
        return cls(kind, verdict="clean", text=text)

    @classmethod
    def harmless(cls, kind: str) -> Damage:
        """What somebody may do without damage."""
        return cls(kind, verdict="clean")

    @property
    def is_harmless(self) -> bool:
        """True if a report need not tell anything."""
        return self.verdict == "clean" and not self.text

    def is_found(self, report: Report, reported: Set[Named]) -> bool:
        """True if each of the records is named, or each of the partitions."""
        if self.partitions:
            undecided = {
                one.partition.partition
                for one in report.undecided
                if one.partition is not None and self.text in one.reason
            }
            return self.partitions <= undecided
        if self.text:
            told = [*report.limits, *(one.detail for one in report.findings)]
            return any(self.text in one for one in told)
        return all(
            any(Named(finding, *place) in reported for finding in self.findings)
            for place in self.places
        )


Throw = Callable[[], AbstractContextManager[Sequence[Damage]]]
"""Does a damage; the end of the context undoes it."""


class World(Protocol):
    """A destination that a pipeline has filled.

    Attributes:
        name: the sink's kind.
    """

    name: str

    def throw(self, random: Random, number: int) -> AbstractContextManager[Sequence[Damage]]:
        """Damage that many records at random; the end of the context undoes it."""

    def large(self, random: Random) -> Iterator[Throw]:
        """Damages that are done alone: to a file, a ledger, a topic."""

    def last(self, random: Random) -> Iterator[Throw]:
        """Damages that are not undone."""

    def audit(self) -> Report:
        """Audit the destination, with all findings listed."""


@dataclass
class Tally:
    """The result of the truth test.

    Attributes:
        thrown: by kind, the number of damages.
        found: by kind, the number of those that were named.
        harmless: by kind, the number of audits after what is no damage.
        missed: damages that were not named.
        invented: findings that name no damage, and verdicts that are wrong.
        reasons: what the audits that missed a damage could not prove.
    """

    thrown: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    missed: list[Damage] = field(default_factory=list)
    invented: list[Named | str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    def compare(self, world: str, damages: Sequence[Damage], report: Report) -> None:
        """Count the damages that a report names, and what it names beside them."""
        reported = {_named(one) for one in report.findings}
        for damage in damages:
            kind = f"{world}: {damage.kind}"
            if damage.is_harmless:
                self.harmless[kind] += 1
                continue
            self.thrown[kind] += 1
            if damage.is_found(report, reported):
                self.found[kind] += 1
            else:
                self.missed.append(damage)
                self.reasons.update(one.reason for one in report.undecided)
        known = {
            Named(finding, *place)
            for damage in damages
            for place in damage.places
            for finding in damage.findings
        }
        self.invented += sorted(reported - known)
        self._conclusion(world, damages, report)

    def failed(self, world: str, damages: Sequence[Damage], error: Exception) -> None:
        """Count damages whose audit has ended with an error."""
        self.thrown.update(f"{world}: {one.kind}" for one in damages)
        self.missed += damages
        self.reasons.add(f"{world}: {type(error).__name__}: {error}")

    def _conclusion(self, world: str, damages: Sequence[Damage], report: Report) -> None:
        """The verdict, and the number of findings."""
        right = max((one.verdict for one in damages), key=_WORSE.index, default="clean")
        what = ", ".join(sorted({one.kind for one in damages})) or "no damage"
        if report.verdict != right:
            self.invented.append(f"{world}: verdict {report.verdict} of {what}")
            self.reasons.update(one.reason for one in report.undecided)
        if sum(report.found.values()) != len(report.findings):
            self.invented.append(f"{world}: findings that are counted but not listed, of {what}")

    def thrown_at(self, world: str) -> int:
        """The number of damages of a destination."""
        return sum(n for kind, n in self.thrown.items() if kind.startswith(f"{world}:"))

    @property
    def is_right(self) -> bool:
        """True if everything was found and nothing was invented."""
        return not self.missed and not self.invented


def _named(finding: object) -> Named:
    partition = getattr(finding, "partition", None)
    offset = getattr(finding, "offset", None)
    kind: FindingKind = getattr(finding, "kind")  # noqa: B009 - of oncely.audit.report.Finding
    return Named(kind, -1 if partition is None else partition.partition,
                 -1 if offset is None else offset)  # fmt: skip
