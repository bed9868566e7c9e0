"""The page that Prometheus scrapes: metrics of registries of our own, none of the process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "exposition", "gauge"]


def gauge(
    name: str, told: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Values of the moment, with the values of their labels."""
    made = GaugeMetricFamily(name, told, labels=labels)
    for values, value in samples:
        made.add_metric(values, value)
    return made


@dataclass
class _Page:
    """Metrics by name, as ``generate_latest`` asks for them."""

    by_name: dict[str, Metric] = field(default_factory=dict)

    def collect(self) -> Iterable[Metric]:
        return self.by_name.values()


def exposition(metrics: Iterable[Metric]) -> str:
    """The page in text format 0.0.4, with the version; samples of a name are put together."""
    page, version = _Page(), importlib.metadata.version("oncely")
    built = gauge("oncely_build_info", "The version of Oncely.", ["version"], [([version], 1)])
    for one in (built, *metrics):
        samples = [each for each in one.samples if each.name != f"{one.name}_created"]
        known = page.by_name.setdefault(one.name, one)
        known.samples = samples if known is one else [*known.samples, *samples]
    return generate_latest(page).decode()
