"""The picture: committed offsets over time and rows beyond them, faults marked, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _LEFT, _RIGHT = 940, 56, 118
_TOP, _OFFSETS, _GAP, _AHEAD, _BETWEEN, _BOTTOM = 58, 168, 34, 60, 92, 46
_RADIUS = 9
_RUN = _OFFSETS + _GAP + _AHEAD + _BETWEEN


@dataclass(frozen=True)
class _Panel:
    """Seconds and counts to the coordinates of one panel."""

    seconds: float
    least: float
    most: float
    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, at: float) -> float:
        return round(_LEFT + at / self.seconds * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, count: float) -> float:
        share = (count - self.least) / (self.most - self.least)
        return round(self.bottom - self.height * share, 1)


def picture(found: Mapping[str, Any], numbers: Mapping[str, int], titles: Mapping[str, str]) -> str:
    """Return an ``<svg>`` with two panels for each run, all runs on common scales.

    Args:
        found: what ``report.json`` holds; a sample is (seconds, committed offsets, rows, flights
            before those offsets).
        numbers: kind of fault to its number.
        titles: key of a run in ``found`` to its title.
    """
    runs = [found[name] for name in titles]
    seconds = max(run["run_seconds"] for run in runs) * 1.005
    most = max(found["published"]["offsets"], *(run["samples"][-1][1] for run in runs)) * 1.05
    ahead = [value for run in runs for _, value in _ahead(run["samples"])]
    beyond = max(1_000.0, max(ahead) * 1.1)
    height = _TOP + len(runs) * _RUN - _BETWEEN + _BOTTOM
    parts = [f"<desc>{escape(_described(found, titles))}</desc>"]
    for index, (name, title) in enumerate(titles.items()):
        top = _TOP + index * _RUN
        upper = _Panel(seconds, 0, most, top, _OFFSETS)
        lower = _Panel(seconds, min(0, *ahead), beyond, upper.bottom + _GAP, _AHEAD)
        parts.append(_run(found[name], title, upper, lower, numbers))
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    parts.append(_text(middle, height - 6, "seconds since the run began", "axis", "middle"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg"'
        ' aria-label="Committed offsets over time, and rows beyond them">'
        + "".join(parts)
        + "</svg>"
    )


def _ahead(samples: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """(seconds, rows that no committed offset accounts for)."""
    return [(at, rows - flights) for at, _, rows, flights in samples]


def _described(found: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    return " ".join(
        f"{title}: {len(found[name]['faults'])} faults in {found[name]['run_seconds']:.0f} seconds,"
        f" {found[name]['rows']:,} rows at the end, {found[name]['lost']:,} lost,"
        f" {found[name]['duplicated']:,} duplicated."
        for name, title in titles.items()
    )


def _run(
    run: Mapping[str, Any], title: str, upper: _Panel, lower: _Panel, numbers: Mapping[str, int]
) -> str:
    offsets = [(at, count) for at, count, *_ in run["samples"]]
    ahead = _ahead(run["samples"])
    return "".join(
        (
            _heading(run, title, upper),
            _grid(upper, 4),
            _grid(lower, 2),
            _seconds(lower),
            _faults(run["faults"], upper, lower, numbers),
            _text(_LEFT + 8, upper.top + 14, "offsets committed", "offsets-ink", "start"),
            _text(_LEFT, lower.top - 8, "rows beyond the committed offsets", "ahead-ink", "start"),
            f'<path class="offsets" d="{_stairs(offsets, upper)}"/>',
            f'<path class="area" d="{_stairs(ahead, lower)}V{lower.y(0)}H{lower.x(0)}Z"/>',
            f'<path class="ahead" d="{_stairs(ahead, lower)}"/>',
            _end(offsets[-1], upper, "offsets-ink", "offsets"),
            _end(ahead[-1], lower, "ahead-ink", "rows", signed=True),
        )
    )


def _heading(run: Mapping[str, Any], title: str, panel: _Panel) -> str:
    verdict = f"{run['lost']:,} lost, {run['duplicated']:,} duplicated"
    tone = "bad-ink" if run["lost"] or run["duplicated"] else "good-ink"
    return (
        f'<text x="{_LEFT}" y="{panel.top - 38}"><tspan class="name">{escape(title)}</tspan>'
        f'<tspan class="{tone}" dx="12">{verdict}</tspan></text>'
    )


def _grid(panel: _Panel, about: int) -> str:
    parts = []
    for value in _ticks(panel.most, about):
        y = panel.y(value)
        kind = "grid" if value else "base"
        parts.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        )
        label = f"{value / 1000:,.10g}k" if value else "0"
        parts.append(_text(_LEFT - 8, y + 4, label, "axis", "end"))
    return "".join(parts)


def _seconds(panel: _Panel) -> str:
    return "".join(
        f'<line class="base" x1="{panel.x(at)}" x2="{panel.x(at)}" y1="{panel.bottom}"'
        f' y2="{panel.bottom + 4}"/>'
        + _text(panel.x(at), panel.bottom + 18, f"{at:g}", "axis", "middle")
        for at in _ticks(panel.seconds, 8)
    )


def _ticks(most: float, about: int) -> list[float]:
    """Round numbers from zero up to ``most``, ``about`` so many."""
    rough = most / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    return [step * number for number in range(int(most / step) + 1)]


def _stairs(points: Sequence[tuple[float, float]], panel: _Panel) -> str:
    """A staircase: what was committed stays so until more is."""
    last = points[0][1]
    path = [f"M{panel.x(points[0][0])} {panel.y(last)}"]
    for at, value in points[1:]:
        if value != last:
            last = value
            path.append(f"H{panel.x(at)}V{panel.y(value)}")
    path.append(f"H{panel.x(points[-1][0])}")
    return "".join(path)


def _faults(
    faults: Sequence[Mapping[str, Any]], upper: _Panel, lower: _Panel, numbers: Mapping[str, int]
) -> str:
    parts = []
    last = -math.inf
    for fault in faults:
        x = upper.x(fault["at"])
        # Markers of faults that are close in time stand side by side, their lines where they are.
        dot = last = max(x, last + 2 * _RADIUS + 3)
        y = upper.top - 16
        bend = f"M{dot} {y}L{x} {upper.top - 3}V{upper.bottom}M{x} {lower.top}V{lower.bottom}"
        parts.append(f'<path class="fault" d="{bend}"/>')
        parts.append(f'<circle class="dot" cx="{dot}" cy="{y}" r="{_RADIUS}"/>')
        parts.append(_text(dot, y + 4, str(numbers[fault["kind"]]), "dot-ink", "middle"))
    return "".join(parts)


def _end(
    point: tuple[float, float], panel: _Panel, tone: str, word: str, *, signed: bool = False
) -> str:
    """The last value, beside the line's end."""
    at, value = point
    number = f"{value:+,.0f}" if signed and value else f"{value:,.0f}"
    return _text(panel.x(at) + 8, panel.y(value) + 4, f"{number} {word}", tone, "start")


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
