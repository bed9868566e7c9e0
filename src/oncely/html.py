"""The frame and the base style of HTML reports: one file, no scripts, no external resources."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime
from html import escape

from oncely.reject_summary import printable

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


def of_unknown(text: object, longest: int = 500) -> str:
    """A text of unknown origin, such as an id."""
    return f"<bdi>{escape(printable(str(text), longest))}</bdi>"


def time_of(at: datetime) -> str:
    """A time in UTC."""
    return f'<time datetime="{escape(at.isoformat())}">{at:%Y-%m-%d %H:%M:%S} UTC</time>'
