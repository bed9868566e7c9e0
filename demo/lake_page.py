"""The page's section about files."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_COUNTS = (
    ("records", "Records in that part of the topic"),
    ("manifest_rows", "Rows in the files that the manifest names"),
    ("rejects", "Dead letters, with their bytes"),
    ("lost", "Lost"),
    ("duplicated", "Duplicated"),
    ("changed", "Rows unlike their record, or in another folder"),
    ("unexpected", "Rows of broken or aborted records"),
    ("files", "Files that the manifest names"),
    ("broken_files", "Named files that are missing or unlike their checksum"),
    ("orphans_before_vacuum", "Orphans that the kills have left, before vacuum"),
    ("orphans_after", "Orphans after vacuum"),
)
_PLAIN = ("records", "manifest_rows", "rejects", "files", "orphans_before_vacuum")


def section(files: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    """Return the section.

    Args:
        files: what ``report.json`` holds under ``files``.
        kinds: kind of fault to its name in words.
    """
    return (
        "<h2>The same topic into files</h2>"
        f"<p>{_what(files)}</p>{_counts(files)}<p></p>{_faults(files, kinds)}<p></p>"
        f"<p>{_how(files)}</p>"
    )


def _what(files: Mapping[str, Any]) -> str:
    return (
        "A third pipeline took the last third of the topic into Avro files, in folders by carrier,"
        " date and hour of the flight. Nobody had told it the columns: it inferred them for each"
        f" carrier, and kept {files['schemas']} schemas in a topic of their own. Files are written"
        " where they will stay, and nobody reads them until one Kafka transaction names them, with"
        " dead letters and offsets. So a kill leaves files that nobody names: orphans."
    )


def _counts(files: Mapping[str, Any]) -> str:
    rows = []
    for name, words in _COUNTS:
        tone = "" if name in _PLAIN else " bad" if files[name] else " good"
        rows.append(
            f'<tr><th scope="row">{words}</th><td class="n{tone}">{files[name]:,}</td></tr>'
        )
    return (
        '<div class="table" style="max-width: 44rem"><table><caption>Counted by a plain'
        " consumer of the manifest topic and fastavro.</caption>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _faults(files: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    rows = "".join(_fault(files, kind, words) for kind, words in kinds.items())
    heads = "".join(
        f'<th scope="col"{mark}>{words}</th>'
        for words, mark in (
            ("Fault", ""),
            ("When", ' class="n"'),
            ("Files staged, unnamed", ' class="n"'),
            ("of them orphans in the end", ' class="n"'),
        )
    )
    return (
        '<div class="table"><table><caption>Each was fired while the whole pipeline stood still.'
        " What was staged by what was killed is written again under other names. Workers whose"
        " driver is gone may write on for a moment, so there may be more orphans than these."
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _fault(files: Mapping[str, Any], kind: str, words: str) -> str:
    head = f'<th scope="row">{escape(words)}'
    for fault in files["faults"]:
        if fault["kind"] == kind:
            inside = fault["open_messages"]
            more = fault["target"] or "nothing was hit"
            if inside:
                more += f"; transaction open, {inside:,} messages of the manifest in it"
            numbers = (f"{fault['at']:.1f} s", f"{fault['staged']:,}", f"{fault['orphaned']:,}")
            cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
            return f"<tr>{head}<small>{escape(more)}</small></th>{cells}</tr>"
    return f'<tr>{head}</th><td class="bad" colspan="3">not fired</td></tr>'


def _how(files: Mapping[str, Any]) -> str:
    verify, vacuum = files["verify"], files["vacuum"]
    waited = files["waited_seconds"]
    return (
        f"The pipeline ran {files['run_seconds']:.0f} s, before the other two, and was started"
        f" again {len(files['restarts'])} times. After them, <code>oncely files verify</code>"
        f" fetched {verify['files']:,} files again and found"
        f" {'nothing' if verify['ok'] else 'something'} wrong. A reader that shares no code with"
        " Oncely followed the manifest with <code>read_committed</code>, compared the SHA-256 of"
        " each file, read it with fastavro, and compared row by row with the topic."
        f" <code>oncely files vacuum</code> then removed {vacuum['removed']:,} files"
        f" ({vacuum['bytes'] / 1e6:,.1f} MB). It takes only what is older than"
        " <code>max_staging_age</code>, the transaction’s timeout and a minute of slack, here"
        " 130 s; they had passed while the other two pipelines ran"
        + (f", but for {waited:.0f} s that were waited for" if waited else "")
        + ". No clock was changed. After that every named file was still there"
        + (f", but {files['missing']:,}." if files["missing"] else ".")
    )
