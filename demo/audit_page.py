"""The page's section about the audit."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from demo.audit import AUDITS, STEPS

_COUNTS = ("lost", "duplicated", "altered", "unexpected")


def section(audit: Mapping[str, Any]) -> str:
    """Return the section.

    Args:
        audit: what ``report.json`` holds under ``audit``.
    """
    return (
        f"<h2>Damage on purpose, found and repaired</h2><p>{_what(audit)}</p>{_audits(audit)}"
        + (f"<p></p>{_steps(audit)}")
    )


def _what(audit: Mapping[str, Any]) -> str:
    seconds = ", ".join(f"{audit[name]['seconds']:.1f} s" for name in AUDITS)
    return (
        "When the tables had been counted, <code>oncely audit</code> compared Oncely’s table with"
        f" the topic, offset by offset. Then {len(audit['done'])} rows were damaged by plain SQL,"
        " and audited again. <code>oncely repair --execute</code> wrote the lost records again,"
        " removed what was there twice, replaced what was altered, and audited at its end. The"
        f" audits took {seconds}. The audit of the damage has a page of its own beside this one,"
        f" <code>{escape(audit['page'].rpartition('/')[2])}</code>."
    )


def _audits(audit: Mapping[str, Any]) -> str:
    heads = "".join(
        f'<th scope="col" class="n">{words}</th>'
        for words in ("Verdict", "Records", "Accounted", *map(str.capitalize, _COUNTS))
    )
    rows = "".join(_audit(audit[name], words) for name, words in AUDITS.items())
    return (
        '<div class="table"><table><caption>Holes in the offsets, transaction markers and aborted'
        f" records ({audit['clean']['holes']:,}), are no losses.</caption>"
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _audit(one: Mapping[str, Any], words: str) -> str:
    tone = "good" if one["verdict"] == "clean" else "bad"
    counts = "".join(
        f'<td class="n{" bad" if one["found"][kind] else ""}">{one["found"][kind]:,}</td>'
        for kind in _COUNTS
    )
    return (
        f'<tr><th scope="row">{words.capitalize()}</th>'
        f'<td class="n {tone}">{escape(one["verdict"])}</td>'
        f'<td class="n">{one["records"]:,}</td><td class="n">{one["accounted"]:,}</td>{counts}</tr>'
    )


def _steps(audit: Mapping[str, Any]) -> str:
    rows = []
    for step in STEPS:
        places = [one[1:] for one in audit["damaged"]["findings"] if one[0] == step.finding]
        named = ", ".join(f"partition {partition} offset {offset}" for partition, offset in places)
        rows.append(
            f'<tr><th scope="row">{escape(step.words.capitalize())}'
            f"<small><code>{escape(step.shown)}</code></small></th>"
            f"<td>{step.finding}<small>{escape(named)}</small></td></tr>"
        )
    return (
        '<div class="table"><table><thead><tr><th scope="col">Done</th>'
        f'<th scope="col">Named by the audit</th></tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div>"
    )
