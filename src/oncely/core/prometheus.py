"""Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """A value with its labels; ``suffix`` is that of a histogram's parts."""

    labels: Mapping[str, str]
    value: float
    suffix: str = ""


class Metric(NamedTuple):
    """All samples of a name."""

    name: str
    told: str
    samples: Sequence[Sample]
    kind: Literal["counter", "gauge", "histogram"] = "gauge"


@dataclass
class Histogram:
    """Counts of values by their upper bounds."""

    bounds: tuple[float, ...]
    total: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self, labels: Mapping[str, str]) -> list[Sample]:
        """Cumulative counts, sum and count."""
        cumulated = list(accumulate(self._counts))
        bounds = [*map(str, self.bounds), "+Inf"]
        return [
            *(
                Sample({**labels, "le": bound}, count, "_bucket")
                for bound, count in zip(bounds, cumulated, strict=True)
            ),
            Sample(labels, self.total, "_sum"),
            Sample(labels, cumulated[-1], "_count"),
        ]


def exposition(metrics: Iterable[Metric]) -> str:
    """The page that Prometheus reads; samples of the same name are put together."""
    merged: dict[str, Metric] = {}
    for one in metrics:
        known = merged.setdefault(one.name, one)
        if known is not one:
            merged[one.name] = known._replace(samples=[*known.samples, *one.samples])
    return "\n".join([line for one in merged.values() for line in _lines(one)] + [""])


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.told}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for one in metric.samples:
        shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in one.labels.items())
        yield f"{metric.name}{one.suffix}{{{shown}}} {one.value!r}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
