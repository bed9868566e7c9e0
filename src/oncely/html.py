"""The frame and the base style of HTML reports: one file, no scripts, no external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape

from oncely.wording import printable

_STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --ink: #1d2126; --soft: #5d6670;
  --rule: #d9d6d0; --lost: 168, 50, 31; --twice: 201, 134, 22; --fine: 27, 110, 70; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e4e6e8; --soft: #9aa4ae;
  --rule: #343a41; --lost: 226, 104, 84; --twice: 226, 166, 62; --fine: 92, 184, 138; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .75rem;
  text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 .75rem; }
p { max-width: 44rem; margin: 0 0 1rem; text-wrap: pretty; color: var(--soft); }
p strong { color: var(--ink); font-weight: 600; }
.key { display: flex; gap: .25rem 1.5rem; flex-wrap: wrap; font-size: .875rem;
  color: var(--soft); margin: 1rem 0 0; padding: 0; list-style: none; }
.key i { display: inline-block; width: .9rem; height: .9rem; border-radius: 3px;
  vertical-align: -.1rem; margin-right: .4rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .875rem; }
"""


def style_hash(style: str) -> str:
    """The source of a Content-Security-Policy that allows the styles of :func:`document`."""
    digest = hashlib.sha256((_STYLE + style).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def document(title: str, style: str, body: str, head: str = "") -> str:
    """A page of its own.

    Args:
        title: the page's title, as text.
        style: CSS after the base style.
        body: HTML; every text in it must be escaped.
        head: more HTML for the head.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n{head}</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(label: str, head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table that scrolls sideways; the first cell of a row is its heading.

    Args:
        label: the table's name, as text.
        head: the headings as HTML, after ``#`` over numbers.
        rows: the cells as HTML.
    """
    right = [' class="n"' if one.startswith("#") else "" for one in head]
    named = "".join(
        f'<th scope="col"{n}>{one.removeprefix("#")}</th>'
        for one, n in zip(head, right, strict=True)
    )
    body = (
        f'<tr><th scope="row"{right[0]}>{first}</th>'
        + "".join(f"<td{n}>{cell}</td>" for cell, n in zip(cells, right[1:], strict=True)) + "</tr>"
        for first, *cells in rows
    )  # fmt: skip
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{named}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def key(told: Mapping[str, str]) -> str:
    """What the colours of a drawing mean: styles, separated by spaces, and their meanings."""
    items = ""
    for styles, meaning in told.items():
        colours = "".join(f'<i class="{one}"></i>' for one in styles.split())
        items += f"<li>{colours}{meaning}</li>"
    return f'<ul class="key">{items}</ul>'


def facts(found: Iterable[tuple[str, str, str]]) -> str:
    """Numbers in boxes: name, value as HTML, and style."""
    cells = (f'<div class="{s}"><dt>{name}</dt><dd>{value}</dd></div>' for name, value, s in found)
    return f'<dl class="facts">{"".join(cells)}</dl>'


WIDTH = 1000.0
"""Of a drawing, in its own units."""


def svg(style: str, height: float, about: str, drawn: Iterable[str]) -> str:
    """A drawing that is as wide as its place; ``about`` tells a screen reader what it shows."""
    spoken = (
        f'role="img" aria-label="{escape(printable(about))}"' if about else 'aria-hidden="true"'
    )
    return (
        f'<svg class="{style}" viewBox="0 0 {WIDTH:g} {height:g}" preserveAspectRatio="none"'
        f" {spoken}>{''.join(drawn)}</svg>"
    )


def rect(style: str, left: float, width: float, top: float, height: float, told: str = "") -> str:
    """A part of a drawing; ``told`` is its text."""
    at = f'x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
    title = f"<title>{escape(printable(told))}</title>" if told else ""
    return f'<rect class="{style}" {at}>{title}</rect>'


def of_unknown(text: object, longest: int = 500) -> str:
    """A text of unknown origin, such as an id."""
    return f"<bdi>{escape(printable(str(text), longest))}</bdi>"


def time_of(at: datetime) -> str:
    """A time in UTC."""
    return f'<time datetime="{escape(at.isoformat())}">{at:%Y-%m-%d %H:%M:%S} UTC</time>'
