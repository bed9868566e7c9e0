"""What came out: judged, written to ``report.json`` and ``report.html``, and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo import audit, lake
from demo.faults import KINDS
from demo.page import page

_MUST_BE_ZERO = ("lost", "duplicated", "changed", "unexpected")
_FILES = (
    *("records", "manifest_rows", "rejects", "lost", "duplicated"),
    *("files", "orphans_before_vacuum", "orphans_after"),
)
_DAMAGE = ("lost", "duplicated", "altered")
_NAMES = {"oncely": "Oncely", "control": "foreachBatch + JDBC"}


def judge(found: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str]:
    """Return what did not come out as it must, in sentences; nothing is good news.

    Args:
        found: the report.
        answer: what the reader printed.
    """
    ours, control, published = found["oncely"], found["control"], found["published"]
    problems = [
        f"oncely: {ours[name]:,} {name}: {'; '.join(ours['examples'][:3])}"
        for name in _MUST_BE_ZERO
        if ours[name]
    ]
    if ours["rows"] + ours["rejects"] != ours["records"]:
        problems.append("oncely: rows and rejects together are not the records")
    apart = sum(rows != flights for _, _, rows, flights in ours["samples"])
    if apart:
        problems.append(f"oncely: at {apart} looks its rows were not those before its offsets")
    if ours["records"] != published["flights"] + published["broken"]:
        problems.append("the reader did not get as many records as were published")
    if answer["pipeline_code_imported"]:
        problems.append("the reader is not independent: it imported Oncely")
    for name, run in (("oncely", ours), ("control", control)):
        problems += _unfired(name, run["faults"])
    if not control["lost"] + control["duplicated"]:
        problems.append("control: no damage, though a fault was placed to do some")
    problems += audit.judge(found["audit"], ours["records"])
    return problems + _judge_files(found["files"])


def _judge_files(files: Mapping[str, Any]) -> list[str]:
    problems = [
        f"files: {files[name]:,} {name.replace('_', ' ')}: {'; '.join(files['examples'][:3])}"
        for name in (*_MUST_BE_ZERO, "broken_files")
        if files[name]
    ]
    verified, before, after = (
        files["verify"],
        files["orphans_before_vacuum"],
        files["orphans_after"],
    )
    checks = [
        (files["rows"] + files["rejects"] == files["records"] > 0,
         "rows and rejects together are not the records"),
        (files["manifest_rows"] == files["rows"],
         "the manifest names another number of rows than the files hold"),
        (not files["pipeline_code_imported"], "the reader is not independent: it imported Oncely"),
        (verified["ok"] and verified["files"] == files["files"],
         "verify has found something wrong, or another number of files"),
        (before > 0, "no orphan, though the pipeline was killed while files were staged"),
        (files["vacuum"]["removed"] == before and not after, f"vacuum has left {after:,} orphans"),
        (not files["missing"], f"{files['missing']:,} named files are gone after vacuum"),
    ]  # fmt: skip
    problems += [f"files: {text}" for good, text in checks if not good]
    for kind, (words, phase, _) in lake.KINDS.items():
        fired = [fault for fault in files["faults"] if fault["kind"] == kind]
        if not any(fault["target"] and fault["orphaned"] for fault in fired):
            problems.append(f"files: not fired, or it left nothing behind: {words}")
        if phase == "publishing" and not any(fault["open_messages"] for fault in fired):
            problems.append(f"files: not fired into an open transaction: {words}")
    return problems


def _unfired(name: str, faults: list[dict[str, Any]]) -> list[str]:
    into_open = {fault["kind"] for fault in faults if fault["open_transaction"]}
    return [
        f"{name}: not fired into an open transaction: {words}"
        for kind, (words, _) in KINDS.items()
        if kind not in into_open
    ]


def write(found: Mapping[str, Any], directory: Path) -> None:
    """Write both files."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (directory / "report.json").write_text(text + "\n", "utf-8")
    words = {kind: words for kind, (words, _) in KINDS.items()}
    of_files = {kind: words for kind, (words, _, _) in lake.KINDS.items()}
    (directory / "report.html").write_text(page(found, words, of_files), "utf-8")


def show(found: Mapping[str, Any], console: Console, directory: Path) -> None:
    """Print the table and what is wrong."""
    table = Table(title="\nWhat the topic holds, and what the tables hold", title_justify="left")
    table.add_column("")
    for name in ("records", "rows", "rejects", "lost", "duplicated"):
        table.add_column(name, justify="right")
    for name, title in _NAMES.items():
        run = found[name]
        wrong = run["lost"] or run["duplicated"]
        table.add_row(
            title,
            *(f"{run[n]:,}" for n in ("records", "rows", "rejects")),
            *(f"{run[n]:,}" for n in ("lost", "duplicated")),
            style="red" if wrong else "green",
        )
    console.print(table)
    control = found["control"]
    console.print(
        f"{_NAMES['control']} keeps no rejects: lost and duplicated are counted over good records"
        f" only;\nit dropped what it could not read and wrote {control['unexpected']:,} rows"
        " of broken records with holes in them."
    )
    console.print(_files_table(found["files"]))
    console.print(_audit_table(found["audit"]))
    console.print(f"the page of the damage is {found['audit']['page']}", soft_wrap=True)
    for problem in found["problems"]:
        console.print(f"[red]not as it must be:[/red] {problem}")
    console.print(f"{found['seconds']:.0f} s; the report is {directory / 'report.html'}")


def _audit_table(audited: Mapping[str, Any]) -> Table:
    table = Table(title="\nThe table, damaged on purpose and repaired", title_justify="left")
    table.add_column("oncely audit")
    for name in ("verdict", "records", "accounted", *_DAMAGE):
        table.add_column(name, justify="right")
    for name, words in audit.AUDITS.items():
        one = audited[name]
        counts = (
            *(one[what] for what in ("records", "accounted")),
            *map(one["found"].get, _DAMAGE),
        )
        style = "green" if one["verdict"] == "clean" else "red"
        table.add_row(words, one["verdict"], *(f"{n:,}" for n in counts), style=style)
    return table


def _files_table(files: Mapping[str, Any]) -> Table:
    table = Table(title="\nThe topic's last third, in files", title_justify="left")
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    for name in _FILES:
        wrong = files[name] and name in ("lost", "duplicated", "orphans_after")
        style = "red" if wrong else "green"
        table.add_row(name.replace("_", " "), f"{files[name]:,}", style=style)
    return table
