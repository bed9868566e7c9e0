"""The result of a check: the first broken step, and what could not be decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oncely.core.ranges import TopicPartition

Verdict = Literal["holds", "broken", "unknown"]

EXIT_CODES: Mapping[Verdict, int] = {"holds": 0, "broken": 1, "unknown": 4}

FIRST = (-1, -1)
"""The order of a problem that precedes all steps, such as a line that can't be read."""


@dataclass(frozen=True)
class Broken:
    """A step that the protocol does not allow.

    Attributes:
        rule: the broken rule; docs/events.md lists them.
        text: what is wrong, as a sentence.
        partition: its topic-partition; None if it concerns all.
        order: epoch and offset: of two broken steps the one with the lower order came first.
        context: ranges and events around it, in their order.
    """

    rule: str
    text: str
    partition: TopicPartition | None = None
    order: tuple[int, int] = FIRST
    context: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Keys ``rule``, ``text``, ``topic``, ``partition``, ``epoch``, ``offset``, ``context``."""
        topic, number = self.partition or (None, None)
        epoch, offset = (None, None) if self.order == FIRST else self.order
        return {
            "rule": self.rule, "text": self.text, "topic": topic, "partition": number,
            "epoch": epoch, "offset": offset, "context": list(self.context),
        }  # fmt: skip


@dataclass(frozen=True)
class Unknown:
    """A step that nothing stored can prove, and the reason."""

    text: str
    partition: TopicPartition | None = None

    def as_json(self) -> dict[str, Any]:
        """Keys ``text``, ``topic``, ``partition``."""
        topic, number = self.partition or (None, None)
        return {"text": self.text, "topic": topic, "partition": number}


Finding = Broken | Unknown


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        pipeline: its name.
        broken: the broken steps, the first one first; later ones may be its consequences.
        unknown: what could not be decided.
        checked: numbers of what was compared.
    """

    pipeline: str
    broken: Sequence[Broken] = ()
    unknown: Sequence[Unknown] = ()
    checked: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """A broken step outweighs what is not known."""
        if self.broken:
            return "broken"
        return "unknown" if self.unknown else "holds"

    @property
    def exit_code(self) -> int:
        """0 holds, 1 broken, 4 unknown."""
        return EXIT_CODES[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "pipeline": self.pipeline,
            "verdict": self.verdict,
            "first": self.broken[0].as_json() if self.broken else None,
            "broken": len(self.broken),
            "unknown": [one.as_json() for one in self.unknown],
            "checked": dict(self.checked),
        }
